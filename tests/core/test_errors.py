"""The tree of errors."""

from __future__ import annotations

import re

import pytest

from goodput_core import errors
from goodput_core.errors import ExitCode, GoodputError, SpecError, did_you_mean


def tree() -> list[tuple[str, int | None]]:
    """Return the names and codes in the docstring of the module."""
    assert errors.__doc__ is not None
    drawn = re.findall(r"^[│ ]*[├└]── (\w+) +(\d+)?", errors.__doc__, flags=re.MULTILINE)
    return [(name, int(code) if code else None) for name, code in drawn]


def test_the_docstring_lists_every_error() -> None:
    classes = {
        value.__name__
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, GoodputError)
    }
    assert {name for name, _ in tree()} == classes - {"GoodputError"}
    assert classes <= set(errors.__all__)


@pytest.mark.parametrize(("name", "code"), [(n, c) for n, c in tree() if c is not None])
def test_an_error_has_the_exit_code_in_the_docstring(name: str, code: int) -> None:
    assert getattr(errors, name).exit_code == code


def test_only_verdicts_use_the_codes_below_four() -> None:
    verdicts = {ExitCode.PASS, ExitCode.FAIL, ExitCode.INCONCLUSIVE, ExitCode.INVALID}
    assert {code for code in ExitCode if code < 64} == verdicts


def test_a_spec_error_names_the_field_and_then_the_file() -> None:
    error = SpecError("spec.slo.classes[0].ttftMs", "must be at least 1; write 500")
    assert str(error) == "spec.slo.classes[0].ttftMs: must be at least 1; write 500"
    placed = error.at("chat.yaml")
    assert str(placed) == f"chat.yaml: {error}"
    assert (placed.path, placed.problem, placed.source) == (error.path, error.problem, "chat.yaml")
    assert type(errors.UnsupportedError("a", "b").at("c")) is errors.UnsupportedError


def test_the_root_of_nested_exception_groups_is_their_first_error() -> None:
    cause = ValueError("first")
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [cause, KeyError()]), OSError()])
    assert errors.root_of(group) is cause
    assert errors.root_of(cause) is cause


@pytest.mark.parametrize(
    ("word", "found"),
    [
        pytest.param("auto", "; did you mean Auto?", id="case"),
        pytest.param("Recomend", "; did you mean Recommend?", id="letter"),
        pytest.param("x" * 10_000, "", id="long"),
    ],
)
def test_the_closest_word_is_suggested(word: str, found: str) -> None:
    assert did_you_mean(word, ["Auto", "Recommend"]) == found
