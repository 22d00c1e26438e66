"""Request plan of a run, which depends only on the trace, its transforms and the SLO classes.

A plan is read twice, and its rows are not kept in memory. The first pass runs before the run and
finds invalid rows, unknown classes and excessive rates. The second pass sends the requests.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_S, format_duration
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.shares import ALL
from goodput_traces.duplicates import DuplicateIds
from goodput_traces.format.reader import Trace
from goodput_traces.format.schema import Clock
from goodput_traces.transforms import TransformPlan, apply

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from goodput_engine.device.profile import DeviceProfile
    from goodput_replay.shares import Share
    from goodput_traces.format.schema import TraceRow

__all__ = [
    "MAX_PLAN_NS",
    "PlanStats",
    "PlannedRequest",
    "PromptKey",
    "RequestPlan",
    "choose_workers",
    "require_fit",
    "survey",
]

MAX_PLAN_NS: Final = 366 * 86_400 * NS_PER_S
"""Longest plan. Judging counts each second of the run, so its memory grows with the plan."""
_MAX_MODELS = 1000
_MAX_EXAMPLES = 16
# Estimated CPU time of sending one request and of reading one token, and the
# share of a processor up to which one process sends on time.
_REQUEST_CPU_S = 250e-6
_TOKEN_CPU_S = 15e-6
_MAX_BUSY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKey:
    """Inputs of a prompt, except the run's salt.

    Args:
        request_id: determines the tokens after the last hash.
        input_tokens: length of the prompt, at least 1.
        hashes: one hash per block, in order; empty if no prefix is shared.
        block_size: tokens per hash; above 0 if there are hashes.
    """

    request_id: str
    input_tokens: int
    hashes: Sequence[int] = ()
    block_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to send.

    Args:
        request_id: request id in the trace.
        scheduled_ns: arrival, nanoseconds since the run's time zero.
        slo_class: SLO class; empty without classes.
        targets: targets of the row, which override those of the class.
        priority: larger is more urgent; None if the trace has no priority.
        prompt: inputs of the prompt.
        output_tokens: output length in the trace.
        max_output_tokens: maximum output length in the trace; None if unbounded.
        cancel_after_ns: time from `scheduled_ns` to the cancellation by the trace; None if none.
        model_name: model name in the trace; empty if none.
        warmup: True if the request is sent but not judged.
        session_id: session of the request; empty if it has none.
        number: position in the plan, from 0.
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
    session_id: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """A trace, its transforms, and the SLO classes of its rows.

    Args:
        trace: an opened trace.
        transforms: window, rate scale, class rules, limit and speed.
        slo: SLO classes; rows without a class get the default class.
        warmup: number of rows at the start that are sent but not judged.
    """

    trace: Trace
    transforms: TransformPlan
    slo: SLOClasses
    warmup: int = 0

    def requests(self) -> Iterator[PlannedRequest]:
        """Yield the requests in the order of their arrival.

        Raises:
            TraceError: a row is invalid.
            InputError: the trace is session-relative and its sessions have no starts, or the
                reverse, or a class is not in the SLO.
        """
        for _, planned in self.rows():
            yield planned

    def rows(self) -> Iterator[tuple[TraceRow, PlannedRequest]]:
        """Yield each request with its transformed row; see `requests`."""
        self._require_clock()
        zero_ns = self.zero_ns
        classes = {c.name for c in self.slo.classes}
        if self.transforms.session_arrivals is None:
            rows = self.trace.rows(start_ns=zero_ns, end_ns=self._end_ns)
        else:
            rows = self.trace.rows()
        for number, row in enumerate(apply(rows, self.transforms)):
            planned = PlannedRequest(
                request_id=row.request_id,
                scheduled_ns=row.timestamp_start_unix_ns - zero_ns,
                slo_class=self._class_name(row, classes),
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
                session_id=row.session_id or "",
                number=number,
            )
            yield row, planned

    def window_ns(self, stats: PlanStats) -> int:
        """Return the length of the replayed window, at least a second so that rates are finite."""
        end_ns = self._end_ns
        if end_ns is None or self.transforms.limit is not None:
            return max(NS_PER_S, stats.last_ns + 1)
        return max(1, int((end_ns - self.zero_ns) / self.transforms.speed))

    @property
    def zero_ns(self) -> int:
        """Time zero of the run on the trace's clock, or since the start of the first session."""
        return self.transforms.zero_ns(self._first_ns)

    @property
    def _first_ns(self) -> int:
        return self.trace.first_ns if self.transforms.session_arrivals is None else 0

    @property
    def _end_ns(self) -> int | None:
        return self.transforms.end_ns(self._first_ns)

    def _require_clock(self) -> None:
        has_sessions = self.trace.metadata.clock is Clock.SESSION_RELATIVE
        if has_sessions and self.transforms.session_arrivals is None:
            raise InputError(
                f"{self.trace.path}: its clock restarts in every session; give the rate at which "
                "sessions start, such as --session-arrivals poisson:0.2/s"
            )
        if not has_sessions and self.transforms.session_arrivals is not None:
            raise InputError(
                f"{self.trace.path}: its sessions have recorded starts; remove --session-arrivals"
            )

    def _class_name(self, row: TraceRow, classes: set[str]) -> str:
        name = row.slo_class or self.slo.default or ""
        if classes and name not in classes:
            if self.slo.other is not None:
                return self.slo.other
            raise InputError(
                f"{self.trace.path}: request {row.request_id!r} has the class {name!r}, which is "
                f"not among the SLO classes ({', '.join(sorted(classes))}); map the class with "
                "--class-by, or declare it"
            )
        return name


@dataclass(slots=True, kw_only=True)
class PlanStats:
    """Totals of a plan. Times are nanoseconds since the run's time zero.

    Args:
        rows: number of requests, including warm-up rows.
        warmup_rows: number of requests that are not judged.
        own_rows: number of requests in the surveyed share, including warm-up rows.
        own_warmup_rows: number of requests in the share that are not judged.
        first_judged_ns: arrival of the first judged request; None if there is none.
        tightest_ttft_ns: smallest TTFT target of the judged requests in the share; None without
            TTFT targets.
        last_ns: last arrival.
        peak_1s: maximum number of arrivals within one second.
        peak_at_ns: start of that second.
        input_tokens: prompt tokens of all rows.
        output_tokens: output tokens of all rows.
        max_input_tokens: longest prompt.
        max_output_tokens: longest output.
        min_request_tokens: fewest tokens of one request: its prompt, and its maximum output or, if
            that is unbounded, one token.
        classes: rows by class.
        models: rows by model name in the trace, at most 1,000 names.
        cancelled_rows: rows that the trace cancels.
        rows_with_targets: rows that have targets.
        rows_with_hashes: rows with prefix hashes.
        examples: first request of each class, at most 16 classes.
    """

    rows: int = 0
    warmup_rows: int = 0
    own_rows: int = 0
    own_warmup_rows: int = 0
    first_judged_ns: int | None = None
    tightest_ttft_ns: int | None = None
    last_ns: int = 0
    peak_1s: int = 0
    peak_at_ns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    max_input_tokens: int = 0
    max_output_tokens: int = 0
    min_request_tokens: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    cancelled_rows: int = 0
    rows_with_targets: int = 0
    rows_with_hashes: int = 0
    examples: dict[str, PlannedRequest] = field(default_factory=dict)


def survey(plan: RequestPlan, share: Share = ALL) -> PlanStats:
    """Read the plan once and return its totals; memory does not grow with the plan.

    Args:
        plan: the complete plan.
        share: the requests that this process sends.

    Raises:
        InputError: see `RequestPlan.requests`; also if no row is left to judge, or an id is used
            twice.
    """
    stats = PlanStats()
    last_second: deque[int] = deque()
    targets = {one.name: one.targets for one in plan.slo.classes}
    with closing(DuplicateIds()) as ids:
        for request in plan.requests():
            _count(stats, request)
            if share.holds(request):
                stats.own_rows += 1
                stats.own_warmup_rows += request.warmup
                if not request.warmup:
                    own = targets.get(request.slo_class, Targets()).overridden_by(request.targets)
                    if own.ttft_ns is not None:
                        known_ns = stats.tightest_ttft_ns
                        stats.tightest_ttft_ns = min(own.ttft_ns, known_ns or own.ttft_ns)
            ids.add(request.request_id, stats.rows)
            last_second.append(request.scheduled_ns)
            while last_second[0] <= request.scheduled_ns - NS_PER_S:
                last_second.popleft()
            if len(last_second) > stats.peak_1s:
                stats.peak_1s, stats.peak_at_ns = len(last_second), last_second[0]
        repeated = ids.find_first()
    if stats.rows == 0:
        span_ns = plan.trace.last_ns - plan.trace.first_ns
        raise InputError(f"{plan.trace.path}: {plan.transforms.empty_problem(span_ns)}")
    if stats.first_judged_ns is None:
        raise InputError(
            f"--warmup {plan.warmup} excludes all {stats.rows} requests; give a lower number"
        )
    if stats.last_ns > MAX_PLAN_NS:
        raise InputError(
            f"{plan.trace.path}: the last request arrives {format_duration(stats.last_ns)} after "
            "the start of the run, and a run lasts at most a year; choose a part with --window"
        )
    if repeated is not None:
        # Runs are paired and prompts are generated by id.
        first, second = repeated
        name = next(islice(plan.requests(), first - 1, None)).request_id
        raise InputError(
            f"{plan.trace.path}: column request_id: {name!r} is used by requests {first} and "
            f"{second} of the plan; give every row its own id"
        )
    return stats


def choose_workers(stats: PlanStats, shards: int, cpus: int) -> int:
    """Return the number of sending processes: enough for the busiest second of the plan.

    One processor is left to the process that records.

    Args:
        stats: totals of the plan.
        shards: number of machines that divide the plan.
        cpus: processors of this machine.
    """
    mean_tokens = stats.output_tokens / stats.rows
    busy_s = stats.peak_1s / shards * (_REQUEST_CPU_S + mean_tokens * _TOKEN_CPU_S)
    return max(1, min(math.ceil(busy_s / _MAX_BUSY), cpus - 1))


def require_fit(stats: PlanStats, profile: DeviceProfile, trace: Path) -> None:
    """Reject a plan of which no request fits on an emulated device.

    Raises:
        InputError: the KV memory or the context of the device is too small for every request.
    """
    kv_tokens = profile.kv_blocks * profile.block_size
    if stats.min_request_tokens <= min(profile.max_model_tokens, kv_tokens + 1):
        return
    raise InputError(
        f"{trace}: no request fits on the device profile {profile.name}: the shortest has "
        f"{stats.min_request_tokens} tokens, the KV memory (kv_blocks) holds {kv_tokens} and the "
        f"context (max_model_tokens) {profile.max_model_tokens}; choose another device with "
        "--device"
    )


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
    needed = tokens + (request.max_output_tokens or 1)
    fewest = stats.min_request_tokens
    stats.min_request_tokens = needed if stats.rows == 1 else min(fewest, needed)
    stats.classes[request.slo_class] += 1
    if request.slo_class not in stats.examples and len(stats.examples) < _MAX_EXAMPLES:
        stats.examples[request.slo_class] = request
    if request.model_name in stats.models or len(stats.models) < _MAX_MODELS:
        stats.models[request.model_name] += 1
    stats.cancelled_rows += request.cancel_after_ns is not None
    stats.rows_with_targets += not request.targets.empty
    stats.rows_with_hashes += bool(request.prompt.hashes)
