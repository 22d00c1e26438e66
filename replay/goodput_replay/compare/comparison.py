"""Two finished runs side by side: attainment, goodput, latencies, and requests that changed.

Runs of the same requests under the same SLO are paired by request id. Others are compared as
independent samples, and the result says so. A comparison of two runs describes these runs. Only
several pairs show how much of a difference is noise between runs; see `gate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from goodput_core.slo.intervals import WindowEstimate
from goodput_core.slo.pairs import DifferenceEstimate
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.compare.pairing import match
from goodput_replay.compare.quantile_differences import LatencySource, quantile_differences
from goodput_replay.compare.runs import LoadedRun, difference_between, require_same_sessions
from goodput_replay.runs.chosen_rows import read_rows
from goodput_replay.runs.columns import ColumnParts
from goodput_replay.runs.rounding import cut_share
from goodput_replay.runs.summary_parts import doc

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from goodput_core.slo.judging import MissReason
    from goodput_replay.compare.pairing import Matching

__all__ = [
    "ClassComparison",
    "ComparisonResult",
    "Flip",
    "LatencyComparison",
    "RunComparison",
    "compare",
    "compare_runs",
]

_VERSION: Final = "1"
_METRICS: Final = ("ttft", "tpot", "e2e")
_LEVELS: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_CLASSES_AT_ONCE: Final = 4
_FLIP_COLUMNS: Final = (
    "request_id",
    "slo_class",
    "scheduled_ns",
    "first_token_ns",
    "last_token_ns",
    "input_tokens",
    "output_tokens",
    "miss_reasons",
    "detail",
    "replica",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyComparison:
    """One quantile of one latency in both runs, milliseconds."""

    metric: Annotated[str, doc("ttft, tpot or e2e.")]
    quantile: Annotated[str, doc("p50, p90 or p99, nearest rank.")]
    baseline_ms: Annotated[float, doc("Quantile in the baseline.")]
    candidate_ms: Annotated[float, doc("Quantile in the candidate.")]
    bounds_ms: Annotated[
        tuple[float, float] | None,
        doc("Bounds of candidate less baseline; null if there are too few requests."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassComparison:
    """One class in both runs."""

    name: Annotated[str, doc("Class name; empty for requests without a class.")]
    objective: Annotated[str | None, doc("Objective of the class in the baseline.")]
    baseline_attainment: Annotated[float | None, doc("Share of requests that met the SLO.")]
    candidate_attainment: Annotated[float | None, doc("Share of requests that met the SLO.")]
    baseline_goodput_per_s: Annotated[float, doc("Requests per second that met the SLO.")]
    candidate_goodput_per_s: Annotated[float, doc("Requests per second that met the SLO.")]
    difference: Annotated[float | None, doc("Attainment of the candidate less the baseline.")]
    difference_lower: Annotated[float | None, doc("Lower bound of the difference.")]
    difference_upper: Annotated[float | None, doc("Upper bound of the difference.")]
    matched: Annotated[int, doc("Requests judged in both runs; 0 if unpaired.")]
    gained: Annotated[int, doc("Requests that met the SLO only in the candidate.")]
    lost: Annotated[int, doc("Requests that met the SLO only in the baseline.")]
    gained_by_reason: Annotated[
        dict[str, int], doc("First miss reason in the baseline of the gained requests.")
    ]
    lost_by_reason: Annotated[
        dict[str, int], doc("First miss reason in the candidate of the lost requests.")
    ]
    latencies: Annotated[tuple[LatencyComparison, ...], doc("Quantiles of the latencies.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A request that met its SLO in one run only."""

    request_id: Annotated[str, doc("Request id in the trace.")]
    slo_class: Annotated[str, doc("Class name.")]
    at_s: Annotated[float, doc("Scheduled arrival, seconds since the start of the window.")]
    input_tokens: Annotated[int, doc("Prompt tokens.")]
    output_tokens: Annotated[int, doc("Output tokens in the run that met the SLO.")]
    lost: Annotated[bool, doc("True if only the baseline met the SLO.")]
    reasons: Annotated[tuple[str, ...], doc("Miss reasons in the run that missed.")]
    detail: Annotated[str, doc("Error message of the run that missed; may be empty.")]
    baseline_ttft_ms: Annotated[float | None, doc("TTFT in the baseline.")]
    candidate_ttft_ms: Annotated[float | None, doc("TTFT in the candidate.")]
    baseline_tpot_ms: Annotated[float | None, doc("TPOT in the baseline.")]
    candidate_tpot_ms: Annotated[float | None, doc("TPOT in the candidate.")]
    baseline_replica: Annotated[str, doc("Replica in the baseline, if reported.")]
    candidate_replica: Annotated[str, doc("Replica in the candidate, if reported.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """One run against the baseline."""

    baseline: Annotated[str, doc("Folder of the baseline.")]
    candidate: Annotated[str, doc("Folder of the candidate.")]
    paired: Annotated[bool, doc("True if requests were matched by id.")]
    unpaired_because: Annotated[str, doc("Why the runs are not paired; empty if they are.")]
    invalid: Annotated[tuple[str, ...], doc("Reasons why one of the runs is invalid.")]
    rejections: Annotated[
        tuple[str, ...], doc("Valid runs of which the server rejected requests as invalid.")
    ] = ()
    dropped: Annotated[int, doc("Requests that were not judged in both runs; 0 if unpaired.")]
    classes: Annotated[tuple[ClassComparison, ...], doc("Results per class.")]
    flips: Annotated[tuple[Flip, ...], doc("Requests that changed, lost ones first, at most 200.")]
    other_flips: Annotated[int, doc("Changed requests that flips does not list.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """Result of `replay compare`."""

    version: Annotated[str, doc("Version of this schema.")] = _VERSION
    confidence: Annotated[float, doc("One-sided confidence of each bound.")]
    note: Annotated[str, doc("What the bounds leave out.")]
    comparisons: Annotated[
        tuple[RunComparison, ...], doc("Each further run against the first one.")
    ]


_NOTE: Final = (
    "The bounds describe the difference within these runs. They exclude the noise between runs, "
    "which `replay ab` measures."
)
_VIRTUAL_NOTE: Final = "The runs were in virtual time, which has no noise between runs."

_CAUSAL_NOTE: Final = (
    "The runs have causal sessions: a request was sent after the one before it had ended, at "
    "times that differ between the runs."
)


def compare_runs(runs: Sequence[LoadedRun], *, confidence: float) -> ComparisonResult:
    """Compare every run with the first one.

    Args:
        runs: at least two runs, the baseline first.
        confidence: one-sided confidence of each bound.

    Raises:
        InputError: the runs have different modes of sessions.
    """
    require_same_sessions(runs)
    baseline, *others = runs
    note = _VIRTUAL_NOTE if all(run.is_virtual for run in runs) else _NOTE
    if baseline.summary.run.sessions is not None:
        note = f"{note} {_CAUSAL_NOTE}"
    return ComparisonResult(
        confidence=confidence,
        note=note,
        comparisons=tuple(compare(baseline, other, confidence=confidence) for other in others),
    )


def compare(baseline: LoadedRun, candidate: LoadedRun, *, confidence: float) -> RunComparison:
    """Compare two runs, paired by request id if they served the same requests."""
    reason = difference_between(baseline.summary, candidate.summary)
    matching = None if reason else match(baseline, candidate)
    names = list(dict.fromkeys((*baseline.class_names, *candidate.class_names)))
    latencies = _compare_latencies(
        names, baseline, candidate, confidence=confidence, paired=matching is not None
    )
    classes = tuple(
        _compare_class(name, baseline, candidate, matching, latencies=own, confidence=confidence)
        for name, own in zip(names, latencies, strict=True)
    )
    flips = () if matching is None else _list_flips(matching)
    return RunComparison(
        baseline=str(baseline.folder),
        candidate=str(candidate.folder),
        paired=matching is not None,
        unpaired_because=reason,
        invalid=tuple(
            f"{run.folder}: {run.summary.validity.sentence}"
            for run in (baseline, candidate)
            if not run.summary.validity.valid
        ),
        rejections=tuple(
            f"{run.folder}: the server rejected {run.summary.validity.client_errors} of "
            f"{run.summary.overall.requests} requests as invalid (3xx or 4xx), which count as "
            "misses in this comparison"
            for run in (baseline, candidate)
            if run.summary.validity.valid and run.summary.validity.client_errors
        ),
        dropped=0 if matching is None else matching.dropped,
        classes=classes,
        flips=flips,
        other_flips=sum(one.gained + one.lost for one in classes) - len(flips),
    )


def _compare_class(
    name: str,
    baseline: LoadedRun,
    candidate: LoadedRun,
    matching: Matching | None,
    *,
    latencies: tuple[LatencyComparison, ...],
    confidence: float,
) -> ClassComparison:
    rows = [_class_row(run, name) for run in (baseline, candidate)]
    if matching is None:
        difference, lower, upper = _unpaired_difference(name, baseline, candidate, confidence)
        matched = gained = lost = 0
        gained_by_reason: Mapping[MissReason, int] = {}
        lost_by_reason: Mapping[MissReason, int] = {}
    else:
        counts = matching.counts(name)
        matched, gained, lost = (sum(c) for c in (counts.total, counts.gained, counts.lost))
        difference = lower = upper = None
        if matched:
            interval = DifferenceEstimate([counts]).interval(confidence)
            difference, lower, upper = interval.difference, interval.lower, interval.upper
        gained_by_reason = matching.gained_by_reason.get(name, {})
        lost_by_reason = matching.lost_by_reason.get(name, {})
    promises = {promise.name: promise.objective for promise in baseline.summary.promises}
    return ClassComparison(
        name=name,
        objective=promises.get(name),
        baseline_attainment=rows[0][0],
        candidate_attainment=rows[1][0],
        baseline_goodput_per_s=rows[0][1],
        candidate_goodput_per_s=rows[1][1],
        difference=None if difference is None else round(difference, 6),
        difference_lower=None if lower is None else cut_share(lower),
        difference_upper=None if upper is None else round(upper, 6),
        matched=matched,
        gained=gained,
        lost=lost,
        gained_by_reason={reason.value: n for reason, n in gained_by_reason.items()},
        lost_by_reason={reason.value: n for reason, n in lost_by_reason.items()},
        latencies=latencies,
    )


def _class_row(run: LoadedRun, name: str) -> tuple[float | None, float]:
    for row in run.summary.classes:
        if row.name == name:
            return row.attainment, row.goodput_per_s
    return None, 0.0


def _unpaired_difference(
    name: str, baseline: LoadedRun, candidate: LoadedRun, confidence: float
) -> tuple[float | None, float | None, float | None]:
    """Return the difference of two independent attainments, and its bounds.

    Source: Newcombe, "Interval estimation for the difference between independent proportions",
    Statistics in Medicine, 1998, method 10, with the intervals of the two windows.
    """
    counts = [run.second_counts(name) for run in (baseline, candidate)]
    shares = [one.attainment.share for one in counts]
    if shares[0] is None or shares[1] is None:
        return None, None, None
    first, second = (WindowEstimate(one).interval(confidence) for one in counts)
    difference = float(shares[1] - shares[0])
    below = math.hypot(float(shares[1]) - second.lower, first.upper - float(shares[0]))
    above = math.hypot(second.upper - float(shares[1]), float(shares[0]) - first.lower)
    return difference, max(-1.0, difference - below), min(1.0, difference + above)


def _compare_latencies(
    names: Sequence[str],
    baseline: LoadedRun,
    candidate: LoadedRun,
    *,
    confidence: float,
    paired: bool,
) -> Iterator[tuple[LatencyComparison, ...]]:
    """Yield the quantiles of the latencies of each class, read for a few classes at a time."""
    for start in range(0, len(names), _CLASSES_AT_ONCE):
        some = names[start : start + _CLASSES_AT_ONCE]
        differences = quantile_differences(
            _latencies(baseline, some),
            _latencies(candidate, some),
            len(some) * len(_METRICS),
            list(_LEVELS.values()),
            confidence=confidence,
            paired=paired,
        )
        for number in range(len(some)):
            own = differences[number * len(_METRICS) :]
            yield tuple(
                LatencyComparison(
                    metric=metric,
                    quantile=level,
                    baseline_ms=_to_ms(one.baseline_ns),
                    candidate_ms=_to_ms(one.candidate_ns),
                    bounds_ms=None
                    if one.bounds_ns is None
                    else (_to_ms(one.bounds_ns[0]), _to_ms(one.bounds_ns[1])),
                )
                for metric, found in zip(_METRICS, own, strict=False)
                for level, one in zip(_LEVELS, found or (), strict=False)
            )


def _latencies(run: LoadedRun, names: Sequence[str]) -> LatencySource:
    """Return the latencies of some classes; each metric of each class is a group."""
    parts = ColumnParts(run.folder)

    def read() -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.int64]]]:
        for part in parts:
            seconds = run.counts.second_of(part.scheduled_ns)
            masks = [part.of_class(name) for name in names]
            for number, values_ns in enumerate((part.ttft_ns, part.tpot_ns, part.e2e_ns)):
                for place, mask in enumerate(masks):
                    yield place * len(_METRICS) + number, values_ns[mask], seconds[mask]

    return LatencySource(read=read, window_s=run.counts.length_s)


def _list_flips(matching: Matching) -> tuple[Flip, ...]:
    """Return the changed requests that the matching lists."""
    before, after = (
        read_rows(run.folder, rows, _FLIP_COLUMNS)
        for run, rows in (
            (matching.baseline, [one.baseline_row for one in matching.changed]),
            (matching.candidate, [one.candidate_row for one in matching.changed]),
        )
    )
    start_s = matching.baseline.summary.window.start_s
    flips = []
    for one, old, new in zip(matching.changed, before, after, strict=True):
        good, missed = (old, new) if one.lost else (new, old)
        flips.append(
            Flip(
                request_id=old["request_id"],
                slo_class=old["slo_class"],
                at_s=round(old["scheduled_ns"] / NS_PER_S - start_s, 3),
                input_tokens=old["input_tokens"],
                output_tokens=good["output_tokens"],
                lost=one.lost,
                reasons=tuple(missed["miss_reasons"]),
                detail=missed["detail"],
                baseline_ttft_ms=_ttft_ms(old),
                candidate_ttft_ms=_ttft_ms(new),
                baseline_tpot_ms=_tpot_ms(old),
                candidate_tpot_ms=_tpot_ms(new),
                baseline_replica=old["replica"],
                candidate_replica=new["replica"],
            )
        )
    return tuple(flips)


def _ttft_ms(row: Mapping[str, Any]) -> float | None:
    first_ns = row["first_token_ns"]
    return None if first_ns is None else _to_ms(first_ns - row["scheduled_ns"])


def _tpot_ms(row: Mapping[str, Any]) -> float | None:
    first_ns, last_ns, tokens = (
        row[name] for name in ("first_token_ns", "last_token_ns", "output_tokens")
    )
    if first_ns is None or last_ns is None or tokens < 2:
        return None
    return _to_ms((last_ns - first_ns) / (tokens - 1))


def _to_ms(ns: float) -> float:
    return round(ns / NS_PER_MS, 3)
