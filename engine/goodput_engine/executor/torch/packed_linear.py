"""Linear layers for CPUs, whose weights are stored in the order in which oneDNN reads them.

torch multiplies the weights in their row-major order, and copies parts of them in each step. For
the few rows of a step that decodes, packed weights take half of the time. Whether they pay is
measured when a model is loaded, because it depends on the processor.

The operators are those that torch's own compiler uses. They are not a public interface, so a torch
without them keeps the layers of the model.
"""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import nn

__all__ = ["PackedLinear", "pack_linears"]

_DTYPES: Final = frozenset({torch.float32, torch.bfloat16})
_PACKED_ROWS: Final = 8
"""Number of rows for which the order is chosen. It is as good for one row and for hundreds."""
_MEASURED_ROWS: Final = (1, 8, 64)
_REPEATS: Final = 5
# As a share of the largest number; sums in another order differ by rounding.
_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 0.05}


class PackedLinear(nn.Module):  # type: ignore[misc] # torch is not installed for mypy
    """A linear layer with packed weights.

    Args:
        linear: the layer to replace; it is not changed.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        pack = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - no public name
        packed = pack(linear.weight.detach(), _PACKED_ROWS)
        self.register_buffer("weight", packed, persistent=False)
        bias = None if linear.bias is None else linear.bias.detach().clone()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product for `[…, in_features]`, `[…, out_features]`."""
        if not x.numel():
            return x.new_empty((*x.shape[:-1], self.out_features))
        multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - no public name
        product: torch.Tensor = multiply(x, self.weight, self.bias, "none", [], "")
        return product


def pack_linears(network: nn.Module, *, measure: bool = True) -> bool:
    """Replace the linear layers of a network on a CPU by packed ones, if these are faster.

    Only layers of torch's own class are replaced, one after another, so that no more than one layer
    is in memory twice.

    Args:
        network: the network, in inference mode.
        measure: False to replace them without a measurement.

    Returns:
        True if the layers were replaced.
    """
    places = [
        (parent, name)
        for parent in network.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.weight.dtype in _DTYPES
        and child.weight.device.type == "cpu"
    ]
    by_size = sorted(places, key=lambda place: getattr(*place).weight.numel())
    with torch.inference_mode():
        # The largest layer is usually the head, of which there is only one.
        for place in by_size[-2:]:
            if not _is_equal(getattr(*place)):
                return False
        if not places or (measure and not _is_faster(getattr(*by_size[-2:][0]))):
            return False
        for parent, name in places:
            setattr(parent, name, PackedLinear(getattr(parent, name)).eval())
    # The other weights are views of the mapped file, which would keep all of it in memory.
    for parameter in network.parameters():
        parameter.data = parameter.data.clone()
    return True


def _is_equal(linear: nn.Linear) -> bool:
    """True if the packed layer has the outputs of a layer; False also if torch cannot pack it."""
    x = _inputs(linear, 3)
    try:
        found = PackedLinear(linear)(x)
    except (AttributeError, RuntimeError):
        return False
    expected = linear(x)
    bound = _TOLERANCE[x.dtype] * expected.abs().max()
    return bool(((found - expected).abs() <= bound).all())


def _is_faster(linear: nn.Linear) -> bool:
    """True if the packed layer computes few and many rows in less time."""
    packed = PackedLinear(linear)
    ratios = []
    for rows in _MEASURED_ROWS:
        x = _inputs(linear, rows)
        ratios.append(_fastest_ns(packed, x) / _fastest_ns(linear, x))
    return sum(ratios) < len(ratios)


def _inputs(linear: nn.Linear, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    size = (rows, linear.in_features)
    return torch.rand(size, generator=generator).sub(0.5).to(linear.weight.dtype)


def _fastest_ns(layer: nn.Module, x: torch.Tensor) -> int:
    times: list[int] = []
    for _ in range(_REPEATS):
        began_ns = time.perf_counter_ns()
        layer(x)
        times.append(time.perf_counter_ns() - began_ns)
    return max(1, min(times))
