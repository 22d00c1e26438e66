"""From a spec's dataclass back to the mapping that a manifest holds: the reverse of `decode`.

What is at its default is left out. So the words of a manifest do not change when a later version
knows more fields, and a process of an earlier version can read what a later one wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

from goodput_core.slo.targets import format_objective
from goodput_core.spec.declared import declared_fields

__all__ = ["encode"]


def encode(value: Any) -> dict[str, Any]:
    """The mapping that `decode` reads this value from, without what is at its default.

    Args:
        value: an instance of a spec's dataclass.
    """
    return {
        field.name: _plain(one)
        for field in declared_fields(type(value))
        if (one := getattr(value, field.attribute)) != field.default or field.required
    }


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
