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

from collections import deque
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS
from goodput_engine.executor.lengths import stop_length
from goodput_engine.scheduler.plan import StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.device.profile import DeviceProfile
    from goodput_engine.messages import Submit
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
        self._device_free_ns = 0

    def add(self, submit: Submit) -> None:
        """A request that plans may name from now on."""
        self._sequences[submit.rid] = _Sequence(stop_length(submit))

    def forget(self, rids: Iterable[int]) -> None:
        """No later plan computes these."""
        for rid in rids:
            self._sequences.pop(rid, None)

    def submit(self, plan: StepPlan, ready_ns: int) -> None:
        """Run a plan after those already submitted."""
        shape = plan.shape
        self._host_free_ns = max(ready_ns, self._host_free_ns) + self._profile.host_ns(
            shape.num_requests
        )
        step_ns = self._profile.form.step_ns(shape) if shape.num_requests else 0
        took_ns = max(step_ns, self._copy_ns(plan)) if plan.copies else step_ns
        self._device_free_ns = max(self._device_free_ns, self._host_free_ns) + took_ns
        self._running.append(
            _Running(
                plan_id=plan.plan_id,
                deadline_ns=self._device_free_ns,
                step_ns=took_ns,
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
            self._device_free_ns += late_ns
            for later in self._running:
                later.deadline_ns += late_ns
            done.deadline_ns = now_ns
        return StepResult(
            plan_id=done.plan_id,
            at_ns=done.deadline_ns,
            step_ns=done.step_ns,
            stopped=done.stopped,
        )

    def _copy_ns(self, plan: StepPlan) -> int:
        """Time for the plan's copies: one stream out and one in, side by side."""
        out = sum(len(copy.host_blocks) for copy in plan.copies if copy.to_host)
        back = sum(len(copy.host_blocks) for copy in plan.copies) - out
        return max(out, back) * self._profile.swap_ns_per_block

    def _stops(self, plan: StepPlan) -> dict[int, str]:
        stopped: dict[int, str] = {}
        sequences, epoch = self._sequences, plan.decode_epoch
        for rid in plan.left:
            if rid in sequences:
                sequences[rid].end_epoch = 0
        for join in plan.joined:
            sequence = sequences[join.rid]
            if sequence.length is not None and sequence.length > join.output_tokens:
                sequence.end_epoch = epoch + sequence.length - join.output_tokens - 1
                self._ends.setdefault(sequence.end_epoch, []).append(join.rid)
        if epoch:
            for rid in self._ends.pop(epoch, ()):
                if rid in sequences and sequences[rid].end_epoch == epoch:
                    stopped[rid] = "stop"
        for chunk in plan.chunks:
            if chunk.samples and sequences[chunk.rid].length == chunk.output_tokens + 1:
                stopped[chunk.rid] = "stop"
        return stopped
