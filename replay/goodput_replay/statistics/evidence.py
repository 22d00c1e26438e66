"""From a run's records to the evidence that its verdict rests on.

Which statistics fit the run is chosen here: blocks where the window holds enough of them,
whole backlogs where one backlog fills too much of it. What the evidence means is decided in
`goodput_core.slo.verdict`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from goodput_core.quantiles import P99, quantile
from goodput_core.slo.attainment import ClassCounts, goodput_per_s
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE, Interval, IntervalMethod, wilson
from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import MIN_BLOCKS, ClassEvidence, ValidityEvidence, backlog_bars_pass
from goodput_core.units import NS_PER_S
from goodput_replay.statistics.backlog import Backlogs, effective_size, find_backlogs
from goodput_replay.statistics.cells import count_cells
from goodput_replay.statistics.columns import ATTAINED, OUTSIDE, Columns, read_columns
from goodput_replay.statistics.resample import block_length, resampled_interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.targets import SLOClass

__all__ = ["RunEvidence", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """What one run shows: `decide(evidence.classes, evidence.validity)` is its verdict.

    Args:
        classes: one for each class, the promised ones first and in their order.
        validity: what is known about the client.
        counts: the counts of each class, in the order of `classes`.
        overall: the counts of all requests.
        window_ns: the length of the window.
    """

    classes: tuple[ClassEvidence, ...]
    validity: ValidityEvidence
    counts: tuple[ClassCounts, ...]
    overall: ClassCounts
    window_ns: int

    @property
    def goodput_per_s(self) -> Fraction:
        """Requests per second of the window that kept their promise."""
        return goodput_per_s(self.overall.attainment.good, self.window_ns)


def gather(
    records: Iterable[RequestRecord],
    *,
    classes: Sequence[SLOClass],
    window_ns: int,
    window_start_ns: int = 0,
    rows_planned: int | None = None,
    incomplete: str = "",
    confidence: float = DEFAULT_CONFIDENCE,
    seed: int = 0,
) -> RunEvidence:
    """Judge every record and gather the evidence of the run.

    Args:
        records: the window's requests in any order, warm-up left out; read once.
        classes: what was promised.
        window_ns: the window's length, above 0.
        window_start_ns: its start on the records' clock.
        rows_planned: rows of the window; those without a record count as never sent.
        incomplete: why the run ended early, as the end of a sentence; empty: it did not.
        confidence: of each one-sided bound.
        seed: of the resampling, at least 0; one seed, one answer.

    Raises:
        ValueError: a record scheduled before the window, or a window without length.
    """
    if window_ns <= 0:
        raise ValueError("a window must be longer than 0")
    promised = {c.name: c for c in classes}
    columns = read_columns(records, promised)
    if columns.scheduled_ns.min(initial=window_start_ns) < window_start_ns:
        raise ValueError("a record is scheduled before the window's start")
    counts, overall = columns.tally.by_class(), columns.tally.overall()
    window = _Window(
        columns=columns,
        start_ns=window_start_ns,
        length_ns=window_ns,
        backlogs=find_backlogs(columns.overdue_ns, columns.until_ns),
        confidence=confidence,
        sharers=max(1, sum(c.objective is not None for c in classes)),
        seed=seed,
    )
    objectives = [promised[c.name].objective if c.name in promised else None for c in counts]
    found = tuple(
        window.evidence(place, count, objective, columns.judged)
        for place, (count, objective) in enumerate(zip(counts, objectives, strict=True))
    )
    late = set(columns.class_index[columns.judged != columns.judged_on_time].tolist())
    on_time = tuple(
        window.evidence(place, counts[place], evidence.objective, columns.judged_on_time)
        if place in late
        else evidence
        for place, evidence in enumerate(found)
    )
    missing = 0 if rows_planned is None else max(0, rows_planned - overall.rows)
    validity = ValidityEvidence(
        lag_p99_ns=quantile(columns.lag_ns.tolist(), P99) if len(columns.lag_ns) else None,
        tightest_ttft_ns=columns.tightest_ttft_ns,
        unsent=overall.outcomes.get(Outcome.UNSENT, 0) + missing,
        incomplete=incomplete,
        without_lag=on_time,
    )
    return RunEvidence(
        classes=found, validity=validity, counts=counts, overall=overall, window_ns=window_ns
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Window:
    """What the evidence of every class of a run has in common."""

    columns: Columns
    start_ns: int
    length_ns: int
    backlogs: Backlogs
    confidence: float
    sharers: int
    seed: int

    def evidence(
        self,
        place: int,
        counts: ClassCounts,
        objective: Fraction | None,
        judged: NDArray[np.int8],
    ) -> ClassEvidence:
        """The evidence of the class at `place`, from one judgement of every request."""
        members = (self.columns.class_index == place) & (judged != OUTSIDE)
        attained = judged[members] == ATTAINED
        since_start_ns = self.columns.scheduled_ns[members] - self.start_ns
        cells = count_cells(since_start_ns, attained, self.length_ns)
        block_cells = block_length(len(cells.total), self.backlogs.longest_ns)
        blocks = len(cells.total) // block_cells
        interval: Interval | None = None
        if cells.attainment.total:
            clusters = self._clusters(members, since_start_ns)
            if backlog_bars_pass(self.backlogs.longest_ns, self.length_ns):
                interval = wilson(
                    cells.attainment.good,
                    cells.attainment.total,
                    effective=clusters,
                    confidence=self.confidence,
                    classes=self.sharers,
                    method=IntervalMethod.BACKLOGS,
                )
            else:
                interval = resampled_interval(
                    cells,
                    block_cells=min(block_cells, len(cells.total)),
                    # The same blocks with and without lag: only the judgements differ.
                    rng=np.random.default_rng([self.seed, place]),
                    confidence=self.confidence,
                    classes=self.sharers,
                    worth=None if blocks >= MIN_BLOCKS else clusters,
                )
        return ClassEvidence(
            name=counts.name,
            objective=objective,
            attainment=cells.attainment,
            interval=interval,
            unjudged=counts.unjudged,
            blocks=blocks,
            block_ns=block_cells * NS_PER_S,
            backlog_ns=self.backlogs.longest_ns,
            window_ns=self.length_ns,
        )

    def _clusters(self, members: NDArray[np.bool_], since_start_ns: NDArray[np.int64]) -> float:
        """Independent requests at least: a backlog is worth one, and so is a second outside."""
        columns = self.columns
        backlog = self.backlogs.of(columns.scheduled_ns[members], columns.until_ns[members])
        second = since_start_ns // NS_PER_S
        return effective_size(np.where(backlog >= 0, -1 - backlog, second))
