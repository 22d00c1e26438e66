"""Parsing the text of a manifest file, valid or not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.errors import GoodputError, InputError
from goodput_core.spec.manifest import MAX_MANIFEST_BYTES, parse_manifest, read_manifest_text

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat.yaml"
CHAT = EXAMPLE.read_text(encoding="utf-8")


def parse(text: str) -> LLMService:
    return parse_manifest(text, source="m.yaml", yaml=yaml)


def test_a_manifest_is_read() -> None:
    assert parse(CHAT).metadata.name == "chat"


def test_json_is_yaml_too() -> None:
    assert parse(json.dumps(yaml.safe_load(CHAT))) == parse(CHAT)


def test_empty_documents_around_a_manifest_are_ignored() -> None:
    assert parse(f"---\n---\n{CHAT}\n---\n") == parse(CHAT)


def test_an_anchor_may_be_used_as_an_alias() -> None:
    text = CHAT.replace("ttftMs: 500", "ttftMs: &t 500").replace("ttftMs: 30000", "ttftMs: *t")
    assert [c.ttft_ms for c in parse(text).spec.slo.classes] == [500, 500]


MERGE_BOMB = "a0: &a0 {x: 1}\n" + "\n".join(
    f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 60)
)
NOT_ONE_MANIFEST = {
    "empty": ("", "is empty"),
    "a-comment": ("# nothing yet\n", "is empty"),
    "two-documents": (f"{CHAT}\n---\n{CHAT}", "holds 2 documents"),
    "a-list": ("- a\n", "must be a mapping, not a list"),
    "a-word": ("hello", "must be a mapping, not text"),
    "html": ("<html><body>404</body></html>", "must be a mapping, not text"),
    "a-tab": ("a:\n\tb: 1", "cannot be read as YAML"),
    "half-a-flow": ("{a: [1, 2", "cannot be read as YAML"),
    "a-nul": ("a: \0", "cannot be read as YAML"),
    "deep": ("[" * 5000, "cannot be read as YAML"),
    "python-object": ("!!python/object/apply:os.system ['true']", "cannot be read as YAML"),
    "no-such-date": ("a: 2024-13-45", "cannot be read as YAML"),
    "list-as-key": ("? [a]\n: 1", "cannot be read as YAML"),
    "an-int-of-nothing": ("a: !!int ''", "cannot be read as YAML"),
    "a-bool-of-something": ("a: !!bool 'maybe'", "cannot be read as YAML"),
    "a-timestamp-of-something": ("a: !!timestamp 'noon'", "cannot be read as YAML"),
    "a-mapping-of-a-list": ("a: !!map [b]", "cannot be read as YAML"),
    "a-giant-integer": (f"a: {'9' * 5000}", "cannot be read as YAML"),
    "unknown-alias": ("a: *b", "cannot be read as YAML"),
    "a-key-twice": (
        CHAT.replace("  model:", "  replicas: 3\n  model:"),
        "line 17: the key 'replicas'",
    ),
    "merge-key": ("a: &a {x: 1}\nb: {<<: *a}", "line 2: merge keys"),
    "merge-bomb": (MERGE_BOMB, "merge keys"),
}


@pytest.mark.parametrize(("text", "words"), NOT_ONE_MANIFEST.values(), ids=NOT_ONE_MANIFEST)
def test_a_text_without_exactly_one_manifest_is_rejected_with_a_sentence(
    text: str, words: str
) -> None:
    with pytest.raises(InputError) as caught:
        parse(text)
    sentence = str(caught.value)
    assert sentence.startswith("m.yaml: ")
    assert words in sentence
    assert "\n" not in sentence
    assert len(sentence) < 400


def test_a_file_above_1_mib_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(b"#" * (MAX_MANIFEST_BYTES + 1))
    with pytest.raises(InputError, match=r"m\.yaml: over 1 MiB"):
        read_manifest_text(path)


def test_nested_aliases_are_rejected_at_once() -> None:
    lines = [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    text = CHAT.replace("  replicas: 2", "  replicas: *a59").replace(
        "spec:", "status:\n  a0: &a0 [ha]\n  " + "\n  ".join(lines) + "\nspec:"
    )
    started = time.monotonic()
    with pytest.raises(InputError, match=r"spec\.replicas: must be a whole number, not a list"):
        parse(text)
    assert time.monotonic() - started < 5


def test_a_field_is_named_with_its_file() -> None:
    with pytest.raises(InputError, match=r"^m\.yaml: spec\.slo\.classes\[0\]\.ttftMs: must be"):
        parse(CHAT.replace("ttftMs: 500", "ttftMs: 500ms"))


@given(st.text(max_size=200) | st.text(alphabet="{}[]:,-&*!|>#%'\"\n ab1<", max_size=60))
def test_any_text_is_rejected_with_a_sentence(text: str) -> None:
    with pytest.raises(GoodputError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
