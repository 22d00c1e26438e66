"""From a spec's dataclass back to the mapping that a manifest holds: the reverse of `decode`.

What is at its default is left out. So the words of a manifest do not change when a later version
knows more fields, and a process of an earlier version can read what a later one wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from goodput_core.slo import format_objective
from goodput_core.spec.fields import camel_case

if TYPE_CHECKING:
    from dataclasses import Field

__all__ = ["encode"]


def encode(value: Any) -> dict[str, Any]:
    """The mapping that `decode` reads this value from, without what is at its default.

    Args:
        value: an instance of a spec's dataclass.
    """
    encoded = {}
    for declared in fields(value):
        one = getattr(value, declared.name)
        if one != _default(declared):
            encoded[camel_case(declared.name)] = _plain(one)
    return encoded


def _default(declared: Field[Any]) -> object:
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return declared.default


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return encode(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Fraction):
        return format_objective(value)
    return value.value if isinstance(value, Enum) else value
