"""Measure the limits of a device, and count the work of a model, for `StepRoofline`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import torch

from goodput_core.units import NS_PER_S
from goodput_engine.executor.roofline import StepRoofline
from goodput_engine.executor.torch.packed_linear import PackedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.executor.torch.model import PackedModel

__all__ = ["measure_roofline"]

_REPEATS: Final = 3
# Larger than any cache, and small beside the weights of a large model.
_READ_BYTES: Final = {"cpu": 1 << 28, "cuda": 1 << 30}
_PRODUCT_SIDE: Final = {"cpu": 2048, "cuda": 8192}
# A GPU computes calls one after the other, so the time to start one counts once.
_CALLS: Final = {"cpu": 1, "cuda": 20}


def measure_roofline(model: PackedModel) -> StepRoofline:
    """Measure the limits of a model's device, and count the work of the model.

    The weights of all experts count for each token, so the result is too large for a mixture of
    experts.
    """
    network, geometry = model.model, model.geometry
    head = network.get_output_embeddings().weight
    embedding = network.get_input_embeddings().weight
    packed = [layer.weight for layer in network.modules() if isinstance(layer, PackedLinear)]
    weights = {id(weight): weight for weight in (*network.parameters(), *packed)}
    if embedding is not head:
        weights.pop(id(embedding), None)
    matrices = [weight for weight in weights.values() if weight.ndim > 1 and weight is not head]
    num_heads = network.config.get_text_config().num_attention_heads
    return StepRoofline(
        weight_bytes=sum(weight.nbytes for weight in weights.values()),
        kv_bytes_per_token=geometry.bytes_per_token,
        flops_per_token=2 * sum(weight.numel() for weight in matrices),
        flops_per_sample=2 * head.numel(),
        # Two products of a multiplication and an addition for each number of a head.
        flops_per_pair=4 * geometry.num_layers * num_heads * geometry.head_dim,
        bytes_per_s=_read_rate(model.device, geometry.dtype),
        flops_per_s=_product_rate(model.device, geometry.dtype),
    )


def _read_rate(device: torch.device, dtype: torch.dtype) -> float:
    columns = 4096
    rows = _READ_BYTES[device.type] // dtype.itemsize // columns
    matrix, vector = _random((rows, columns), device, dtype), _random((columns,), device, dtype)
    rate: float = matrix.nbytes / _fastest_s(lambda: torch.mv(matrix, vector), device)
    return rate


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = _PRODUCT_SIDE[device.type]
    matrix = _random((side, side), device, dtype)
    return 2 * side**3 / _fastest_s(lambda: torch.mm(matrix, matrix), device)


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers: equal ones need less power, with which a GPU is faster."""
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def _fastest_s(operation: Callable[[], torch.Tensor], device: torch.device) -> float:
    times: list[int] = []
    calls = _CALLS[device.type]
    operation()
    for _ in range(_REPEATS):
        _wait(device)
        began_ns = time.monotonic_ns()
        for _ in range(calls):
            operation()
        _wait(device)
        times.append(time.monotonic_ns() - began_ns)
    return max(1, min(times)) / calls / NS_PER_S


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
