"""What will be sent and when: a pure function of the trace, its transforms and the promises.

A plan can be walked any number of times without keeping rows: once before the run, which finds
every bad row, unknown class and rate while nothing has been sent yet, and once to send.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from goodput_core.errors import InputError
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_S
from goodput_replay.run.facts import Promise
from goodput_replay.sending.prompts import PromptKey
from goodput_traces.format.reader import Trace
from goodput_traces.format.schema import Clock
from goodput_traces.transforms import TransformPlan, apply

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from goodput_traces.format.schema import TraceRow

__all__ = ["Plan", "PlanStats", "PlannedRequest", "survey"]

_MAX_MODELS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to send.

    Args:
        request_id: the trace's id.
        scheduled_ns: when, nanoseconds since the run's zero.
        slo_class: by which it is judged; empty without classes.
        targets: the row's own.
        priority: larger is more urgent; None: not stated.
        prompt: what to ask.
        output_tokens: length of the answer in the trace.
        max_output_tokens: the bound that the trace's client had asked for.
        cancel_after_ns: when the client gives up, from `scheduled_ns`; None: never.
        model_name: the model in the trace; empty when not stated.
        warmup: sent, and not judged.
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
class Plan:
    """A trace, what is done to it, and by what its rows are judged.

    Args:
        trace: an opened trace.
        transforms: window, scale, classes, limit, speed.
        promise: the classes; rows that name none get its default.
        warmup: how many of the first rows are not judged.
    """

    trace: Trace
    transforms: TransformPlan
    promise: Promise
    warmup: int = 0

    def requests(self) -> Iterator[PlannedRequest]:
        """The requests in the order of their arrival.

        Raises:
            TraceError: a row that breaks a rule.
            InputError: a session-relative trace, or a class without a promise.
        """
        self._require_clock()
        first_ns = self.trace.first_ns
        zero_ns = self.transforms.zero_ns(first_ns)
        classes = {c.name for c in self.promise.classes}
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
        """The length of what is replayed, at least a second so that rates mean something."""
        end_ns = self.transforms.end_ns(self.trace.first_ns)
        if end_ns is None or self.transforms.limit is not None:
            return max(NS_PER_S, stats.last_ns + 1)
        length_ns = end_ns - self.transforms.zero_ns(self.trace.first_ns)
        return max(1, int(length_ns / self.transforms.speed))

    def _require_clock(self) -> None:
        if self.trace.metadata.clock is Clock.SESSION_RELATIVE:
            raise InputError(
                f"{self.trace.path}: its clock starts anew in every session, and replaying "
                "such arrivals is not built yet; replay a trace with absolute or trace-relative "
                "time"
            )

    def _class_of(self, row: TraceRow, classes: set[str]) -> str:
        name = row.slo_class or self.promise.default or ""
        if classes and name not in classes:
            raise InputError(
                f"{self.trace.path}: request {row.request_id!r} has the class {name!r}, which "
                f"has no promise; promised classes are {', '.join(sorted(classes))}; map it "
                "with --class-by, or add it to spec.slo.classes"
            )
        return name


@dataclass(slots=True, kw_only=True)
class PlanStats:
    """What a plan amounts to. Counts and tokens are sums; times are nanoseconds since zero.

    Args:
        rows: requests, warm-up included.
        warmup_rows: those that are not judged.
        first_judged_ns: when the first judged request arrives; None: none is judged.
        last_ns: the last arrival.
        peak_1s: most arrivals within any one second.
        peak_at_ns: where that second begins.
        input_tokens: summed over all rows.
        output_tokens: summed over all rows.
        max_input_tokens: of any row.
        max_output_tokens: of any row.
        classes: rows by class.
        models: rows by the trace's model name, a bounded number of names.
        cancelled_rows: rows that the trace's own client gave up on.
        rows_with_targets: rows that bring promises of their own.
        rows_with_hashes: rows whose shared prefixes are known.
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


def survey(plan: Plan) -> PlanStats:
    """Walk the whole plan once, keeping eight bytes of each row.

    Raises:
        InputError: as `Plan.requests`, when no row is left to send, or when two have one id.
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
            f"{plan.trace.path}: --warmup {plan.warmup} leaves no row to judge of {stats.rows}"
        )
    _refuse_repeated_ids(plan, np.frombuffer(id_hashes, dtype=np.int64))
    return stats


def _refuse_repeated_ids(plan: Plan, id_hashes: NDArray[np.int64]) -> None:
    """Runs are paired and prompts are made by id: two requests must not share one."""
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
                f"{plan.trace.path}: column request_id: {name!r} stands at requests {seen[name]} "
                f"and {number} of the plan; give every row an id of its own"
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
    if request.model_name in stats.models or len(stats.models) < _MAX_MODELS:
        stats.models[request.model_name] += 1
    stats.cancelled_rows += request.cancel_after_ns is not None
    stats.rows_with_targets += not request.targets.empty
    stats.rows_with_hashes += bool(request.prompt.hashes)
