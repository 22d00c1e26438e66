"""Parts of a manifest that are passed on unread: copied as JSON, and bounded in size.

They are Kubernetes' own structures, which its API server judges; here they only must not explode.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from goodput_core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bounded_json"]

_MAX_VALUES: Final = 1_000
_MAX_DEPTH: Final = 24
_MAX_TEXT: Final = 4_096


def bounded_json(value: object, path: str) -> object:
    """A copy of a decoded value that holds nothing but JSON, within bounds.

    Args:
        value: what a YAML or JSON parser returned; it may hold itself, by an alias.
        path: where it stands, for errors.

    Raises:
        SpecError: more than 1,000 values, deeper than 24, a text of more than 4,096 characters, or
            something that JSON does not know.
    """
    budget = iter(range(_MAX_VALUES))
    return _copy(value, path, _MAX_DEPTH, budget)


def _copy(value: object, path: str, depth: int, budget: Iterator[int]) -> object:
    if depth == 0 or next(budget, None) is None:
        raise SpecError(
            path, f"is too large; at most {_MAX_VALUES} values, {_MAX_DEPTH} levels deep, are taken"
        )
    if isinstance(value, dict):
        copied: dict[str, object] = {}
        for key, entry in value.items():
            if not isinstance(key, str) or len(key) > _MAX_TEXT:
                raise SpecError(path, "has a key that is not a short text; put it in quotes")
            copied[key] = _copy(entry, path, depth - 1, budget)
        return copied
    if isinstance(value, list):
        return [_copy(entry, path, depth - 1, budget) for entry in value]
    if isinstance(value, str):
        if len(value) > _MAX_TEXT:
            raise SpecError(path, f"has a text of {len(value)} characters; at most {_MAX_TEXT}")
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() < 64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise SpecError(path, "holds a value that JSON does not know; put it in quotes")
