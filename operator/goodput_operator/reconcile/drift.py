"""Whether an object of the cluster still is what was asked for.

Only fields that we set are compared. The API server fills in defaults, writes quantities its own
way and leaves out what is empty; others may add fields, list entries and annotations beside ours.
None of that is drift, or every round would write.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["differs"]

_IDENTITY: Final = frozenset({"apiVersion", "kind", "name", "namespace", "uid"})
"""Of metadata and of the object itself: by these it was found."""
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "claims": ("name",),
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "ownerReferences": ("uid",),
    "ports": ("containerPort", "port", "protocol"),
    "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
"""Lists that are maps by these fields, where others may have entries of their own."""
_WHOLE: Final = frozenset({"selector", "labelSelector", "nodeSelector"})
"""Values that are one for the API server too: another label in a selector is another selector."""
_QUANTITIES: Final = frozenset({"limits", "requests"})
_QUANTITY: Final = frozenset({"sizeLimit", "divisor"})
_SUFFIXES: Final[Mapping[str, Fraction]] = {
    "": Fraction(1),
    **{s: Fraction(1, 1000) ** n for n, s in enumerate("mun", 1)},
    **{s: Fraction(1000) ** n for n, s in enumerate("kMGTPE", 1)},
    **{f"{s}i": Fraction(1024) ** n for n, s in enumerate("KMGTPE", 1)},
}
_NUMBER: Final = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([-+]?[0-9]{1,3})|([a-zA-Z]*))")


def differs(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether an object lacks a field that is wanted, or has it with another value.

    Args:
        wanted: an object of dictionaries and lists, as JSON has them.
        live: the same.
    """
    return any(
        not _holds(value, live.get(key), key)
        for key, value in wanted.items()
        if key not in _IDENTITY and key != "metadata"
    ) or any(
        not _holds(value, (live.get("metadata") or {}).get(key), key)
        for key, value in wanted["metadata"].items()
        if key not in _IDENTITY
    )


def _holds(wanted: Any, live: Any, key: str) -> bool:
    if not wanted and not live:
        return True  # what is empty is left out
    if key in _WHOLE:
        return bool(wanted == live)
    if isinstance(wanted, dict):
        if not isinstance(live, dict):
            return False
        if key in _QUANTITIES:
            return all(_equal_quantities(value, live.get(k)) for k, value in wanted.items())
        return all(_holds(value, live.get(k), k) for k, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(live, list) and _holds_list(wanted, live, key)
    if key in _QUANTITY:
        return _equal_quantities(wanted, live)
    return bool(wanted == live)


def _holds_list(wanted: list[Any], live: list[Any], key: str) -> bool:
    keys = _KEYS.get(key)
    if keys is None:
        return len(wanted) == len(live) and all(map(_holds, wanted, live, [""] * len(wanted)))
    known = {_key_of(one, keys): one for one in live}
    return all(_holds(one, known.get(_key_of(one, keys)), "") for one in wanted)


def _key_of(one: Any, keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(one.get(key) for key in keys) if isinstance(one, dict) else (one,)


def _equal_quantities(one: Any, other: Any) -> bool:
    first = _quantity(one)
    return str(one) == str(other) or (first is not None and first == _quantity(other))


def _quantity(value: Any) -> Fraction | None:
    match = _NUMBER.fullmatch(str(value))
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    if exponent is not None:
        return Fraction(number.rstrip(".")) * Fraction(10) ** int(exponent)
    unit = _SUFFIXES.get(suffix)
    return None if unit is None else Fraction(number.rstrip(".")) * unit
