"""Latencies, tokens and rates of a run by class, as in its summary.

Quantiles are exact. They are searched in several passes over the records, so that memory does not
grow with the run.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.quantiles import P50, P90, P95, P99
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_S
from goodput_replay.runs.columns import ColumnParts, GapCounts, count_gaps, read_parts
from goodput_replay.runs.rounding import cut_share, to_ms
from goodput_replay.runs.summary import ClassSummary, Quantiles
from goodput_replay.statistics.rank_search import RankSearch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from goodput_core.slo.attainment import ClassCounts
    from goodput_replay.runs.columns import RunColumns

__all__ = ["RunMeasures"]

_QUANTILES: Final = (P50, P90, P95, P99, Fraction(1))
_PRINTED: Final = (P50, P90, P95, P99)


class RunMeasures:
    """Measures of the judged requests of a run.

    Args:
        folder: the run's folder.
        names: names of all classes.
        window_start_ns: start of the window, nanoseconds since the run's time zero.
        window_ns: length of the window.

    Raises:
        InputError: the records cannot be read.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], *, window_start_ns: int, window_ns: int
    ) -> None:
        self._gaps = count_gaps(folder)
        self._window_ns = window_ns
        self._sums = _ClassSums(window_start_ns + window_ns)
        self._latencies = _LatencySearch(names)
        read_parts(ColumnParts(folder), [self._sums, self._latencies])

    @property
    def rows_sent(self) -> int:
        """Number of requests that were sent."""
        return self._sums.sent

    @property
    def lag_p99_ns(self) -> int | None:
        """The p99 of the send lag, at least 0; None if no request was sent."""
        found = self._latencies.quantiles_ns(None, "lag")
        return None if found is None else max(0, found[_QUANTILES.index(P99)])

    @property
    def lag(self) -> Quantiles | None:
        """Quantiles of the send lag; None if no request was sent."""
        return self._quantiles(None, "lag")

    def overall(self, counts: ClassCounts) -> ClassSummary:
        """Summarise all requests together; they have no joint objective."""
        return self._summarise(counts, None, GapCounts.merged(self._gaps.values()))

    def of_class(self, counts: ClassCounts) -> ClassSummary:
        """Summarise one class."""
        return self._summarise(counts, counts.name, self._gaps.get(counts.name))

    def _summarise(
        self, counts: ClassCounts, name: str | None, gaps: GapCounts | None
    ) -> ClassSummary:
        good, share = counts.attainment.good, counts.attainment.share
        return ClassSummary(
            name=counts.name,
            requests=counts.rows,
            good=good,
            total=counts.attainment.total,
            attainment=None if share is None else cut_share(share),
            excluded=counts.excluded,
            unjudged=counts.unjudged,
            outcomes={o.value: n for o, n in counts.outcomes.items()},
            misses={r.value: n for r, n in counts.misses.by_reason.items()},
            misses_without_response=counts.misses.without_response,
            goodput_per_s=self._per_s(good),
            offered_per_s=self._per_s(counts.rows),
            served_per_s=self._per_s(self._sums.served[name]),
            input_tokens=self._sums.input_tokens[name],
            output_tokens=self._sums.output_tokens[name],
            ttft_ms=self._quantiles(name, "ttft"),
            ttft_from_send_ms=self._quantiles(name, "ttft_from_send"),
            tpot_ms=self._quantiles(name, "tpot"),
            tbt_ms=_summarise_gaps(gaps),
            e2e_ms=self._quantiles(name, "e2e"),
        )

    def _quantiles(self, name: str | None, measure: str) -> Quantiles | None:
        found = self._latencies.quantiles_ns(name, measure)
        if found is None:
            return None
        p50, p90, p95, p99, largest = map(to_ms, found)
        count = self._latencies.count(name, measure)
        return Quantiles(count=count, p50=p50, p90=p90, p95=p95, p99=p99, max=largest)

    def _per_s(self, count: int) -> float:
        return round(count * NS_PER_S / self._window_ns, 6)


class _ClassSums:
    """Sums by class; the key None is that of all requests.

    Args:
        window_end_ns: responses that end later are not counted as served.
    """

    def __init__(self, window_end_ns: int) -> None:
        self._window_end_ns = window_end_ns
        self.sent = 0
        self.served: Counter[str | None] = Counter()
        self.input_tokens: Counter[str | None] = Counter()
        self.output_tokens: Counter[str | None] = Counter()
        self.finished = False

    def add(self, part: RunColumns) -> None:
        was_sent = np.isfinite(part.sent_ns)
        self.sent += int(was_sent.sum())
        served = part.of_outcome(Outcome.OK) & (part.end_ns <= self._window_end_ns)
        for name, mask in _masks(part):
            self.served[name] += int(served[mask].sum())
            self.input_tokens[name] += int(part.input_tokens[mask & was_sent].sum())
            self.output_tokens[name] += int(part.output_tokens[mask].sum())

    def end_pass(self) -> None:
        self.finished = True


class _LatencySearch:
    """Finds the quantiles of all latencies, rounded to nanoseconds.

    Args:
        names: names of all classes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        by_class = ("ttft", "ttft_from_send", "tpot", "e2e")
        keys: list[tuple[str | None, str]] = [(None, "lag")]
        keys += ((name, measure) for name in (None, *names) for measure in by_class)
        self._groups = {key: group for group, key in enumerate(keys)}
        self._search = RankSearch(len(keys), _choose_ranks)

    @property
    def finished(self) -> bool:
        return self._search.finished

    def add(self, part: RunColumns) -> None:
        self._search.add(self._groups[None, "lag"], part.lag_ns)
        masks = list(_masks(part))
        for measure, values_ns in (
            ("ttft", part.ttft_ns),
            ("ttft_from_send", part.ttft_from_send_ns),
            ("tpot", np.rint(part.tpot_ns)),
            ("e2e", part.e2e_ns),
        ):
            for name, mask in masks:
                self._search.add(self._groups[name, measure], values_ns[mask])

    def end_pass(self) -> None:
        self._search.end_pass()

    def count(self, name: str | None, measure: str) -> int:
        """Return the number of values."""
        return self._search.count(self._groups[name, measure])

    def quantiles_ns(self, name: str | None, measure: str) -> list[int] | None:
        """Return the values at `_QUANTILES`; None if there are no values."""
        found = [int(value) for value in self._search.values(self._groups[name, measure])]
        return found or None


def _masks(part: RunColumns) -> list[tuple[str | None, NDArray[np.bool_]]]:
    """Return a mask for all requests and for each class."""
    everything = np.ones(len(part.row), dtype=np.bool_)
    return [(None, everything), *((name, part.of_class(name)) for name in part.class_names)]


def _choose_ranks(counts: Sequence[int]) -> list[list[int]]:
    """Return the nearest ranks of `_QUANTILES` in each group, as `goodput_core.quantiles` does."""
    return [
        [max(1, -(-q.numerator * count // q.denominator)) - 1 for q in _QUANTILES if count]
        for count in counts
    ]


def _summarise_gaps(gaps: GapCounts | None) -> Quantiles | None:
    if gaps is None or not gaps.total:
        return None
    p50, p90, p95, p99 = (gaps.quantile_us(q) / 1000 for q in _PRINTED)
    return Quantiles(
        count=gaps.total, p50=p50, p90=p90, p95=p95, p99=p99, max=gaps.largest_us / 1000
    )
