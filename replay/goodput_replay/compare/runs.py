"""Finished runs: their counts, their requests in parts, and if two of them can be paired.

Two runs can be paired if they sent the same requests under the same promises. Memory does not grow
with the requests, except by 9 bytes for each one that is judged again with another result.
"""

from __future__ import annotations

from array import array
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from datetime import datetime
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
from goodput_core.slo.record import Outcome
from goodput_core.slo.stalls import NO_STALLS
from goodput_core.slo.targets import SLOClass, parse_objective
from goodput_core.units import NS_PER_S
from goodput_replay.runs.chosen_rows import read_chosen
from goodput_replay.runs.columns import KINDS, ColumnParts
from goodput_replay.runs.files import RECORDS_FILE, SUMMARY_FILE, require_digest
from goodput_replay.runs.formatting import session_mode
from goodput_replay.runs.summary import ClassSummary, Summary, read_summary
from goodput_replay.runs.summary_builder import read_stalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from fractions import Fraction

    from goodput_core.slo.judging import Judgement
    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.targets import Targets
    from goodput_replay.compare.comparable import RunInputs
    from goodput_replay.runs.columns import RunColumns

__all__ = [
    "LoadedRun",
    "RunCounts",
    "difference_between",
    "load_run",
    "missed_shares",
    "read_checked_summary",
    "read_classes",
    "read_misses",
    "reject_copies",
    "require_same_sessions",
]

_MISSED: Final = JudgementKind.MISSED.value
_COUNTED: Final = (JudgementKind.ATTAINED, JudgementKind.MISSED)
_MAX_LISTED: Final = 80
_MAX_WINDOW_S: Final = 366 * 86_400
_SAMPLED: Final = ("--rate-scale", "--session-arrivals")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """A finished run, whose requests are counted when it is loaded and read in parts later.

    Args:
        folder: the run's folder.
        summary: the run's summary.
        counts: its requests by class and second.
        changed_rows: requests whose judgement differs from the recorded one: their indices in the
            file, ascending; shape [num_changed].
        changed_kinds: their judgements, as in `RunColumns`.
    """

    folder: Path
    summary: Summary
    counts: RunCounts
    changed_rows: NDArray[np.int64]
    changed_kinds: NDArray[np.int8]

    @property
    def is_virtual(self) -> bool:
        """True if the run was in virtual time."""
        return self.summary.emulation is not None

    @property
    def started_at(self) -> datetime:
        """Wall-clock time of the run's time zero."""
        return datetime.fromisoformat(self.summary.run.started_at)

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their first requests."""
        return list(self.counts.requests)

    def objective(self, name: str) -> Fraction | None:
        """Return the objective of a class; None if it has none."""
        for promise in self.summary.promises:
            if promise.name == name and promise.objective is not None:
                return parse_objective(promise.objective)
        return None

    def slo_classes(self) -> list[SLOClass]:
        """Return the classes of the run's SLO."""
        return read_classes(self.summary)

    def parts(self) -> Iterator[RunColumns]:
        """Yield the judged requests with their ids.

        Raises:
            InputError: the records cannot be read.
        """
        for part in ColumnParts(self.folder, ids=True):
            if not len(part.row):
                continue
            first, end = np.searchsorted(self.changed_rows, (part.row[0], part.row[-1] + 1))
            kinds = part.kind_code.copy()
            changed = np.searchsorted(part.row, self.changed_rows[first:end])
            kinds[changed] = self.changed_kinds[first:end]
            yield replace(part, kind_code=kinds)

    def judged_without_lag(self) -> LoadedRun:
        """Return the run, judged as if the client had sent and read on time."""
        stalls = read_stalls(self.summary.client)
        return self._judged_again(
            _find_missed,
            lambda record, targets: judge(
                without_lag(record, stalls.get(record.sender, NO_STALLS)), targets
            ),
        )

    def judged_favourably(self) -> LoadedRun:
        """Return the run with every question of its deviations decided in its favour."""
        return self._judged_again(_find_deviating, judge_favourably)

    def judged_undisturbed(self, rows: NDArray[np.int64]) -> LoadedRun:
        """Return the run without the client's lag, without some rows, and judged in its favour.

        Args:
            rows: indices of missed requests in the file.
        """
        stalls = read_stalls(self.summary.client)
        return self._judged_again(
            lambda batch: pc.or_kleene(_find_missed(batch), _find_deviating(batch)),
            lambda record, targets: judge_favourably(
                without_lag(record, stalls.get(record.sender, NO_STALLS)), targets
            ),
            excluded=frozenset(rows.tolist()),
        )

    def judged_without(self, rows: NDArray[np.int64]) -> LoadedRun:
        """Return the run without the requests in some rows of its records.

        Args:
            rows: indices in the file, ascending.
        """
        kinds = np.full(len(rows), KINDS.index(JudgementKind.EXCLUDED), dtype=np.int8)
        counts = RunCounts(self.summary)
        run = replace(self, counts=counts, changed_rows=rows, changed_kinds=kinds)
        for part in run.parts():
            counts.add(part)
        return run

    def second_counts(self, name: str) -> SecondCounts:
        """Count the judged requests of a class by second of the window."""
        return self.counts.of_class(name)

    def _judged_again(
        self,
        choose: Callable[[Any], Any],
        judge_again: Callable[[RequestRecord, Targets], Judgement],
        *,
        excluded: frozenset[int] = frozenset(),
    ) -> LoadedRun:
        """Return the run with other judgements.

        Args:
            choose: returns the mask of the requests to judge again in a batch of records.
            judge_again: returns the other judgement.
            excluded: indices of chosen requests that do not count.
        """
        classes = {one.name: one for one in self.slo_classes()}
        counts = deepcopy(self.counts)
        rows, kinds = array("q"), array("b")
        for row, (record, before) in read_chosen(self.folder, choose):
            if before is None:
                continue  # a warm-up request
            kind = JudgementKind.EXCLUDED
            if row not in excluded:
                kind = judge_again(record, targets_for(record, classes)).kind
            if kind is not before.kind:
                rows.append(row)
                kinds.append(KINDS.index(kind))
                counts.change(record, before.kind, kind)
        return replace(
            self,
            counts=counts,
            changed_rows=np.array(rows, dtype=np.int64),
            changed_kinds=np.array(kinds, dtype=np.int8),
        )


class RunCounts:
    """Judged requests of a run by class and second of their scheduled arrival.

    Memory grows with the number of classes times the seconds of the window.

    Args:
        summary: summary of the run, for its window.

    Attributes:
        start_ns: start of the window, nanoseconds since the run's time zero.
        length_s: length of the window, rounded up, at least 1.
        requests: number of requests by class, in the order of their first requests.
    """

    def __init__(self, summary: Summary) -> None:
        self.start_ns = round(summary.window.start_s * NS_PER_S)
        self.length_s = max(1, int(np.ceil(summary.window.length_s - 1e-9)))
        self.requests: dict[str, int] = {}
        self._kinds: dict[str, NDArray[np.int64]] = {}

    def second_of(self, scheduled_ns: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the second of the window of each arrival; the last second for later ones."""
        seconds = (scheduled_ns - self.start_ns) // NS_PER_S
        return np.clip(seconds.astype(np.int64), 0, self.length_s - 1)

    def add(self, part: RunColumns) -> None:
        """Count the requests of a part."""
        seconds = self.second_of(part.scheduled_ns)
        for code in np.unique(part.class_code).tolist():
            name = part.class_names[code]
            mine = part.class_code == code
            self.requests[name] = self.requests.get(name, 0) + int(mine.sum())
            counts = self._counts(name)
            for number, kind in enumerate(_COUNTED):
                np.add.at(counts[number], seconds[mine & part.of_kind(kind)], 1)

    def change(self, record: RequestRecord, before: JudgementKind, after: JudgementKind) -> None:
        """Count a request with another judgement than before."""
        second = int(self.second_of(np.array([record.scheduled_ns], dtype=np.float64))[0])
        counts = self._counts(record.slo_class)
        for kind, added in ((before, -1), (after, 1)):
            if kind in _COUNTED:
                counts[_COUNTED.index(kind), second] += added

    def of_class(self, name: str) -> SecondCounts:
        """Return the counts of a class."""
        attained, missed = self._counts(name)
        return SecondCounts(good=attained.tolist(), total=(attained + missed).tolist())

    @property
    def totals(self) -> tuple[int, int, int]:
        """Numbers of requests, of those that met their targets, and of judged ones."""
        attained, missed = (
            sum(int(counts[number].sum()) for counts in self._kinds.values()) for number in (0, 1)
        )
        return sum(self.requests.values()), attained, attained + missed

    def _counts(self, name: str) -> NDArray[np.int64]:
        """Return the numbers of attained and of missed requests; shape [2, length_s]."""
        if name not in self._kinds:
            self._kinds[name] = np.zeros((len(_COUNTED), self.length_s), dtype=np.int64)
        return self._kinds[name]


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
    counts = RunCounts(summary)
    for part in ColumnParts(folder):
        counts.add(part)
    _require_counts_of_summary(folder, counts, summary)
    require_digest(folder, summary.records_digest)
    return LoadedRun(
        folder=folder,
        summary=summary,
        counts=counts,
        changed_rows=np.empty(0, dtype=np.int64),
        changed_kinds=np.empty(0, dtype=np.int8),
    )


def _find_missed(batch: Any) -> Any:
    """Return the mask of the records of a batch that missed a target."""
    return pc.equal(pc.cast(batch["judgement"], pa.string()), _MISSED)


def _find_deviating(batch: Any) -> Any:
    """Return the mask of the records of a batch that can be judged in favour of the service."""
    timed_out = pc.equal(pc.cast(batch["outcome"], pa.string()), Outcome.TIMEOUT.value)
    if "deviations" not in batch.schema.names:  # written by an earlier version
        return timed_out
    return pc.or_(timed_out, pc.greater(pc.list_value_length(batch["deviations"]), 0))


def _require_counts_of_summary(folder: Path, counts: RunCounts, summary: Summary) -> None:
    overall = summary.overall
    expected = (overall.requests, overall.good, overall.total)
    if counts.totals != expected:
        found, stated = (
            f"{requests} requests, of which {good} of {total} met their targets"
            for requests, good, total in (counts.totals, expected)
        )
        raise InputError(
            f"{folder}: the records are not those of the summary ({RECORDS_FILE} has "
            f"{found}, and {SUMMARY_FILE} {stated}); restore both files or replay again"
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
        if datetime.fromisoformat(summary.run.started_at).tzinfo is None:
            raise ValueError(f"the start {summary.run.started_at} has no zone")
    except ValueError as error:
        raise InputError(
            f"{folder / SUMMARY_FILE}: not a run's summary ({error}); restore it or replay again"
        ) from error
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


def missed_shares(runs: Iterable[LoadedRun], name: str) -> list[float]:
    """Return the share of a class's requests that each run missed, without runs of no request."""
    shares = (run.second_counts(name).attainment.share for run in runs)
    return [float(1 - share) for share in shares if share is not None]


def reject_copies(runs: Iterable[LoadedRun]) -> None:
    """Reject copies of one run, which would count as independent evidence.

    Two runs in real time never have equal records. Those in virtual time do, and repeat each other.

    Raises:
        InputError: two of the runs are copies.
    """
    known: dict[tuple[str, str], LoadedRun] = {}
    for run in runs:
        digest = run.summary.records_digest
        if not digest or run.is_virtual:
            continue
        other = known.setdefault((run.summary.run.started_at, digest), run)
        if other is not run:
            raise InputError(
                f"{other.folder} and {run.folder} are copies of one run; every run counts once"
            )


def difference_between(first: Summary | RunInputs, second: Summary) -> str:
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
        ("--sessions", session_mode(first.run), session_mode(second.run)),
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
    modes = [session_mode(run.summary.run) for run in runs]
    for run, mode in zip(runs, modes, strict=True):
        if mode != modes[0]:
            raise InputError(
                f"{runs[0].folder} and {run.folder} cannot be compared: one has --sessions "
                f"{modes[0]}, the other {mode}; replay both with the same --sessions"
            )


def _windows(first: Summary | RunInputs, second: Summary) -> Iterator[tuple[str, object, object]]:
    yield "the start of the window", first.window.start_s, second.window.start_s
    yield "the length of the window", first.window.length_s, second.window.length_s


def _promises(first: Summary | RunInputs, second: Summary) -> Iterator[tuple[str, object, object]]:
    """Yield every field of the SLO with its values in both runs."""
    names = [[promise.name for promise in summary.promises] for summary in (first, second)]
    yield "the classes of the SLO", tuple(names[0]), tuple(names[1])
    for a, b in zip(first.promises, second.promises, strict=False):
        for field in fields(a):
            yield f"{field.name} of {a.name}", getattr(a, field.name), getattr(b, field.name)


def _describe_trace(summary: Summary | RunInputs) -> str:
    trace = summary.trace
    return f"{trace.name} ({trace.digest[:19]})"


def _shorten(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text[:_MAX_LISTED] + "…" * (len(text) > _MAX_LISTED) or "none"
