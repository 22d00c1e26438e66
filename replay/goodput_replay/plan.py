"""Request plan of a run: a pure function of the trace, its transforms and the SLO classes.

A plan is read twice without keeping rows in memory: once before the run, to find invalid rows,
unknown classes and excessive rates, and once to send.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from goodput_core.cli import installed_version
from goodput_core.errors import InputError
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_S
from goodput_replay.arguments import ReplayOptions
from goodput_replay.run.slo import SLOClasses
from goodput_replay.run.summary import (
    ClientSummary,
    EmulationSummary,
    RunSummary,
    TargetSummary,
    TraceSummary,
)
from goodput_replay.run.summary_builder import RunInfo
from goodput_traces.format.reader import Trace
from goodput_traces.format.schema import Clock
from goodput_traces.transforms import TransformPlan, apply

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from numpy.typing import NDArray

    from goodput_traces.format.schema import TraceRow

__all__ = ["PlanStats", "PlannedRequest", "PromptKey", "RequestPlan", "RunPlan", "survey"]

_MAX_MODELS = 1000
_MAX_EXAMPLES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKey:
    """Everything but the salt that determines a prompt.

    Args:
        request_id: determines the tokens that belong to this row alone.
        input_tokens: length, at least 1.
        hashes: one per block, in order; empty if no prefix is shared.
        block_size: tokens per hash; above 0 where there are hashes.
    """

    request_id: str
    input_tokens: int
    hashes: Sequence[int] = ()
    block_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to send.

    Args:
        request_id: the trace's id.
        scheduled_ns: arrival, nanoseconds since the run's zero.
        slo_class: the class that judges it; empty without classes.
        targets: the row's own.
        priority: larger is more urgent; None if the trace does not state it.
        prompt: determines the prompt.
        output_tokens: length of the answer in the trace.
        max_output_tokens: the client's bound on the answer in the trace; None if unbounded.
        cancel_after_ns: when the client cancels, from `scheduled_ns`; None for never.
        model_name: the model in the trace; empty if not stated.
        warmup: True if it is sent and not judged.
    """

    request_id: str
    scheduled_ns: int
    slo_class: str
    targets: Targets
    priority: int | None
    prompt: PromptKey
    output_tokens: int
    max_output_tokens: int | None
    cancel_after_ns: int | None
    model_name: str = ""
    warmup: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """A trace, its transforms, and the SLO classes of its rows.

    Args:
        trace: an opened trace.
        transforms: window, scale, classes, limit, speed.
        slo: the classes; rows that name none get the default class.
        warmup: how many of the first rows are not judged.
    """

    trace: Trace
    transforms: TransformPlan
    slo: SLOClasses
    warmup: int = 0

    def requests(self) -> Iterator[PlannedRequest]:
        """Yield the requests in the order of their arrival.

        Raises:
            TraceError: a row that breaks a rule.
            InputError: a session-relative trace, or a class that the SLO does not have.
        """
        self._require_clock()
        first_ns = self.trace.first_ns
        zero_ns = self.transforms.zero_ns(first_ns)
        classes = {c.name for c in self.slo.classes}
        rows = self.trace.rows(start_ns=zero_ns, end_ns=self.transforms.end_ns(first_ns))
        for number, row in enumerate(apply(rows, self.transforms)):
            yield PlannedRequest(
                request_id=row.request_id,
                scheduled_ns=row.timestamp_start_unix_ns - zero_ns,
                slo_class=self._class_of(row, classes),
                targets=row.targets,
                priority=row.priority,
                prompt=PromptKey(
                    request_id=row.request_id,
                    input_tokens=row.input_tokens,
                    hashes=row.total_hashes,
                    block_size=row.block_size or 0,
                ),
                output_tokens=row.output_tokens,
                max_output_tokens=row.max_output_tokens,
                cancel_after_ns=row.cancel_after_ns,
                model_name=row.model_name or "",
                warmup=number < self.warmup,
            )

    def window_ns(self, stats: PlanStats) -> int:
        """Return the length of the replayed window, at least a second so that rates are finite."""
        end_ns = self.transforms.end_ns(self.trace.first_ns)
        if end_ns is None or self.transforms.limit is not None:
            return max(NS_PER_S, stats.last_ns + 1)
        length_ns = end_ns - self.transforms.zero_ns(self.trace.first_ns)
        return max(1, int(length_ns / self.transforms.speed))

    def _require_clock(self) -> None:
        if self.trace.metadata.clock is Clock.SESSION_RELATIVE:
            raise InputError(
                f"{self.trace.path}: its clock restarts in every session, and session arrivals "
                "are not implemented yet; replay a trace with absolute or trace-relative time"
            )

    def _class_of(self, row: TraceRow, classes: set[str]) -> str:
        name = row.slo_class or self.slo.default or ""
        if classes and name not in classes:
            raise InputError(
                f"{self.trace.path}: request {row.request_id!r} has the class {name!r}, which "
                f"spec.slo.classes does not have; its classes are {', '.join(sorted(classes))}; "
                "map the class with --class-by, or add it"
            )
        return name


@dataclass(slots=True, kw_only=True)
class PlanStats:
    """Totals of a plan. Counts and tokens are sums; times are nanoseconds since zero.

    Args:
        rows: requests, warm-up included.
        warmup_rows: requests that are not judged.
        first_judged_ns: arrival of the first judged request; None without one.
        last_ns: the last arrival.
        peak_1s: most arrivals within any one second.
        peak_at_ns: start of that second.
        input_tokens: summed over all rows.
        output_tokens: summed over all rows.
        max_input_tokens: of any row.
        max_output_tokens: of any row.
        classes: rows by class.
        models: rows by the trace's model name, a bounded number of names.
        cancelled_rows: rows that the trace's own client cancelled.
        rows_with_targets: rows with targets of their own.
        rows_with_hashes: rows with prefix hashes.
        examples: the first request of each class, a bounded number of classes.
    """

    rows: int = 0
    warmup_rows: int = 0
    first_judged_ns: int | None = None
    last_ns: int = 0
    peak_1s: int = 0
    peak_at_ns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    max_input_tokens: int = 0
    max_output_tokens: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    cancelled_rows: int = 0
    rows_with_targets: int = 0
    rows_with_hashes: int = 0
    examples: dict[str, PlannedRequest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Inputs of a run, fixed before it starts.

    Args:
        options: command-line options.
        requests: requests to send.
        stats: totals of `requests`.
        trace: description of the trace for the summary.
        slo: SLO classes for judging.
        headers: headers of every request; may contain a key.
        salt: salt of the prompts.
        service: the manifest's name; empty for a bare target.
        command: the command line without secrets.
    """

    options: ReplayOptions
    requests: RequestPlan
    stats: PlanStats
    trace: TraceSummary
    slo: SLOClasses
    headers: dict[str, str]
    salt: str
    service: str
    command: tuple[str, ...]

    def info(
        self,
        *,
        target: TargetSummary,
        started: datetime,
        client: ClientSummary,
        salt: str = "",
        stopped: str = "",
        loop_lag_p99_ns: int = 0,
        loop_lag_max_ns: int = 0,
        emulation: EmulationSummary | None = None,
    ) -> RunInfo:
        """Describe the run for its summary.

        Args:
            target: where requests were sent.
            started: the run's zero, as an aware time.
            client: resources that the client used.
            salt: of the prompts; empty where prompts have no text.
            stopped: why the run ended early, as the end of a sentence; empty if it did not.
            loop_lag_p99_ns: see `RunInfo`.
            loop_lag_max_ns: see `RunInfo`.
            emulation: what was emulated; None in real time.
        """
        stats = self.stats
        start_ns = (stats.first_judged_ns or 0) if stats.warmup_rows else 0
        return RunInfo(
            trace=self.trace,
            target=target,
            run=RunSummary(
                started_at=started.isoformat(timespec="microseconds"),
                goodput_version=installed_version(),
                command=self.command,
                seed=self.options.seed,
                salt=salt,
                complete=not stopped,
                abort_reason=stopped,
            ),
            slo=self.slo,
            window_start_ns=start_ns,
            window_ns=max(1, self.requests.window_ns(stats) - start_ns),
            rows_planned=stats.rows - stats.warmup_rows,
            warmup_rows=stats.warmup_rows,
            confidence=float(self.options.confidence),
            client=client,
            loop_lag_p99_ns=loop_lag_p99_ns,
            loop_lag_max_ns=loop_lag_max_ns,
            emulation=emulation,
        )


def survey(plan: RequestPlan) -> PlanStats:
    """Walk the whole plan once, keeping eight bytes of each row.

    Raises:
        InputError: as `RequestPlan.requests`; also if no row is left, or if two share one id.
    """
    stats = PlanStats()
    second: deque[int] = deque()
    id_hashes = array("q")
    for request in plan.requests():
        _count(stats, request)
        id_hashes.append(hash(request.request_id))
        second.append(request.scheduled_ns)
        while second[0] <= request.scheduled_ns - NS_PER_S:
            second.popleft()
        if len(second) > stats.peak_1s:
            stats.peak_1s, stats.peak_at_ns = len(second), second[0]
    if stats.rows == 0:
        span_ns = plan.trace.last_ns - plan.trace.first_ns
        raise InputError(f"{plan.trace.path}: {plan.transforms.empty_problem(span_ns)}")
    if stats.first_judged_ns is None:
        raise InputError(
            f"{plan.trace.path}: --warmup {plan.warmup} leaves none of {stats.rows} rows to judge"
        )
    _reject_repeated_ids(plan, np.frombuffer(id_hashes, dtype=np.int64))
    return stats


def _reject_repeated_ids(plan: RequestPlan, id_hashes: NDArray[np.int64]) -> None:
    """Reject repeated ids, as runs are paired and prompts are generated by id."""
    hashes, counts = np.unique(id_hashes, return_counts=True)
    suspects = set(hashes[counts > 1].tolist())
    if not suspects:
        return
    seen: dict[str, int] = {}
    for number, request in enumerate(plan.requests(), start=1):
        name = request.request_id
        if hash(name) not in suspects:
            continue
        if name in seen:
            raise InputError(
                f"{plan.trace.path}: column request_id: {name!r} is used by requests {seen[name]} "
                f"and {number} of the plan; give every row its own id"
            )
        seen[name] = number


def _count(stats: PlanStats, request: PlannedRequest) -> None:
    stats.rows += 1
    if request.warmup:
        stats.warmup_rows += 1
    elif stats.first_judged_ns is None:
        stats.first_judged_ns = request.scheduled_ns
    stats.last_ns = request.scheduled_ns
    tokens = request.prompt.input_tokens
    stats.input_tokens += tokens
    stats.output_tokens += request.output_tokens
    stats.max_input_tokens = max(stats.max_input_tokens, tokens)
    stats.max_output_tokens = max(stats.max_output_tokens, request.output_tokens)
    stats.classes[request.slo_class] += 1
    if request.slo_class not in stats.examples and len(stats.examples) < _MAX_EXAMPLES:
        stats.examples[request.slo_class] = request
    if request.model_name in stats.models or len(stats.models) < _MAX_MODELS:
        stats.models[request.model_name] += 1
    stats.cancelled_rows += request.cancel_after_ns is not None
    stats.rows_with_targets += not request.targets.empty
    stats.rows_with_hashes += bool(request.prompt.hashes)
