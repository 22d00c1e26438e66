"""When each token of each request came, kept so that a token costs nothing by itself.

A replica's cohort gives one token to every member in every epoch (see the scheduler's `cohort`).
So the replica keeps one list of the epochs' times, and a request remembers from which epoch to
which it was a member; its tokens' times are slices, taken once, when it ends.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = ["EpochTimes", "TokenSpans"]

_OPEN: Final = 1 << 62
_TRIM_AFTER: Final = 1024


class TokenSpans:
    """Where the tokens of one request are: single ones, and spans of epochs, in order."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        # (time, -1) is a token by itself; (first epoch, last epoch) a span.
        self.parts: list[tuple[int, int]] = []

    def single(self, at_ns: int) -> None:
        """A token that a prompt's last chunk gave."""
        self.parts.append((at_ns, -1))

    def join(self, epoch: int) -> None:
        """A token in this epoch and in all that follow."""
        self.parts.append((epoch, _OPEN))

    def leave(self, epoch: int) -> None:
        """No token after this epoch; one that has got none here left before it came back."""
        if not self.parts:
            return
        first, last = self.parts[-1]
        if last == _OPEN:
            self.parts[-1] = (first, epoch)

    @property
    def first_epoch(self) -> int:
        """The earliest epoch whose time is needed; far away when none is."""
        return min((first for first, last in self.parts if last >= 0), default=_OPEN)


class EpochTimes:
    """When the epochs of one replica were committed, numbered from 1.

    Attributes:
        last: the number of the latest.
    """

    __slots__ = ("_before", "_times", "_trim_at", "last")

    def __init__(self) -> None:
        self.last = 0
        self._before = 0
        """Epochs that were let go."""
        self._times = array("q")
        self._trim_at = _TRIM_AFTER

    def append(self, at_ns: int) -> None:
        """The next epoch."""
        self.last += 1
        self._times.append(at_ns)

    def extend(self, ends_ns: array[int]) -> None:
        """The next epochs."""
        self.last += len(ends_ns)
        self._times.extend(ends_ns)

    @property
    def trim_due(self) -> bool:
        """Whether it is worth looking for epochs that nobody needs."""
        return len(self._times) >= self._trim_at

    def trim(self, live: Iterable[TokenSpans]) -> None:
        """Let go of what lies before the spans of everyone who is still there."""
        keep_from = min((spans.first_epoch for spans in live), default=_OPEN)
        gone = min(keep_from - 1, self.last) - self._before
        if gone > 0:
            del self._times[:gone]
            self._before += gone
        # Looked for again only when it has doubled: the search is paid for by what came since.
        self._trim_at = 2 * len(self._times) + _TRIM_AFTER

    def tokens(self, spans: TokenSpans, limit: int | None = None) -> NDArray[np.int64]:
        """The times of a request's tokens up to now, shape `[num_tokens]`.

        Args:
            spans: of it.
            limit: tokens at most: those computed beyond its end are not its.
        """
        pieces = array("q")
        for first, last in spans.parts:
            if last < 0:
                pieces.append(first)
            else:
                start = first - 1 - self._before
                pieces += self._times[start : min(last, self.last) - self._before]
        found: NDArray[np.int64] = np.frombuffer(pieces, dtype=np.int64)
        return found if limit is None else found[:limit]
