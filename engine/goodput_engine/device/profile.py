"""Device profiles: the times and capacities by which a model on a device is emulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from goodput_core.steptime import DeviceForm
from goodput_core.units import NS_PER_S

__all__ = ["DeviceProfile", "Overlap"]


class Overlap(StrEnum):
    """Combination of the host time and the device time of a step."""

    ADD = "add"
    """The host plans the next step after the result of this one."""
    MAX = "max"
    """The host plans the next step while this one runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A model on a device.

    Args:
        name: name of the profile, a DNS label.
        description: one sentence for a list.
        illustrative: True if the figures demonstrate a mechanism and describe no existing device.
        form_name: name of the form, such as `roofline`.
        form: step-time law: maps the shape of a step to its device time.
        overlap: combination of host time and device time.
        host_ns_per_step, host_ns_per_request: host time of the modelled engine for each step, and
            for each request in the step.
        kv_blocks: KV blocks that the device's memory holds.
        block_size: tokens per block.
        kv_bytes_per_token: size of the keys and values of one token in all layers.
        max_model_tokens: limit of prompt and output tokens together.
        vocab_size: size of the vocabulary; token ids are smaller.
        tensor_parallel: number of devices that compute each layer together.
        pipeline_parallel: number of stages, each with `tensor_parallel` devices and an equal share
            of the layers. `form` is the time of all stages together, and the memory figures are
            those of all devices together.
        handover_ns_per_token: time to transfer one token's activations from a stage to the next.
        swap_bytes_per_s: bandwidth between device and host memory, one way.
        link_bytes_per_s: bandwidth between two replicas on such devices.
        startup_seconds: time from creation to readiness of a replica, in virtual time only. A
            process that emulates this device in real time is ready as soon as it has started.
        numbers: the numbers of the file by name, in the units of the file.
        provenance: the origin of each number, of the table and of the curve, by name.
    """

    name: str
    description: str
    illustrative: bool
    form_name: str
    form: DeviceForm
    overlap: Overlap
    host_ns_per_step: int
    host_ns_per_request: int
    kv_blocks: int
    block_size: int
    kv_bytes_per_token: int
    max_model_tokens: int
    vocab_size: int
    tensor_parallel: int
    pipeline_parallel: int
    handover_ns_per_token: float
    swap_bytes_per_s: int
    link_bytes_per_s: int
    startup_seconds: float
    numbers: Mapping[str, float]
    provenance: Mapping[str, str]

    @property
    def default_depth(self) -> int:
        """Number of plans that are queued behind the running plan, 0 to 2.

        If host and device overlap, one plan is queued: a step then takes the longer of host time
        and device time, and the end of a request is noticed one step late. Without a queued plan,
        a step takes the sum of both times. Each further pipeline stage needs one more queued plan.
        """
        overlapping = 1 if self.overlap is Overlap.MAX else 0
        return min(2, overlapping + self.pipeline_parallel - 1)

    @property
    def devices(self) -> int:
        """Number of physical devices of this profile."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def swap_ns_per_block(self) -> int:
        """Time to copy one KV block between device and host memory, nanoseconds, at least 1."""
        block_bytes = self.block_size * self.kv_bytes_per_token
        return max(1, round(block_bytes * NS_PER_S / self.swap_bytes_per_s))

    def host_ns(self, num_requests: int) -> int:
        """Return the host time of a step with this many requests, in nanoseconds."""
        return self.host_ns_per_step + self.host_ns_per_request * num_requests

    def handover_ns(self, num_tokens: int) -> int:
        """Return the time to transfer a step's activations to the next stage, in nanoseconds."""
        return round(self.handover_ns_per_token * num_tokens)
