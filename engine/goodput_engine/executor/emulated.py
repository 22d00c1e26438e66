"""An executor without a device: a plan takes the time that a device profile predicts.

The executor represents the clock of the modelled device by absolute deadlines. In virtual time the
caller jumps to `next_event_ns`. In real time the caller waits and is always slightly late, but the
next step starts at the end of the modelled one. Lateness therefore does not accumulate, and the
time that this process needs does not count while it is faster than the device. If the caller is
late by more than a bound, the modelled clock is set back and the difference is counted.

Host and device overlap in the same way as the plans. The host starts on a plan when the plan's
slot is free and the previous plan is made. The device starts when it is free and the plan is made.

Like the decode batch of the scheduler, the executor does not iterate over the members of the
batch: it indexes their ends by epoch.
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
_SHORTEST: Final = 64
_SPREAD: Final = 193
_KNUTH: Final = 2_654_435_761


@dataclass(slots=True)
class _Sequence:
    """One request: the number of output tokens after which it stops, and its last epoch."""

    length: int | None
    end_epoch: int = 0


@dataclass(slots=True, kw_only=True)
class _Running:
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

    def __init__(self, profile: DeviceProfile, *, max_late_ns: int = _MAX_LATE_NS) -> None:
        self.behind_ns = 0
        self._profile = profile
        self._max_late_ns = max_late_ns
        self._sequences: dict[int, _Sequence] = {}
        self._ends: dict[int, list[int]] = {}
        self._running: deque[_Running] = deque()
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
        """Run a plan after the ones submitted before."""
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
            _Running(
                plan_id=plan.plan_id,
                deadline_ns=left_ns,
                step_ns=left_ns - entered_ns,
                stopped=self._stops(plan),
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

        This executor has no block tables, so it needs no plans for the steps in between.
        """
        steps = self._foreseeable(steady, until_ns)
        if steps <= 0:
            return None
        running, decodes, profile = self._running, steady.num_decodes, self._profile
        depth, context, host_ns = len(running), steady.context_tokens, profile.host_ns(decodes)
        times = profile.form.decode_times(
            decodes, range(context + decodes, context + decodes * steps + 1, decodes)
        )
        handing_ns = self._pipeline.handing_ns(decodes)
        if handing_ns:
            times = [step_ns + handing_ns for step_ns in times]
        done, made = foresee(
            [step.deadline_ns for step in running],
            times,
            host_ns=host_ns,
            host_free_ns=self._host_free_ns,
        )
        steps = steady.plan(min(steps, bisect_left(done, until_ns)))
        if not steps:
            return None
        self._host_free_ns = made[steps - 1] if made else done[steps - 1] + host_ns
        last_ns = times[steps - 1]
        self._pipeline.pass_through(
            last_ns - handing_ns, decodes, ready_ns=done[depth + steps - 1] - last_ns, waits=True
        )
        first = max(0, steps - depth)  # no request stops before the steps that stay in flight
        before = [running.popleft() for _ in range(first, steps)]
        for step in range(first, steps):
            running.append(
                _Running(
                    plan_id=steady.plan_id + 1 + step,
                    deadline_ns=done[depth + step],
                    step_ns=times[step],
                    stopped=self._take_stops(steady.epoch + 1 + step),
                )
            )
        return steady.commit(
            ends_ns=array("q", done[:steps]),
            planned_ns=done[first:steps],
            step_ns=sum(times[:first]) + sum(step.step_ns for step in before),
            last_step_ns=times[first - 1] if first else before[-1].step_ns,
        )

    def _foreseeable(self, steady: SteadyDecoding, until_ns: int) -> int:
        """Return an upper bound of the steps that end in time and before any request stops."""
        running = self._running
        # Assumes that no step is shorter than the last one; otherwise the rest is taken later.
        steps = (until_ns - running[0].deadline_ns) // running[-1].step_ns + 1
        steps = min(steps, steady.most_steps)
        if self._ends:
            steps = min(steps, min(self._ends) - steady.epoch - 1 + len(running))
        for step, plan in enumerate(running):
            if plan.stopped:
                return min(steps, step)
        return steps

    def _copy_ns(self, plan: StepPlan) -> int:
        """Return the time of a plan's copies, with one stream in each direction, in parallel."""
        out = sum(len(copy.host_blocks) for copy in plan.copies if copy.to_host)
        back = sum(len(copy.host_blocks) for copy in plan.copies) - out
        return max(out, back) * self._profile.swap_ns_per_block

    def _stops(self, plan: StepPlan) -> dict[int, str]:
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
        """Return the members of the decode batch that stop in this epoch."""
        return dict.fromkeys(self._ends.pop(epoch, ()), "stop")

    def _remove_end(self, sequence: _Sequence, rid: int) -> None:
        """Remove the indexed end of a request that left the decode batch, if it is not past."""
        stopping = self._ends.get(sequence.end_epoch)
        if stopping is not None and rid in stopping:
            stopping.remove(rid)
            if not stopping:
                del self._ends[sequence.end_epoch]


class Pipeline:
    """The clock of the pipeline stages of one device, all of equal length.

    A step passes all stages one after the other, so a pipeline does not shorten a step. The gain
    is that the next step may start as soon as the first stage is free. Only steps without decodes
    gain: a decode needs the token of the previous step, so a step with decodes starts when the
    previous step has left the last stage. Engines that split their decodes into one group per
    stage overlap decodes too; this engine has a single group.

    Source: Huang et al., "GPipe", 2019; Zhong et al., "DistServe", OSDI 2024, section 3: between
    devices prompts gain rate, not latency, from pipeline parallelism.

    Args:
        profile: the device; without pipeline parallelism it is a single stage.
    """

    __slots__ = ("_free_ns", "_profile", "_stages")

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._stages = profile.pipeline_parallel
        self._free_ns = [0] * self._stages

    def handing_ns(self, num_tokens: int) -> int:
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
            num_tokens: number of tokens whose activations each stage transfers to the next one.
            ready_ns: end of the host's work for the step.
            waits: True if the step depends on the previous one, on its tokens or on its blocks.

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
        """Set the clock back by a delay."""
        self._free_ns = [free_ns + late_ns for free_ns in self._free_ns]


def foresee(
    in_flight: list[int], times: list[int], *, host_ns: int, host_free_ns: int
) -> tuple[list[int], list[int] | None]:
    """Return the deadlines of steps, each planned when the oldest one in flight is done.

    Args:
        in_flight: deadlines of the steps in flight, oldest first, at least one.
        times: device time of each later step, nanoseconds, at least one.
        host_ns: host time before each later step.
        host_free_ns: end of the host's work for the steps in flight; not after the last deadline.

    Returns:
        The deadlines of all steps, including those in flight, and the end of the host's work for
        each later step; None in place of these ends if each of them is `host_ns` after the
        deadline that the host waited for.
    """
    if len(in_flight) == 1:
        # Host and device alternate.
        waits = [time_ns + host_ns for time_ns in times]
        return list(accumulate(waits, initial=in_flight[0])), None
    if (
        host_free_ns <= in_flight[0]
        and min(times) >= host_ns
        and min(map(sub, in_flight[1:], in_flight)) >= host_ns
    ):
        # The host is always ahead, so the device never waits.
        return [*in_flight[:-1], *accumulate(times, initial=in_flight[-1])], None
    done = list(in_flight)
    made: list[int] = []
    for step, time_ns in enumerate(times):
        host_free_ns = max(done[step], host_free_ns) + host_ns
        made.append(host_free_ns)
        done.append(max(done[-1], host_free_ns) + time_ns)
    return done, made


def stop_length(submit: Submit) -> int | None:
    """Return the number of tokens after which an output stops; None if it runs to its limit.

    A replayed row ends at its recorded length. Otherwise a request with `ignore_eos` runs to the
    limit. Any other output has 64 to 256 tokens, but at least `min_tokens`. This length is a hash
    of the prompt's length (Knuth's multiplicative hash), so it is the same on every replica. An
    end at the client's limit has the finish reason "length", not "stop".
    """
    known = submit.executor
    if known.output_tokens is not None:
        length = max(1, known.output_tokens)
    elif known.ignore_eos:
        return None
    else:
        scatter = submit.input_tokens * _KNUTH % 2**32 % _SPREAD
        length = max(_SHORTEST + scatter, known.min_tokens)
    bound = submit.max_output_tokens
    return None if bound is not None and length >= bound else length
