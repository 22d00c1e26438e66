"""Tokens are derived deterministically, and an invalid key is rejected with a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.errors import InputError
from goodput_operator.manager.runtime import MIN_KEY_BYTES, read_key
from goodput_operator.render.secrets import control_token

if TYPE_CHECKING:
    from pathlib import Path

KEY = b"0123456789abcdef0123456789abcdef"
NAME = st.from_regex(r"[a-z0-9-]{1,40}", fullmatch=True)


def test_a_token_never_changes_while_key_service_and_revision_are_the_same() -> None:
    token = control_token(KEY, service_uid="6880b64b", revision="chat-1")
    assert token == control_token(KEY, service_uid="6880b64b", revision="chat-1")
    # Engines that an older operator started must accept the token of this one.
    assert token == "50135724ddc7d090660dff6747ff0ab8e11058a2552d0e6bb1c22087ee5a57a9"


@given(one=st.tuples(NAME, NAME), other=st.tuples(NAME, NAME))
def test_different_revisions_have_different_tokens(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    tokens = [control_token(KEY, service_uid=uid, revision=name) for uid, name in (one, other)]
    assert (tokens[0] == tokens[1]) == (one == other)


def test_another_key_makes_another_token() -> None:
    other = control_token(b"x" * 32, service_uid="u", revision="r")
    assert other != control_token(KEY, service_uid="u", revision="r")


def test_a_key_is_read_unchanged(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    assert read_key(tmp_path / "key") == KEY


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "--key-file"), (b"short", f"at least {MIN_KEY_BYTES}"), (b"", "head -c 32")],
    ids=["missing", "short", "empty"],
)
def test_an_invalid_key_file_is_rejected_with_a_remedy(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        read_key(tmp_path / "key")
    assert "short" not in str(caught.value), "the error does not contain the key"
