"""The fields of a spec's dataclass as data: what decoding, the CRD and the docs are made from."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from goodput_core.spec.fields import RULE, Rule, camel_case

__all__ = ["Declared", "declared_fields"]

_NO_RULE: Final = Rule(doc="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One field.

    Args:
        attribute: the dataclass's name of it.
        name: the manifest's.
        hint: its type, without None.
        rule: its bounds.
        required: whether a manifest must have it.
        default: what stands for it where it is absent; None for a required one.
    """

    attribute: str
    name: str
    hint: Any
    rule: Rule
    required: bool
    default: Any

    @property
    def container(self) -> Any:
        """`tuple` for a list, `Mapping` for a map, else None."""
        origin = get_origin(self.hint)
        return Mapping if origin not in {None, tuple} else origin

    @property
    def item(self) -> Any:
        """The type of a list's items or of a map's values; for other fields their own."""
        if self.container is None:
            return self.hint
        return get_args(self.hint)[0 if self.container is tuple else 1]

    @property
    def nested(self) -> type[Any] | None:
        """The dataclass of its object, or of the objects of its list; None: there are none."""
        return self.item if isinstance(self.item, type) and is_dataclass(self.item) else None


def declared_fields(cls: type[Any]) -> tuple[Declared, ...]:
    """The fields of a dataclass that was made with `spec_field`, in order."""
    return _declared(cls)  # type: ignore[arg-type] # mypy misses that a class is hashable


@cache
def _declared(cls: type[Any]) -> tuple[Declared, ...]:
    hints = get_type_hints(cls)
    return tuple(
        Declared(
            attribute=one.name,
            name=camel_case(one.name),
            hint=_without_none(hints[one.name]),
            rule=one.metadata.get(RULE, _NO_RULE),
            required=one.default is MISSING and one.default_factory is MISSING,
            default=_default(one),
        )
        for one in fields(cls)
    )


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in {Union, types.UnionType}:
        (only,) = [arg for arg in get_args(hint) if arg is not type(None)]
        return only
    return hint


def _default(one: Any) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return None if one.default is MISSING else one.default
