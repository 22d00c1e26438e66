"""When which key has its turn: the keyed queue, without tasks and without a clock.

A key is a service. It has one turn at a time; whatever happens meanwhile is one further turn, not
many. What each turn does is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

from goodput_core.units import NS_PER_MS
from goodput_operator.backoff import BackOff

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Pace", "Schedule"]

K = TypeVar("K", bound="Hashable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast turns may follow each other.

    Args:
        gap_ns: from the end of a key's turn to its next one at the least, so that a burst of
            events is one turn.
        back_off: from the end of a turn that failed to the next one.
    """

    gap_ns: int = 200 * NS_PER_MS
    back_off: BackOff = field(default_factory=BackOff)


@dataclass(slots=True)
class _Entry:
    """What is known of one key.

    `due_ns` is when somebody wants the next turn; `rest_until_ns` is before when there is none.
    """

    due_ns: int | None = None
    rest_until_ns: int = 0
    failures: int = 0
    since_ns: int | None = None
    asked: int = 0


class Schedule(Generic[K]):
    """The keys that want a turn, in the order of their time.

    Args:
        pace: how fast turns may follow each other.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._entries: dict[K, _Entry] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._count = 0

    def add(self, key: K, at_ns: int) -> None:
        """Ask for a turn of this key at that time; the earliest wish counts.

        A key that is having its turn gets another one: what it saw may be out of date.
        """
        entry = self._entries.setdefault(key, _Entry())
        if entry.due_ns is None or at_ns < entry.due_ns:
            entry.due_ns = at_ns
            self._push(key, entry)

    def take(self, now_ns: int) -> K | None:
        """The key whose turn it is, which is then having it; None: nobody's yet."""
        if self._next_ns(now_ns) is None:
            return None
        _, _, key = heappop(self._heap)
        entry = self._entries[key]
        entry.due_ns = None
        entry.since_ns = now_ns
        return key

    def finish(self, key: K, now_ns: int, *, failed: bool, again_at_ns: int | None = None) -> None:
        """End a key's turn.

        Args:
            key: as `take` gave it.
            now_ns: now.
            failed: have another turn after a while that doubles with each failure in a row; until
                then no event brings it back.
            again_at_ns: have another turn then at the latest.
        """
        entry = self._entries[key]
        assert entry.since_ns is not None, "only a key that is having its turn ends it"
        entry.since_ns = None
        entry.failures = entry.failures + 1 if failed else 0
        if failed:
            entry.rest_until_ns = now_ns + self._pace.back_off.delay_ns(key, entry.failures)
            self.add(key, entry.rest_until_ns)
        else:
            entry.rest_until_ns = now_ns + self._pace.gap_ns
        if again_at_ns is not None:
            self.add(key, again_at_ns)
        if entry.due_ns is not None:
            self._push(key, entry)

    def forget(self, key: K) -> None:
        """Drop a key that wants no turn: a service that is gone leaves nothing behind."""
        entry = self._entries.get(key)
        if entry is not None and entry.due_ns is None and entry.since_ns is None:
            del self._entries[key]

    def next_ns(self) -> int | None:
        """When the next turn may start; None: nobody waits."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def waiting(self) -> int:
        """How many keys want a turn."""
        return sum(entry.due_ns is not None for entry in self._entries.values())

    def overdue_ns(self, now_ns: int) -> int:
        """How long the first in line has been able to start and has not."""
        first = self.next_ns()
        return 0 if first is None else max(0, now_ns - first)

    def longest_ns(self, now_ns: int) -> int:
        """How long the longest of the turns that are being had has taken."""
        begun = [e.since_ns for e in self._entries.values() if e.since_ns is not None]
        return now_ns - min(begun) if begun else 0

    def _next_ns(self, now_ns: int) -> int | None:
        first = self.next_ns()
        return first if first is not None and first <= now_ns else None

    def _push(self, key: K, entry: _Entry) -> None:
        assert entry.due_ns is not None, "only a key that wants a turn stands in line"
        if entry.since_ns is None:
            # The count keeps those who want the same instant in the order in which they asked.
            self._count += 1
            entry.asked = self._count
            start_ns = max(entry.due_ns, entry.rest_until_ns)
            heappush(self._heap, (start_ns, self._count, key))

    def _drop_stale(self) -> None:
        """Drop places in line that a later wish of the same key has replaced."""
        while self._heap:
            _, asked, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.asked == asked and entry.due_ns is not None:
                return
            heappop(self._heap)
