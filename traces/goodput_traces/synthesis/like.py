"""Generate a trace that is like another one: a model of its units, arrivals and prefixes.

* **Arrivals** of units follow `arrivals.ArrivalModel`. Sessions that share no clock start as a
  Poisson process.
* **Units** are drawn from those that started at the same time of the source. All requests
  of a unit are repeated with their lengths, classes, targets and the times between them. Lengths of
  prompts and outputs are therefore drawn together.
* **Prefixes** are repeated as `prefixes` describes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain, count
from random import Random
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.units import NS_PER_S
from goodput_traces.errors import TraceError
from goodput_traces.format.schema import Clock, TraceMetadata, TraceRow
from goodput_traces.synthesis.arrivals import ArrivalModel, fit_arrivals, poisson_arrivals
from goodput_traces.synthesis.prefixes import (
    MAX_TURNS_BACK,
    KnownPrompt,
    PrefixObserver,
    PromptHistory,
)
from goodput_traces.synthesis.units import TraceUnit, UnitRequest, UnitSample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_traces.format.reader import Trace

__all__ = ["TraceModel", "fit_trace"]

_MIN_CHOICE: Final = 50
_POPULAR: Final = 10
_MAX_WARM_UP_NS: Final = 7 * 86_400 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceModel:
    """Model of a trace.

    Args:
        arrivals: arrivals of units; for sessions without a common clock, one unit a second.
        units: units by step of the arrivals.
        rows_per_step: expected number of requests in each step, at the rate of `arrivals`.
        span_ns: time from the first to the last arrival; 0 if sessions share no clock.
        warm_up_ns: time before the first request in which sessions start whose later requests are
            in the trace; 0 if sessions share a clock.
        popular: last blocks of beginnings of prompts that many requests share.
        source: metadata of the source.
    """

    arrivals: ArrivalModel
    units: tuple[tuple[TraceUnit, ...], ...]
    rows_per_step: tuple[float, ...]
    span_ns: int
    warm_up_ns: int
    popular: frozenset[int]
    source: TraceMetadata

    def metadata(self, command: str) -> TraceMetadata:
        """Return metadata that labels a trace as synthetic.

        Args:
            command: the command line that reproduces the trace.
        """
        return TraceMetadata(
            source=f"synthetic, made by: {command}",
            licence=self.source.licence,
            clock=Clock.TRACE_RELATIVE,
            timestamp_resolution_ns=self.source.timestamp_resolution_ns,
            hash_semantics=self.source.hash_semantics,
        )

    def rows(
        self, *, seed: int, duration_ns: int, rate_per_s: float | None = None
    ) -> Iterator[TraceRow]:
        """Generate rows in order of arrival; the clock starts at 0.

        Args:
            seed: seed of the random numbers.
            duration_ns: end of the arrivals, which is not part of them.
            rate_per_s: mean number of requests a second; None for that of the source.
        """
        rng = Random(seed)
        factor = 1.0 if rate_per_s is None else rate_per_s / self._rate_per_s(duration_ns)
        rows = _SyntheticRows(self.popular)
        turns: list[tuple[int, int, _OpenTraceUnit]] = []  # arrival, order, unit; a heap
        order = count()
        starts = self.arrivals.draw(rng, self.warm_up_ns + duration_ns, factor)
        for drawn_ns, step in chain(starts, ((self.warm_up_ns + duration_ns, None),)):
            start_ns = drawn_ns - self.warm_up_ns
            while turns and turns[0][0] <= start_ns:
                arrival_ns, _, unit = heapq.heappop(turns)
                row = rows.write(unit, arrival_ns)
                if 0 <= arrival_ns < duration_ns:
                    yield row
                if unit.next_turn < len(unit.turns):
                    heapq.heappush(turns, (unit.next_arrival_ns, next(order), unit))
            if step is not None:
                choice = self.units[step]
                drawn = choice[int(rng.random() * len(choice))]
                if start_ns + drawn.length_ns < 0:
                    continue  # it ends before the trace starts
                unit = _OpenTraceUnit(unit=drawn, start_ns=start_ns)
                heapq.heappush(turns, (start_ns, next(order), unit))

    def _rate_per_s(self, duration_ns: int) -> float:
        """Return the mean rate of the model up to a time."""
        step_ns = self.arrivals.step_ns
        full, rest_ns = divmod(duration_ns, step_ns)
        rows = self.rows_per_step
        cycles, steps = divmod(full, len(rows))
        expected = cycles * sum(rows) + sum(rows[:steps]) + rows[steps] * rest_ns / step_ns
        return expected / (duration_ns / NS_PER_S)


@dataclass(slots=True, kw_only=True)
class _OpenTraceUnit:
    """A unit whose later turns are still to be written."""

    unit: TraceUnit
    start_ns: int
    session_id: str | None = None
    next_turn: int = 0
    tail: list[tuple[str, KnownPrompt | None]] = field(default_factory=list)

    @property
    def turns(self) -> list[UnitRequest]:
        return self.unit.turns

    @property
    def next_arrival_ns(self) -> int:
        since_ns = self.turns[self.next_turn].row.timestamp_start_unix_ns - self.unit.start_ns
        return self.start_ns + since_ns


class _SyntheticRows:
    """UnitRequest units into rows: ids, sessions and blocks."""

    def __init__(self, popular: frozenset[int]) -> None:
        self._popular = popular
        self._history = PromptHistory()
        self._rows = self._sessions = 0

    def write(self, unit: _OpenTraceUnit, arrival_ns: int) -> TraceRow:
        """Return the next row of a unit."""
        turn = unit.turns[unit.next_turn]
        unit.next_turn += 1
        self._rows += 1
        request_id = f"synthetic-{self._rows:07d}"
        if unit.unit.is_session and unit.session_id is None:
            self._sessions += 1
            unit.session_id = f"session-{self._sessions:06d}"
        prompt = self._draw_prompt(unit, turn, arrival_ns) if turn.blocks else None
        parent = unit.tail[0][0] if turn.has_parent and unit.tail else None
        if unit.next_turn < len(unit.turns):
            unit.tail = [(request_id, prompt), *unit.tail[: MAX_TURNS_BACK - 1]]
        return replace(
            turn.row,
            request_id=request_id,
            timestamp_start_unix_ns=arrival_ns,
            total_hashes=() if prompt is None else prompt.blocks,
            provided_session_id=unit.session_id,
            parent_request_id=parent,
        )

    def _draw_prompt(self, unit: _OpenTraceUnit, turn: UnitRequest, arrival_ns: int) -> KnownPrompt:
        earlier = unit.tail[turn.back - 1][1] if 0 < turn.back <= len(unit.tail) else None
        if earlier is not None:
            prefix = earlier.repeat(turn.back_blocks)
        elif turn.link.last_block in self._popular:
            prefix = self._history.popular_prefix(turn.link.last_block, turn.link.blocks)
        else:
            prefix = self._history.find_prefix(arrival_ns - turn.link.lag_ns, turn.link.blocks)
        return self._history.add(arrival_ns, prefix, turn.blocks)


def fit_trace(trace: Trace) -> TraceModel:
    """Read a trace once and fit the model.

    Raises:
        TraceError: the trace is invalid, or all its requests arrive at once.
    """
    observer, sample = PrefixObserver(), UnitSample()
    for row in trace.rows():
        sample.add(row, observer.observe(row))
    units = sample.units
    if trace.metadata.clock is Clock.SESSION_RELATIVE:
        return _fit_without_clock(trace, units)
    span_ns = trace.last_ns - trace.first_ns
    if span_ns == 0:
        raise TraceError(
            trace.path,
            "all requests arrive at the same time, so their arrivals have no model; name a trace "
            "with several arrival times",
        )
    starts = np.array([unit.start_ns for unit in units], dtype=np.int64) - trace.first_ns
    arrivals = fit_arrivals(starts, span_ns, trace.metadata.timestamp_resolution_ns, sample.share)
    steps = len(arrivals.means)
    by_step: list[list[TraceUnit]] = [[] for _ in range(steps)]
    rows = [0.0] * steps
    for unit, step in zip(units, (starts // arrivals.step_ns).tolist(), strict=True):
        by_step[min(step, steps - 1)].append(unit)
        for turn in unit.turns:
            since_ns = turn.row.timestamp_start_unix_ns - trace.first_ns
            rows[min(since_ns // arrivals.step_ns, steps - 1)] += 1 / sample.share
    rows[-1] /= arrivals.last_step_share
    return TraceModel(
        arrivals=arrivals,
        units=tuple(_nearest(by_step, step) for step in range(steps)),
        rows_per_step=tuple(rows),
        span_ns=span_ns,
        warm_up_ns=0,
        popular=_find_popular(units),
        source=trace.metadata,
    )


def _fit_without_clock(trace: Trace, units: list[TraceUnit]) -> TraceModel:
    arrivals = poisson_arrivals(1.0)
    turns = sum(len(unit.turns) for unit in units) / len(units)
    longest_ns = max(unit.turns[-1].row.timestamp_start_unix_ns - unit.start_ns for unit in units)
    return TraceModel(
        arrivals=arrivals,
        units=(tuple(units),),
        rows_per_step=(turns * arrivals.step_ns / NS_PER_S,),
        span_ns=0,
        warm_up_ns=min(longest_ns, _MAX_WARM_UP_NS),
        popular=_find_popular(units),
        source=trace.metadata,
    )


def _find_popular(units: list[TraceUnit]) -> frozenset[int]:
    """Return the last blocks of beginnings that many units repeat."""
    uses = Counter(
        block for unit in units for block in {turn.link.last_block for turn in unit.turns}
    )
    return frozenset(
        block for block, count in uses.items() if block is not None and count >= _POPULAR
    )


def _nearest(by_step: list[list[TraceUnit]], step: int) -> tuple[TraceUnit, ...]:
    """Return the units of a step and of as many steps around it as needed to have some choice."""
    for distance in range(len(by_step)):
        around = by_step[max(0, step - distance) : step + distance + 1]
        units = tuple(unit for units in around for unit in units)
        if len(units) >= _MIN_CHOICE:
            return units
    return tuple(unit for units in by_step for unit in units)
