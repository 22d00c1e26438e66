"""The decoder rejects every value that is not a manifest with a `SpecError`."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from goodput_core.declaration import camel_case, spec_field
from goodput_core.errors import SpecError
from goodput_core.spec.codec import decode, format_value
from goodput_core.spec.llmservice import LLMService

VALID: dict[str, Any] = {
    "apiVersion": "goodput.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"source": "emulated://p"},
        "slo": {"classes": [{"name": "a", "ttftMs": 1, "tpotMs": 1}]},
    },
}

KEYS = [
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    "name",
    "labels",
    "model",
    "source",
    "engine",
    "tokenBudget",
    "min",
    "max",
    "policy",
    "resources",
    "limits",
    "replicas",
    "router",
    "slo",
    "classes",
    "ttftMs",
    "objective",
    "default",
    "control",
    "mode",
    "rollout",
    "gate",
    "window",
    "status",
]
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.dates()
    | st.binary(max_size=5)
)
# Keys that a manifest has, so that arbitrary values also reach the fields that are deep inside.
keys = (
    st.sampled_from(KEYS)
    | st.text(max_size=8)
    | st.integers()
    | st.none()
    | st.tuples(st.text(max_size=2))
)
values = st.recursive(
    leaves, lambda v: st.lists(v, max_size=4) | st.dictionaries(keys, v, max_size=5), max_leaves=25
)


@given(values)
@example({"apiVersion": {}, "kind": []})
@example({**VALID, "spec": {"replicas": 1 << 20_000}})
@example({**VALID, 1: 2})
def test_any_value_is_rejected_with_one_short_line(value: object) -> None:
    with pytest.raises(SpecError) as caught:
        LLMService.from_dict(value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000


@given(
    st.sampled_from(
        [
            ("metadata",),
            ("metadata", "name"),
            ("metadata", "labels"),
            ("spec",),
            ("spec", "model"),
            ("spec", "model", "source"),
            ("spec", "model", "revision"),
            ("spec", "engine"),
            ("spec", "replicas"),
            ("spec", "router"),
            ("spec", "slo"),
            ("spec", "slo", "classes"),
            ("spec", "slo", "default"),
            ("spec", "control"),
            ("spec", "rollout"),
        ]
    ),
    values,
)
def test_any_value_of_any_field_is_accepted_or_rejected_at_that_field(
    path: tuple[str, ...], value: object
) -> None:
    manifest = {**VALID, "metadata": {**VALID["metadata"]}, "spec": {**VALID["spec"]}}
    manifest["spec"]["model"] = {**VALID["spec"]["model"]}
    manifest["spec"]["slo"] = {**VALID["spec"]["slo"]}
    parent = manifest
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    try:
        LLMService.from_dict(manifest)
    except SpecError as error:
        rejection = error
    else:
        return
    assert rejection.path.startswith(".".join(path))
    assert "\n" not in str(rejection)


def billion_laughs() -> list[Any]:
    bomb: list[Any] = ["ha"]
    for _ in range(64):
        bomb = [bomb, bomb]
    return bomb


@pytest.mark.parametrize("field", ["replicas", "model", "slo", "engine", "minReplicas", "router"])
def test_nested_aliases_are_rejected_without_expansion(field: str) -> None:
    manifest = {**VALID, "spec": {**VALID["spec"], field: billion_laughs()}}
    with pytest.raises(SpecError, match=rf"^spec\.{field}: .*not a list$"):
        LLMService.from_dict(manifest)


def test_a_list_that_contains_itself_is_rejected() -> None:
    loop: list[Any] = []
    loop.append(loop)
    manifest = {**VALID, "spec": {**VALID["spec"], "slo": {"classes": loop}}}
    with pytest.raises(SpecError, match=r"classes\[0\]: must be a mapping"):
        LLMService.from_dict(manifest)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "nothing"),
        (True, "true"),
        (12, "12"),
        (1 << 40_000, "a giant number"),
        (float("nan"), "nan"),
        ("a\nb", r"'a\nb'"),
        ("x" * 100_000, f"'{'x' * 60}'…"),
        ([1] * 1000, "a list"),
        ({"a": 1}, "a mapping"),
        (dt.date(2024, 1, 2), "2024-01-02"),
        (b"bytes", "a value"),
        ({1, 2}, "a value"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_an_error_shows_a_value_on_one_short_line(value: object, text: str) -> None:
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("x" * 10_000, f"spec.'{'x' * 60}'…"),
        ("a\nb", r"spec.'a\nb'"),
        ("\x1b[2J", r"spec.'\x1b[2J'"),
        ("größe", "spec.größe"),
    ],
    ids=["huge", "line-break", "escape", "unicode"],
)
def test_an_unknown_key_is_named_safely(key: str, path: str) -> None:
    with pytest.raises(SpecError) as caught:
        LLMService.from_dict({**VALID, "spec": {**VALID["spec"], key: 1}})
    assert caught.value.path == path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A separate resource, so that the decoder is tested on more than one spec."""

    flag: bool = spec_field("A switch.", default=False)
    some_ms: int = spec_field("A time.", default=1, minimum=1)
    word: str = spec_field("A word.", default="ab", pattern=r"^(ab|cd)$")
    size: str | None = spec_field("A size.", default=None, int_or_string=True, max_length=4)
    many: tuple[int, ...] = spec_field("Numbers.", default=(), max_items=3)
    by_name: dict[str, int] = spec_field("Counts.", factory=dict, max_items=2, maximum=9)


def test_absent_and_null_fields_take_their_defaults() -> None:
    assert decode(Sample, {"word": None, "many": None}, "s") == Sample()


def test_every_kind_of_field_is_decoded() -> None:
    value = {
        "flag": True,
        "someMs": 5,
        "word": "cd",
        "size": 16,
        "many": [1, 2],
        "byName": {"a": 3},
    }
    assert decode(Sample, value, "s") == Sample(
        flag=True, some_ms=5, word="cd", size="16", many=(1, 2), by_name={"a": 3}
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"flag": "yes"}, "s.flag: must be true or false, not 'yes'"),
        ({"flag": 1}, "s.flag: must be true or false, not 1"),
        ({"someMs": 0}, "s.someMs: must be at least 1, not 0"),
        ({"word": "abcd"}, "s.word: must match"),
        ({"word": "ab\n"}, "s.word: must match"),
        ({"size": True}, "s.size: must be text, not true"),
        ({"size": 10**9}, "s.size: has 10 characters; at most 4"),
        ({"many": [1, "2"]}, "s.many[1]: must be a whole number"),
        ({"many": [1, 2, 3, 4]}, "s.many: has 4 items; at most 3"),
        ({"byName": {"a": 10}}, "s.byName.a: must be at most 9, not 10"),
        ({"byName": {"a": 1, "b": 1, "c": 1}}, "s.byName: has 3 entries; at most 2"),
        ({"byName": {"k" * 400: 1}}, "s.byName: has a key of 400 characters"),
        ([], "s: must be a mapping, not a list"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_every_kind_of_field_rejects_other_types(value: object, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        decode(Sample, value, "s")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "spelling"),
    [("ttft_ms", "ttftMs"), ("tbt_p99_ms", "tbtP99Ms"), ("max", "max"), ("e2e_ms", "e2eMs")],
)
def test_a_field_is_spelt_in_camel_case(name: str, spelling: str) -> None:
    assert camel_case(name) == spelling
