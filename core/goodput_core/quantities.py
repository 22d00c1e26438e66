"""Kubernetes' resource quantities, such as 1, 500m or 16Gi, as exact numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["parse_quantity"]

_SUFFIXES: Final[Mapping[str, Fraction]] = {
    "": Fraction(1),
    **{s: Fraction(1, 1000) ** n for n, s in enumerate("mun", 1)},
    **{s: Fraction(1000) ** n for n, s in enumerate("kMGTPE", 1)},
    **{f"{s}i": Fraction(1024) ** n for n, s in enumerate("KMGTPE", 1)},
}
_NUMBER: Final = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([-+]?[0-9]{1,3})|([a-zA-Z]*))")


def parse_quantity(value: Any) -> Fraction | None:
    """Return the number of a quantity; None if the value is not valid."""
    match = _NUMBER.fullmatch(str(value))
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    if exponent is not None:
        return Fraction(number.rstrip(".")) * Fraction(10) ** int(exponent)
    unit = _SUFFIXES.get(suffix)
    return None if unit is None else Fraction(number.rstrip(".")) * unit
