"""Invalid manifest files: each error is one sentence that names the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from goodput_core.errors import ExitCode, InputError
from goodput_operator.local.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

CHAT = Path(__file__).parents[2] / "examples" / "chat.yaml"


def test_a_manifest_and_its_text_are_read() -> None:
    service, text = read_manifest(CHAT)
    assert service.metadata.name == "chat"
    assert text == CHAT.read_text(encoding="utf-8")


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + CHAT.read_bytes())
    assert read_manifest(path)[1] == CHAT.read_text(encoding="utf-8")


def nothing(path: Path) -> None:
    pass


def a_loop(path: Path) -> None:
    path.symlink_to(path)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (nothing, "no such file"),
    "a-directory": (Path.mkdir, "is a directory"),
    "a-named-pipe": (os.mkfifo, "is not a regular file"),
    "a-dangling-link": (lambda p: p.symlink_to("nowhere"), "no such file"),
    "a-loop-of-links": (a_loop, "cannot be read"),
    "empty": (Path.touch, "is empty"),
    "not-utf-8": (lambda p: p.write_bytes(b"a: \xff"), "byte 3 is not UTF-8"),
    "utf-16": (lambda p: p.write_text("a: b", encoding="utf-16"), "byte 0 is not UTF-8"),
    "too-large": (lambda p: p.write_bytes(b"#" * (1 << 20) + b"\n"), "over 1 MiB"),
    "a-repeated-key": (lambda p: p.write_text("a: 1\na: 2"), "the key 'a' is already used above"),
    "a-wrong-field": (
        lambda p: p.write_text(CHAT.read_text().replace("ttftMs: 500", "ttftMs: 0.5s")),
        "spec.slo.classes[0].ttftMs: must be a whole number of milliseconds without a unit",
    ),
}


@pytest.mark.parametrize(("make", "words"), WRONG.values(), ids=WRONG)
def test_a_file_without_a_valid_manifest_is_rejected_in_a_sentence(
    make: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.yaml"
    make(path)
    with pytest.raises(InputError) as caught:
        read_manifest(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE


def test_an_invalid_file_name_is_rejected() -> None:
    with pytest.raises(InputError, match=r"cannot be read|no such file"):
        read_manifest(Path("a\0b"))


def test_an_unreadable_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.touch(mode=0)
    user = os.geteuid()
    if user == 0:  # root can read every file
        os.seteuid(65534)
    try:
        with pytest.raises(InputError, match="permission denied; check its permissions"):
            read_manifest(path)
    finally:
        os.seteuid(user)
