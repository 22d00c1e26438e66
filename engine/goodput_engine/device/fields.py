"""The fields of a device profile: each is checked where it is read, and refused in one sentence.

Every sentence begins with the file and the field's place in it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Final

from goodput_core.errors import InputError

__all__ = [
    "NumberRule",
    "read_choice",
    "read_flag",
    "read_known",
    "read_mapping",
    "read_number",
    "read_origin",
    "read_text",
]

_MAX_TEXT: Final = 2_000


@dataclass(frozen=True, slots=True)
class NumberRule:
    """Bounds of one number, inclusive."""

    low: float
    high: float
    whole: bool = False
    required: bool = True


def read_mapping(value: object, source: str, what: str) -> dict[Any, Any]:
    """A mapping.

    Raises:
        InputError: it is something else.
    """
    if not isinstance(value, dict):
        raise InputError(f"{source}: {what}: must be a mapping")
    return value


def read_known(given: dict[Any, Any], known: list[str], source: str, prefix: str) -> None:
    """Refuse a key that means nothing.

    Raises:
        InputError: there is one.
    """
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key)[:100], known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"fields are {', '.join(known)}"
            raise InputError(f"{source}: {prefix}{str(key)[:100]}: unknown field; {hint}")


def read_text(top: dict[Any, Any], key: str, source: str) -> str:
    """Text that says something.

    Raises:
        InputError: it is none, empty or long.
    """
    value = top.get(key)
    if not isinstance(value, str) or not value.strip() or len(value) > _MAX_TEXT:
        raise InputError(f"{source}: {key}: must be text of 1 to {_MAX_TEXT} characters")
    return value.strip()


def read_choice(top: dict[Any, Any], key: str, allowed: list[str], source: str) -> str:
    """One of some words.

    Raises:
        InputError: it is none of them.
    """
    value = top.get(key)
    if value not in allowed:
        raise InputError(f"{source}: {key}: must be one of {', '.join(allowed)}")
    return str(value)


def read_flag(top: dict[Any, Any], key: str, source: str) -> bool:
    """Whether something holds; absent: it does not.

    Raises:
        InputError: it is no boolean.
    """
    value = top.get(key, False)
    if not isinstance(value, bool):
        raise InputError(f"{source}: {key}: must be true or false")
    return value


def read_origin(value: object, source: str, path: str) -> str:
    """Where something comes from.

    Raises:
        InputError: it does not say.
    """
    if not isinstance(value, str) or not value.strip() or len(value) > _MAX_TEXT:
        raise InputError(
            f"{source}: {path}.from: must say in 1 to {_MAX_TEXT} characters where it comes from"
        )
    return value.strip()


def read_number(value: object, rule: NumberRule, source: str, path: str) -> float:
    """A number within its bounds.

    Raises:
        InputError: it is none, or outside.
    """
    kinds = int if rule.whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        what = "a whole number" if rule.whole else "a number"
        raise InputError(f"{source}: {path}: must be {what}, not {str(value)[:60]!r}")
    if not rule.low <= value <= rule.high:
        raise InputError(
            f"{source}: {path}: must lie in {rule.low:g} to {rule.high:g}, not {str(value)[:60]}"
        )
    return value
