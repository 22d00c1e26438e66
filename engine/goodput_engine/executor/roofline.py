"""The least time of a step: the roofline of a model on a device.

A step must read all weights and the keys and values of its requests, and must compute its products.
It cannot be faster than either, at the bandwidth and the rate of products that the device reaches
with one large operation.

Source: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from goodput_core.steptime.forms import StepShape

__all__ = ["StepRoofline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRoofline:
    """The work of a model's steps, and the limits of the machine.

    Args:
        weight_bytes: size of the weights that each step reads. An embedding that is only looked up
            is not part of them.
        kv_bytes_per_token: size of the keys and values of a token.
        flops_per_token: operations of the products of a token, without logits and attention.
        flops_per_sample: operations of the logits of a token.
        flops_per_pair: operations of the attention of a query to a key, in all layers.
        bytes_per_s: bandwidth of reading.
        flops_per_s: rate of a large product of matrices.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: int
    flops_per_sample: int
    flops_per_pair: int
    bytes_per_s: float
    flops_per_s: float

    def with_higher_rates(self, other: StepRoofline) -> StepRoofline:
        """Return this roofline with the higher of both measurements of each rate."""
        return replace(
            self,
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
            flops_per_s=max(self.flops_per_s, other.flops_per_s),
        )

    def least_ns(self, shape: StepShape, num_samples: int) -> float:
        """Return the least time of a step.

        Args:
            shape: the step.
            num_samples: number of tokens whose logits are computed.
        """
        read = self.weight_bytes + self.kv_bytes_per_token * shape.context_tokens
        pairs = shape.decode_context_tokens + shape.prefill_squares / 2
        flops = (
            self.flops_per_token * shape.num_tokens
            + self.flops_per_sample * num_samples
            + self.flops_per_pair * pairs
        )
        return NS_PER_S * max(read / self.bytes_per_s, flops / self.flops_per_s)
