"""What is known of a run while it runs, for the display: counts in constant memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.slo.attainment import AttainmentTally, ClassCounts
from goodput_replay.sending.sketch import DurationSketch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_core.slo.judging import Judgement
    from goodput_core.slo.record import RequestRecord

__all__ = ["Observer", "Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A moment of a run.

    Args:
        ended: requests that ended, warm-up included.
        overall: all judged requests together.
        classes: each class.
        lag_p99_ns: of the sends so far.
        lag_max_ns: of the sends so far.
    """

    ended: int
    overall: ClassCounts
    classes: tuple[ClassCounts, ...]
    lag_p99_ns: int
    lag_max_ns: int


class Observer:
    """Counts requests as they end.

    Args:
        classes: the promised classes, shown even before a request of theirs ends.
    """

    def __init__(self, classes: Iterable[str]) -> None:
        self._tally = AttainmentTally(classes)
        self._lag = DurationSketch()
        self._ended = 0

    def ended(self, record: RequestRecord, judgement: Judgement | None) -> None:
        """Count one request that ended; a warm-up request has no judgement."""
        self._ended += 1
        if record.lag_ns is not None:
            self._lag.add(record.lag_ns)
        if judgement is not None:
            self._tally.add(record, judgement)

    def progress(self) -> Progress:
        """The counts so far."""
        return Progress(
            ended=self._ended,
            overall=self._tally.overall(),
            classes=self._tally.by_class(),
            lag_p99_ns=self._lag.quantile_ns(0.99),
            lag_max_ns=self._lag.max_ns,
        )
