"""An executor without a device: a plan takes the time that a device profile predicts.

The executor represents the clock of the emulated device by absolute deadlines. In virtual time the
caller jumps to `next_event_ns`. In real time the caller waits and is always slightly late, but the
next step starts at the deadline of the previous step. Lateness therefore does not accumulate, and
the time that this process needs does not count as long as the process is faster than the device. If
the caller is late by more than a bound, the emulated clock is set back by the lateness, which is
added to `behind_ns`.

If plans are queued, host and device overlap. The host starts to make a plan when a step has ended,
so that a further plan may be queued, and when the previous plan is made. The device starts a plan
when the plan is made and the previous step has ended.

Decode steps are numbered; the number of a step is its *epoch*. For each epoch, the executor stores
the requests that stop in it, so that it does not iterate over the decode batch in every step.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS
from goodput_engine.scheduler.plan import StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.device.profile import DeviceProfile
    from goodput_engine.messages import Submit
    from goodput_engine.scheduler.fast_forward import SkippedSteps, SteadyDecoding
    from goodput_engine.scheduler.plan import StepPlan

__all__ = ["EmulatedExecutor", "foresee", "stop_length"]

_MAX_LATE_NS: Final = 100 * NS_PER_MS
_MIN_LENGTH: Final = 64
_NUM_LENGTHS: Final = 193
_KNUTH_FACTOR: Final = 2_654_435_761


@dataclass(slots=True)
class _Sequence:
    """A request: number of output tokens after which it stops, and the epoch in which it stops."""

    length: int | None
    end_epoch: int = 0


@dataclass(slots=True, kw_only=True)
class _RunningPlan:
    """A plan in flight."""

    plan_id: int
    deadline_ns: int
    step_ns: int
    stopped: dict[int, str]


class EmulatedExecutor:
    """Runs plans on a device profile.

    Args:
        profile: the device.
        max_late_ns: lateness of a collected result above which the clock is set back.
    """

    computes_in_collect = False

    def __init__(self, profile: DeviceProfile, *, max_late_ns: int = _MAX_LATE_NS) -> None:
        self.behind_ns = 0
        self.default_depth = profile.default_depth
        self._profile = profile
        self._max_late_ns = max_late_ns
        self._sequences: dict[int, _Sequence] = {}
        self._ends: dict[int, list[int]] = {}
        self._running: deque[_RunningPlan] = deque()
        self._host_free_ns = 0
        self._pipeline = Pipeline(profile)

    def add(self, submit: Submit) -> None:
        """Add a request that later plans may contain."""
        self._sequences[submit.rid] = _Sequence(stop_length(submit))

    def forget(self, rids: Iterable[int]) -> None:
        """Remove requests that no later plan computes."""
        for rid in rids:
            sequence = self._sequences.pop(rid, None)
            if sequence is not None:
                self._remove_end(sequence, rid)

    def submit(self, plan: StepPlan, ready_ns: int) -> None:
        """Run a plan after all plans that were submitted earlier."""
        shape = plan.shape
        self._host_free_ns = max(ready_ns, self._host_free_ns) + self._profile.host_ns(
            shape.num_requests
        )
        step_ns = self._profile.form.step_ns(shape) if shape.num_requests else 0
        if plan.copies:
            step_ns = max(step_ns, self._copy_ns(plan))
        entered_ns, left_ns = self._pipeline.pass_through(
            step_ns,
            shape.num_tokens,
            ready_ns=self._host_free_ns,
            waits=plan.num_decodes > 0 or bool(plan.copies),
        )
        self._running.append(
            _RunningPlan(
                plan_id=plan.plan_id,
                deadline_ns=left_ns,
                step_ns=left_ns - entered_ns,
                stopped=self._find_stops(plan),
            )
        )

    def next_event_ns(self) -> int | None:
        """Return the deadline of the oldest plan in flight; None if no plan is in flight."""
        return self._running[0].deadline_ns if self._running else None

    def collect(self, now_ns: int) -> StepResult | None:
        """Return the result of the oldest plan in flight; None before its deadline."""
        if not self._running or self._running[0].deadline_ns > now_ns:
            return None
        done = self._running.popleft()
        late_ns = now_ns - done.deadline_ns
        if late_ns > self._max_late_ns:
            self.behind_ns += late_ns
            self._host_free_ns += late_ns
            self._pipeline.delay(late_ns)
            for later in self._running:
                later.deadline_ns += late_ns
            done.deadline_ns = now_ns
        return StepResult(
            plan_id=done.plan_id,
            at_ns=done.deadline_ns,
            step_ns=done.step_ns,
            stopped=done.stopped,
        )

    def run_ahead(self, steady: SteadyDecoding, until_ns: int) -> SkippedSteps | None:
        """Take decode-only steps at once; see `RunsAhead`.

        This executor has no block tables, so it needs no plans for the skipped steps.
        """
        steps = self._max_steps(steady, until_ns)
        if steps <= 0:
            return None
        running, decodes, profile = self._running, steady.num_decodes, self._profile
        depth, context, host_ns = len(running), steady.context_tokens, profile.host_ns(decodes)
        times = profile.form.decode_times(
            decodes, range(context + decodes, context + decodes * steps + 1, decodes)
        )
        transfers_ns = self._pipeline.transfers_ns(decodes)
        if transfers_ns:
            times = [step_ns + transfers_ns for step_ns in times]
        ends_ns, made_ns = foresee(
            [step.deadline_ns for step in running],
            times,
            host_ns=host_ns,
            host_free_ns=self._host_free_ns,
        )
        steps = steady.plan(min(steps, bisect_left(ends_ns, until_ns)))
        if not steps:
            return None
        self._host_free_ns = made_ns[steps - 1] if made_ns else ends_ns[steps - 1] + host_ns
        last_ns = times[steps - 1]
        self._pipeline.pass_through(
            last_ns - transfers_ns,
            decodes,
            ready_ns=ends_ns[depth + steps - 1] - last_ns,
            waits=True,
        )
        first = max(0, steps - depth)  # no request stops before the steps that stay in flight
        ended = [running.popleft() for _ in range(first, steps)]
        for step in range(first, steps):
            running.append(
                _RunningPlan(
                    plan_id=steady.plan_id + 1 + step,
                    deadline_ns=ends_ns[depth + step],
                    step_ns=times[step],
                    stopped=self._take_stops(steady.epoch + 1 + step),
                )
            )
        return steady.commit(
            ends_ns=array("q", ends_ns[:steps]),
            planned_ns=ends_ns[first:steps],
            step_ns=sum(times[:first]) + sum(step.step_ns for step in ended),
            last_step_ns=times[first - 1] if first else ended[-1].step_ns,
        )

    def _max_steps(self, steady: SteadyDecoding, until_ns: int) -> int:
        """Return an upper bound of the steps that end in time and before any request stops."""
        running = self._running
        # Assumes that no step is shorter than the last planned one. If one is shorter, more steps
        # would end in time; a later call takes these.
        steps = (until_ns - running[0].deadline_ns) // running[-1].step_ns + 1
        steps = min(steps, steady.most_steps)
        if self._ends:
            steps = min(steps, min(self._ends) - steady.epoch - 1 + len(running))
        for step, plan in enumerate(running):
            if plan.stopped:
                return min(steps, step)
        return steps

    def _copy_ns(self, plan: StepPlan) -> int:
        """Return the time of a plan's copies; the two directions run in parallel."""
        to_host = sum(len(copy.host_blocks) for copy in plan.copies if copy.to_host)
        to_device = sum(len(copy.host_blocks) for copy in plan.copies) - to_host
        return max(to_host, to_device) * self._profile.swap_ns_per_block

    def _find_stops(self, plan: StepPlan) -> dict[int, str]:
        """Update the index of ends; return the requests that stop in this plan."""
        sequences, epoch = self._sequences, plan.decode_epoch
        for rid in plan.left:
            if rid in sequences:
                self._remove_end(sequences[rid], rid)
        for join in plan.joined:
            sequence = sequences[join.rid]
            if sequence.length is not None and sequence.length > join.output_tokens:
                sequence.end_epoch = epoch + sequence.length - join.output_tokens - 1
                self._ends.setdefault(sequence.end_epoch, []).append(join.rid)
        stopped = self._take_stops(epoch) if epoch else {}
        for chunk in plan.chunks:
            if chunk.samples and sequences[chunk.rid].length == chunk.output_tokens + 1:
                stopped[chunk.rid] = "stop"
        return stopped

    def _take_stops(self, epoch: int) -> dict[int, str]:
        """Remove and return the members of the decode batch that stop in this epoch."""
        return dict.fromkeys(self._ends.pop(epoch, ()), "stop")

    def _remove_end(self, sequence: _Sequence, rid: int) -> None:
        """Remove the end of a request that left the decode batch from the index, if not past."""
        stopping = self._ends.get(sequence.end_epoch)
        if stopping is not None and rid in stopping:
            stopping.remove(rid)
            if not stopping:
                del self._ends[sequence.end_epoch]


class Pipeline:
    """The clocks of the pipeline stages of one device; all stages take equally long.

    A step passes all stages one after the other, so a pipeline does not shorten a step. Its
    advantage is that the next step may start as soon as the first stage is free. Only steps without
    decodes can do so: a decode needs the token of the previous step, so a step with decodes starts
    when the previous step has left the last stage. Engines that split their decodes into one group
    per stage overlap decodes too; this engine has a single group.

    Source: Huang et al., "GPipe", 2019; Zhong et al., "DistServe", OSDI 2024, section 3: pipeline
    parallelism over devices increases the throughput of prefills, but does not reduce their
    latency.

    Args:
        profile: the device; without pipeline parallelism it is a single stage.
    """

    __slots__ = ("_free_ns", "_profile", "_stages")

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._stages = profile.pipeline_parallel
        self._free_ns = [0] * self._stages

    def transfers_ns(self, num_tokens: int) -> int:
        """Return the time that a step spends on transfers of activations between stages."""
        if self._stages == 1:
            return 0
        return (self._stages - 1) * self._profile.handover_ns(num_tokens)

    def pass_through(
        self, computing_ns: int, num_tokens: int, *, ready_ns: int, waits: bool
    ) -> tuple[int, int]:
        """Schedule a step on all stages.

        Args:
            computing_ns: device time of all stages together.
            num_tokens: number of tokens whose activations each stage transfers to the next stage.
            ready_ns: end of the host's work for the step.
            waits: True if the step needs the tokens or the blocks of the previous step.

        Returns:
            The times at which the step enters the first stage and leaves the last one.
        """
        free_ns, stages = self._free_ns, self._stages
        entered_ns = max(ready_ns, free_ns[-1] if waits else free_ns[0])
        if stages == 1:
            free_ns[0] = entered_ns + computing_ns
            return entered_ns, free_ns[0]
        handover_ns = self._profile.handover_ns(num_tokens)
        at_ns = entered_ns
        for stage in range(stages):
            share_ns = computing_ns * (stage + 1) // stages - computing_ns * stage // stages
            free_ns[stage] = max(at_ns, free_ns[stage]) + share_ns
            at_ns = free_ns[stage] + handover_ns
        return entered_ns, free_ns[-1]

    def delay(self, late_ns: int) -> None:
        """Delay all stages."""
        self._free_ns = [free_ns + late_ns for free_ns in self._free_ns]


def foresee(
    in_flight: list[int], times: list[int], *, host_ns: int, host_free_ns: int
) -> tuple[list[int], list[int] | None]:
    """Predict the deadlines of the next steps; whenever a step ends, a further step is planned.

    Args:
        in_flight: deadlines of the steps in flight, oldest first, at least one.
        times: device time of each later step, nanoseconds, at least one.
        host_ns: host time before each later step.
        host_free_ns: end of the host's work for the steps in flight; not after the last deadline.

    Returns:
        The deadlines of all steps, including those in flight; and the end of the host's work for
        each later step. None instead of the latter if the host always finishes `host_ns` after the
        end of a step.
    """
    if len(in_flight) == 1:
        # Host and device alternate.
        intervals = [time_ns + host_ns for time_ns in times]
        return list(accumulate(intervals, initial=in_flight[0])), None
    if (
        host_free_ns <= in_flight[0]
        and min(times) >= host_ns
        and min(map(sub, in_flight[1:], in_flight)) >= host_ns
    ):
        # The host always has a plan ready, so the device never waits.
        return [*in_flight[:-1], *accumulate(times, initial=in_flight[-1])], None
    ends_ns = list(in_flight)
    made_ns: list[int] = []
    for step, time_ns in enumerate(times):
        host_free_ns = max(ends_ns[step], host_free_ns) + host_ns
        made_ns.append(host_free_ns)
        ends_ns.append(max(ends_ns[-1], host_free_ns) + time_ns)
    return ends_ns, made_ns


def stop_length(submit: Submit) -> int | None:
    """Return the number of tokens after which an output stops; None if it runs to its limit.

    The output of a replayed request has its recorded length. Any other request with `ignore_eos`
    runs to the limit. All other outputs have 64 to 256 tokens, but at least `min_tokens`. This
    length is a hash of the prompt's length (Knuth's multiplicative hash), so it is the same on
    every replica. An output that ends at the client's limit has the finish reason "length", not
    "stop".
    """
    executor_input = submit.executor
    if executor_input.output_tokens is not None:
        length = max(1, executor_input.output_tokens)
    elif executor_input.ignore_eos:
        return None
    else:
        offset = submit.input_tokens * _KNUTH_FACTOR % 2**32 % _NUM_LENGTHS
        length = max(_MIN_LENGTH + offset, executor_input.min_tokens)
    limit = submit.max_output_tokens
    return None if limit is not None and length >= limit else length
