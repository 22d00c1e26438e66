"""Stop strings in a text that arrives in pieces.

The matcher follows every stop string with the automaton of Knuth, Morris and Pratt, so the cost of
a character does not depend on the text before it. Most pieces begin no stop string and are passed
on after a single search.

Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces.

    Text that may be the beginning of a stop string is held back, so a client never gets a part of a
    stop string.

    Args:
        stops: non-empty strings; the one whose first occurrence ends earliest applies. If several
            end together, the longest applies.
    """

    __slots__ = ("_borders", "_first", "_held", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string at the end of the text
        self._first = frozenset(stop[0] for stop in stops)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Add a piece; return the text that may be sent now, and True if a stop string was found.

        The stop string itself is never part of the text. After a match, do not use the matcher
        again.
        """
        if not self._held and self._first.isdisjoint(piece):
            return piece, False
        text = self._held + piece
        at = len(self._held)
        for character in piece:
            at += 1
            complete = self._advance(character)
            if complete:
                self._held = ""
                return text[: at - complete], True
        sent = len(text) - max(self._matched)
        self._held = text[sent:]
        return text[:sent], False

    def rest(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Take one character; return the length of the longest stop string that ends with it."""
        complete = 0
        for index, stop in enumerate(self._stops):
            matched, borders = self._matched[index], self._borders[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            self._matched[index] = matched
            if matched == len(stop):
                complete = max(complete, matched)
        return complete


def _borders(stop: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also a suffix."""
    borders = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[length] != stop[at]:
            length = borders[length - 1]
        length += stop[length] == stop[at]
        borders[at] = length
    return borders
