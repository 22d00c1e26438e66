"""What JSON has no word for in a decision, as text: the same wherever decisions are written."""

from __future__ import annotations

from fractions import Fraction

__all__ = ["plain"]


def plain(value: object) -> str:
    """A value of a decision that an encoder of JSON does not know: exact fractions.

    Raises:
        NotImplementedError: there is none of this type in a decision.
    """
    if isinstance(value, Fraction):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in a decision")
