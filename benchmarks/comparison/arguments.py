"""Types of command-line options: lists of known names, and positive numbers."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["names_of", "positive_count", "positive_numbers"]


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a type for comma-separated names, each of which must be known."""
    names = list(known)

    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in names:
                raise ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
        return text.split(",")

    return parse


def positive_count(text: str) -> int:
    """Parse a whole number of at least 1."""
    try:
        count = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None
    if count < 1:
        raise ArgumentTypeError(f"{count} is less than 1")
    return count


def positive_numbers(text: str) -> list[float]:
    """Parse comma-separated numbers above 0 and at most 100."""
    numbers: list[float] = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = 0.0
        if not 0 < number <= 100:
            raise ArgumentTypeError(f"{part!r} is not a number above 0 and at most 100")
        numbers.append(number)
    return numbers
