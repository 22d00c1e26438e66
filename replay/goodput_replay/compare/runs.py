"""Finished runs as arrays, and their requests matched by id.

Two runs can be paired if they sent the same requests under the same promises. A request that was
not judged in both runs is dropped and counted. Memory is about three hundred bytes per request.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from goodput_core.errors import InputError
from goodput_core.slo.attainment import MissCounts, SecondCounts
from goodput_core.slo.judging import (
    JudgementKind,
    MissReason,
    judge,
    judge_favourably,
    targets_for,
    without_lag,
)
from goodput_core.slo.pairs import PairCounts
from goodput_core.slo.stalls import NO_STALLS
from goodput_core.slo.targets import SLOClass, parse_objective
from goodput_core.units import NS_PER_S
from goodput_replay.runs.columns import KINDS, RunColumns, load_columns
from goodput_replay.runs.files import RECORDS_FILE, SUMMARY_FILE
from goodput_replay.runs.formatting import session_mode
from goodput_replay.runs.records import open_records, read_records
from goodput_replay.runs.summary import ClassSummary, Summary, read_summary
from goodput_replay.runs.summary_builder import read_stalls

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from fractions import Fraction

    from goodput_core.slo.record import Outcome


__all__ = [
    "LoadedRun",
    "Matching",
    "difference_between",
    "load_run",
    "match",
    "read_checked_summary",
    "read_classes",
    "read_misses",
    "require_same_sessions",
]

_MAX_LISTED: Final = 80
_MAX_WINDOW_S: Final = 366 * 86_400
_SAMPLED: Final = ("--rate-scale", "--session-arrivals")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """A finished run and its judged requests.

    Args:
        folder: the run's folder.
        summary: the run's summary.
        columns: its requests, without warm-up rows.
        ids: request ids in the order of `columns`, an Arrow array of strings.
    """

    folder: Path
    summary: Summary
    columns: RunColumns
    ids: Any

    @property
    def is_virtual(self) -> bool:
        """True if the run was in virtual time."""
        return self.summary.emulation is not None

    @property
    def window_s(self) -> int:
        """Length of the window in seconds, rounded up, at least 1."""
        return max(1, int(np.ceil(self.summary.window.length_s - 1e-9)))

    @property
    def seconds(self) -> NDArray[np.int64]:
        """Second of the window in which each request was scheduled; shape [num_requests]."""
        start_ns = round(self.summary.window.start_s * NS_PER_S)
        seconds = (self.columns.scheduled_ns - start_ns) // NS_PER_S
        return np.clip(seconds.astype(np.int64), 0, self.window_s - 1)

    @property
    def attained(self) -> NDArray[np.bool_]:
        """Mask of the requests that met their targets."""
        return self.columns.of_kind(JudgementKind.ATTAINED)

    @property
    def judged(self) -> NDArray[np.bool_]:
        """Mask of the requests that met or missed their targets."""
        return self.attained | self.columns.of_kind(JudgementKind.MISSED)

    def objective(self, name: str) -> Fraction | None:
        """Return the objective of a class; None if it has none."""
        for promise in self.summary.promises:
            if promise.name == name and promise.objective is not None:
                return parse_objective(promise.objective)
        return None

    def slo_classes(self) -> list[SLOClass]:
        """Return the classes of the run's SLO."""
        return read_classes(self.summary)

    def ids_of_outcome(self, outcome: Outcome) -> list[str]:
        """Return the ids of the requests with an outcome."""
        ids: list[str] = self.ids.filter(pa.array(self.columns.of_outcome(outcome))).to_pylist()
        return ids

    def judged_without_lag(self) -> LoadedRun:
        """Return the run, judged as if the client had sent and read on time."""
        stalls = read_stalls(self.summary.client)
        classes = {one.name: one for one in self.slo_classes()}
        missed = self.columns.of_kind(JudgementKind.MISSED)
        kinds = self.columns.kind_code.copy()
        for index, record in enumerate(read_records(self.folder, gaps=False)):
            if missed[index]:
                own = stalls.get(record.sender, NO_STALLS)
                judgement = judge(without_lag(record, own), targets_for(record, classes))
                kinds[index] = KINDS.index(judgement.kind)
        return replace(self, columns=replace(self.columns, kind_code=kinds))

    def judged_favourably(self) -> LoadedRun:
        """Return the run with every question of its deviations decided in its favour."""
        classes = {one.name: one for one in self.slo_classes()}
        kinds = self.columns.kind_code.copy()
        for index, record in enumerate(read_records(self.folder, gaps=False)):
            if record.deviations:
                judgement = judge_favourably(record, targets_for(record, classes))
                kinds[index] = KINDS.index(judgement.kind)
        return replace(self, columns=replace(self.columns, kind_code=kinds))

    def second_counts(self, name: str) -> SecondCounts:
        """Count the judged requests of a class by second of the window."""
        mask = self.judged & self.columns.of_class(name)
        seconds, length = self.seconds, self.window_s
        return SecondCounts(
            good=np.bincount(seconds[mask & self.attained], minlength=length).tolist(),
            total=np.bincount(seconds[mask], minlength=length).tolist(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """The requests of two runs, matched by id.

    Args:
        baseline: the first run.
        candidate: the second run.
        at_baseline: indices of the requests that were judged in both runs; shape [num_matched].
        at_candidate: their indices in the candidate.
        only_baseline: requests that only the baseline has.
        only_candidate: requests that only the candidate has.
        not_judged: requests of both runs that were cancelled or could not be judged in one.
    """

    baseline: LoadedRun
    candidate: LoadedRun
    at_baseline: NDArray[np.int64]
    at_candidate: NDArray[np.int64]
    only_baseline: int
    only_candidate: int
    not_judged: int

    @property
    def gained(self) -> NDArray[np.bool_]:
        """Mask of the matched requests that only the candidate served in time."""
        return ~self._before & self._after

    @property
    def lost(self) -> NDArray[np.bool_]:
        """Mask of the matched requests that only the baseline served in time."""
        return self._before & ~self._after

    def of_class(self, name: str) -> NDArray[np.bool_]:
        """Mask of the matched requests of a class of the baseline."""
        return self.baseline.columns.of_class(name)[self.at_baseline]

    def counts(self, name: str) -> PairCounts:
        """Count the matched requests of a class by second of the window."""
        mask = self.of_class(name)
        seconds, length = self.baseline.seconds[self.at_baseline], self.baseline.window_s

        def count(chosen: NDArray[np.bool_]) -> list[int]:
            counts: list[int] = np.bincount(seconds[chosen], minlength=length).tolist()
            return counts

        return PairCounts(
            gained=count(mask & self.gained), lost=count(mask & self.lost), total=count(mask)
        )

    @property
    def _before(self) -> NDArray[np.bool_]:
        return self.baseline.attained[self.at_baseline]

    @property
    def _after(self) -> NDArray[np.bool_]:
        return self.candidate.attained[self.at_candidate]


def load_run(folder: Path) -> LoadedRun:
    """Load a finished run.

    Raises:
        InputError: the folder has no complete run, or a file of it is damaged, or its records are
            not those of its summary, or it is one of several shards.
    """
    summary = read_checked_summary(folder)
    if summary.run.shard is not None:
        raise InputError(
            f"{folder}: only shard {summary.run.shard}; join all shards with `replay merge`"
        )
    columns = load_columns(folder)
    with open_records(folder) as opened:
        ids = opened.read(columns=["request_id"])["request_id"].combine_chunks()
    run = LoadedRun(
        folder=folder, summary=summary, columns=columns, ids=ids.take(pa.array(columns.row))
    )
    _require_counts_of_summary(run)
    return run


def _require_counts_of_summary(run: LoadedRun) -> None:
    overall = run.summary.overall
    expected = (overall.requests, overall.good, overall.total)
    counts = len(run.ids), int(run.attained.sum()), int(run.judged.sum())
    if counts != expected:
        records, summary = (
            f"{requests} requests, of which {good} of {total} met their targets"
            for requests, good, total in (counts, expected)
        )
        raise InputError(
            f"{run.folder}: the records are not those of the summary ({RECORDS_FILE} has "
            f"{records}, and {SUMMARY_FILE} {summary}); restore both files or replay again"
        )


def read_checked_summary(folder: Path) -> Summary:
    """Read a summary, and reject values that no run has.

    Raises:
        InputError: the folder has no summary, or a value is out of bounds.
    """
    summary = read_summary(folder)
    window = summary.window
    try:
        for promise in summary.promises:
            if promise.objective is not None:
                parse_objective(promise.objective)
        if not window.length_s > 0:
            raise ValueError("the window does not end after its start")
        if not (window.length_s <= _MAX_WINDOW_S and abs(window.start_s) <= _MAX_WINDOW_S):
            raise ValueError("the window is longer than a year, or begins more than a year away")
        if not 0 <= summary.outage_s <= _MAX_WINDOW_S:
            raise ValueError("the declared outage is out of bounds")
    except ValueError as error:
        raise InputError(f"{folder / SUMMARY_FILE}: not a run's summary ({error})") from error
    return summary


def read_classes(summary: Summary) -> list[SLOClass]:
    """Return the classes of a run's SLO."""
    return [
        SLOClass(
            name=promise.name,
            ttft_ms=promise.ttft_ms,
            tpot_ms=promise.tpot_ms,
            tbt_p99_ms=promise.tbt_p99_ms,
            e2e_ms=promise.e2e_ms,
            objective=None if promise.objective is None else parse_objective(promise.objective),
            priority=promise.priority,
            weight=promise.weight,
        )
        for promise in summary.promises
    ]


def read_misses(row: ClassSummary) -> MissCounts:
    """Return the misses of one class of a run."""
    return MissCounts(
        by_reason={
            reason: row.misses[reason.value] for reason in MissReason if reason.value in row.misses
        },
        without_response=row.misses_without_response,
    )


def match(baseline: LoadedRun, candidate: LoadedRun) -> Matching:
    """Match the requests of two runs of the same trace by id."""
    found = pc.index_in(candidate.ids, value_set=baseline.ids)
    is_found = found.is_valid().to_numpy(zero_copy_only=False)
    at_candidate = np.flatnonzero(is_found)
    at_baseline = found.drop_null().to_numpy().astype(np.int64)
    both = baseline.judged[at_baseline] & candidate.judged[at_candidate]
    return Matching(
        baseline=baseline,
        candidate=candidate,
        at_baseline=at_baseline[both],
        at_candidate=at_candidate[both],
        only_baseline=len(baseline.ids) - len(at_baseline),
        only_candidate=len(candidate.ids) - len(at_candidate),
        not_judged=int(np.count_nonzero(~both)),
    )


def difference_between(first: Summary, second: Summary) -> str:
    """Return why the requests of two runs cannot be paired; empty if they can.

    The text names the first difference, with the values of both runs. Two shards can be merged, and
    only then be paired with another run; here, their rows are those of the complete trace.
    """
    if first.trace.digest != second.trace.digest:
        return f"the trace differs: {_describe_trace(first)} and {_describe_trace(second)}"
    is_sampled = any(text.startswith(_SAMPLED) for text in first.trace.transforms)
    one, other = (summary.run.shard or summary.window for summary in (first, second))
    pairs: tuple[tuple[str, object, object], ...] = (
        ("the trace selection", first.trace.transforms, second.trace.transforms),
        ("--seed", is_sampled and first.run.seed, is_sampled and second.run.seed),
        ("--sessions", session_mode(first), session_mode(second)),
        # With causal sessions, the window depends on the responses.
        *(_windows(first, second) if first.run.sessions is None else ()),
        ("the number of rows", one.rows_planned, other.rows_planned),
        ("--warmup", one.warmup_rows, other.warmup_rows),
        ("--concurrency", first.run.concurrency, second.run.concurrency),
        ("--retries", first.run.retries, second.run.retries),
        *_promises(first, second),
        ("the default class", first.default_class, second.default_class),
        ("slo.outageSeconds", first.outage_s, second.outage_s),
        ("virtual time", first.emulation is not None, second.emulation is not None),
        ("--length-pinning", first.target.pinning.value, second.target.pinning.value),
        ("the form of prompts", first.target.prompt, second.target.prompt),
        ("the endpoint", first.target.endpoint, second.target.endpoint),
        ("streaming", first.target.streaming, second.target.streaming),
    )
    for name, a, b in pairs:
        if a != b:
            return f"{name} differs: {_shorten(a)} and {_shorten(b)}"
    return ""


def require_same_sessions(runs: Sequence[LoadedRun]) -> None:
    """Reject runs of different session modes, which measure different loads.

    Raises:
        InputError: a run has another mode than the first one.
    """
    modes = [session_mode(run.summary) for run in runs]
    for run, mode in zip(runs, modes, strict=True):
        if mode != modes[0]:
            raise InputError(
                f"{runs[0].folder} and {run.folder} cannot be compared: one has --sessions "
                f"{modes[0]}, the other {mode}; replay both with the same --sessions"
            )


def _windows(first: Summary, second: Summary) -> Iterator[tuple[str, object, object]]:
    yield "the start of the window", first.window.start_s, second.window.start_s
    yield "the length of the window", first.window.length_s, second.window.length_s


def _promises(first: Summary, second: Summary) -> Iterator[tuple[str, object, object]]:
    """Yield every field of the SLO with its values in both runs."""
    names = [[promise.name for promise in summary.promises] for summary in (first, second)]
    yield "the classes of the SLO", tuple(names[0]), tuple(names[1])
    for a, b in zip(first.promises, second.promises, strict=False):
        for field in fields(a):
            yield f"{field.name} of {a.name}", getattr(a, field.name), getattr(b, field.name)


def _describe_trace(summary: Summary) -> str:
    trace = summary.trace
    return f"{trace.name} ({trace.digest[:19]})"


def _shorten(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text[:_MAX_LISTED] + "…" * (len(text) > _MAX_LISTED) or "none"
