"""Pipeline stages of a modelled device: when each is free, and when a step has left the last one.

A step passes all stages, so its own time is never shorter than on one stage after the other; what
stages bring is that the next step may enter as soon as the first one is free. Only prompts can
use that. Everybody who decodes does so in every step, each from the token of the step before, so
a step with decodes enters when the one before it has left. (Engines that split their decodes into
groups, one for each stage, overlap those too; this one has a single group.)

Source: Huang et al., "GPipe", 2019; Zhong et al., "DistServe", OSDI 2024, section 3: between
devices prompts gain rate, not latency, from pipeline parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from goodput_engine.device.profile import DeviceProfile

__all__ = ["Pipeline"]


class Pipeline:
    """The clock of one device's stages, of equal length.

    Args:
        profile: the device; without pipeline parallelism it is a single stage.
    """

    __slots__ = ("_free_ns", "_profile", "_stages")

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._stages = profile.pipeline_parallel
        self._free_ns = [0] * self._stages

    @property
    def left_ns(self) -> int:
        """When the latest step has left the last stage."""
        return self._free_ns[-1]

    def handing_ns(self, num_tokens: int) -> int:
        """What a step's way takes beside computing: a hand-over of its tokens between stages."""
        if self._stages == 1:
            return 0
        return (self._stages - 1) * self._profile.handover_ns(num_tokens)

    def pass_through(
        self, computing_ns: int, num_tokens: int, *, ready_ns: int, waits: bool
    ) -> tuple[int, int]:
        """A step enters as soon as it is ready and may.

        Args:
            computing_ns: of all stages together.
            num_tokens: whose activations each stage hands to the next one.
            ready_ns: when the host was done with it.
            waits: whether it needs what the step before it gives: tokens, or blocks to copy.

        Returns:
            When it enters the first stage, and when it leaves the last one.
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
        """Set the clock back."""
        self._free_ns = [free_ns + late_ns for free_ns in self._free_ns]
