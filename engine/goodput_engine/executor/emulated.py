"""An executor without a device: a plan takes as long as a device profile says.

It keeps the modelled device's clock in absolute deadlines. In virtual time the caller jumps to
`next_event_ns`; in real time it waits and is always a little late, but the next step still starts
where the modelled one ended, so lateness never accumulates and our own Python costs nothing as
long as it is faster than the device. Only when it is late by more than a bound is the modelled
clock set back, and by how much is counted.

Host and device overlap as the plans do: the host works on a plan from the moment its place was
open and the plan before it was made; the device starts when both are ready.

Like the scheduler's cohort, it does not visit the members: their ends are filed by epoch.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS
from goodput_engine.executor.foresight import foresee
from goodput_engine.executor.lengths import stop_length
from goodput_engine.executor.pipeline import Pipeline
from goodput_engine.scheduler.plan import StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.device.profile import DeviceProfile
    from goodput_engine.messages import Submit
    from goodput_engine.scheduler.fast_forward import SkippedSteps, SteadyDecoding
    from goodput_engine.scheduler.plan import StepPlan

__all__ = ["EmulatedExecutor"]

_MAX_LATE_NS: Final = 100 * NS_PER_MS


class _Sequence:
    """One request: after how many output tokens it stops, and the epoch in which it gets there."""

    __slots__ = ("end_epoch", "length")

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.end_epoch = 0


class _Running:
    """A plan under way."""

    __slots__ = ("deadline_ns", "plan_id", "step_ns", "stopped")

    def __init__(
        self, *, plan_id: int, deadline_ns: int, step_ns: int, stopped: dict[int, str]
    ) -> None:
        self.plan_id = plan_id
        self.deadline_ns = deadline_ns
        self.step_ns = step_ns
        self.stopped = stopped


class EmulatedExecutor:
    """Runs plans on a device profile.

    Args:
        profile: the device.
        max_late_ns: a result collected later than this after its deadline sets the clock back.
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
        """A request that plans may name from now on."""
        self._sequences[submit.rid] = _Sequence(stop_length(submit))

    def forget(self, rids: Iterable[int]) -> None:
        """No later plan computes these."""
        for rid in rids:
            sequence = self._sequences.pop(rid, None)
            if sequence is not None:
                self._stay(sequence, rid)

    def submit(self, plan: StepPlan, ready_ns: int) -> None:
        """Run a plan after those already submitted."""
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
        """The deadline of the oldest plan under way."""
        return self._running[0].deadline_ns if self._running else None

    def collect(self, now_ns: int) -> StepResult | None:
        """The result of the oldest plan under way, if its deadline has come."""
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
        """Take steps that only decode at once; see `RunsAhead`.

        No block tables are kept here, so of the plans in between nothing needs to be told.
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
        first = max(0, steps - depth)  # of those that are under way afterwards: nobody stops before
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
        """A bound on the steps that can be taken, in time and before anybody stops."""
        running = self._running
        # As many as are done in time if no step is shorter than the last; else the rest later.
        steps = (until_ns - running[0].deadline_ns) // running[-1].step_ns + 1
        steps = min(steps, steady.most_steps)
        if self._ends:
            steps = min(steps, min(self._ends) - steady.epoch - 1 + len(running))
        for step, plan in enumerate(running):
            if plan.stopped:
                return min(steps, step)
        return steps

    def _copy_ns(self, plan: StepPlan) -> int:
        """Time for the plan's copies: one stream out and one in, side by side."""
        out = sum(len(copy.host_blocks) for copy in plan.copies if copy.to_host)
        back = sum(len(copy.host_blocks) for copy in plan.copies) - out
        return max(out, back) * self._profile.swap_ns_per_block

    def _stops(self, plan: StepPlan) -> dict[int, str]:
        sequences, epoch = self._sequences, plan.decode_epoch
        for rid in plan.left:
            if rid in sequences:
                self._stay(sequences[rid], rid)
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
        """Who of the cohort stops in this epoch."""
        return dict.fromkeys(self._ends.pop(epoch, ()), "stop")

    def _stay(self, sequence: _Sequence, rid: int) -> None:
        """It does not stop in the epoch that was foreseen, unless that has passed."""
        stopping = self._ends.get(sequence.end_epoch)
        if stopping is not None and rid in stopping:
            stopping.remove(rid)
            if not stopping:
                del self._ends[sequence.end_epoch]
