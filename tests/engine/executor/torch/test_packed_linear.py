"""Packed weights give the logits of the model's own linear layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
import transformers
from tests.builders.torch_models import VOCABULARY, make_folder
from torch import nn

from goodput_engine.executor.torch import packed_linear
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.packed_linear import PackedLinear, pack_linears
from goodput_engine.executor.torch.roofline import measure_roofline

pytestmark = pytest.mark.torch


def logits(network: Any) -> torch.Tensor:
    ids = torch.arange(40)[None] % VOCABULARY
    with torch.inference_mode():
        out: torch.Tensor = network(input_ids=ids, use_cache=False).logits
    return out


def load(folder: Path, architecture: str, dtype: torch.dtype) -> Any:
    make_folder(folder, architecture)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


# Tied and untied heads, biases, experts, and products that are not linear layers.
@pytest.mark.parametrize("architecture", ["Llama", "GPTNeoX", "Gemma2", "Mixtral", "Starcoder2"])
def test_a_packed_model_has_the_logits_of_the_model(tmp_path: Path, architecture: str) -> None:
    network = load(tmp_path, architecture, torch.float32)
    expected = logits(network)
    assert pack_linears(network, measure=False)
    assert not any(type(layer) is nn.Linear for layer in network.modules())
    torch.testing.assert_close(logits(network), expected, rtol=0, atol=1e-5)


def test_weights_of_half_precision_are_packed_where_the_processor_can(tmp_path: Path) -> None:
    network = load(tmp_path, "Llama", torch.bfloat16)
    expected = logits(network)
    can = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert pack_linears(network, measure=False) is can
    torch.testing.assert_close(logits(network), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types_are_not_packed(tmp_path: Path, dtype: torch.dtype) -> None:
    network = load(tmp_path, "Llama", dtype)
    assert not pack_linears(network, measure=False)
    assert not any(isinstance(layer, PackedLinear) for layer in network.modules())


def test_the_file_of_the_weights_is_not_kept_in_memory(tmp_path: Path) -> None:
    network = load(tmp_path, "Starcoder2", torch.float32)
    assert pack_linears(network, measure=False)
    assert f"{tmp_path}" not in Path("/proc/self/maps").read_text()
    assert logits(network).isfinite().all()


def test_a_layer_without_rows_has_an_empty_product() -> None:
    layer = PackedLinear(nn.Linear(8, 5))
    assert layer(torch.empty(1, 0, 8)).shape == (1, 0, 5)


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_layer_is_used_and_its_weights_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, faster: bool
) -> None:
    def fastest_ns(layer: nn.Module, x: torch.Tensor) -> int:
        return 1 + (isinstance(layer, PackedLinear) != faster)

    monkeypatch.setattr(packed_linear, "_fastest_ns", fastest_ns)
    model = load_model(make_folder(tmp_path, "Llama"))
    assert model.packed_weights == faster
    assert measure_roofline(model).flops_per_token == flops(tmp_path)


def flops(folder: Path) -> int:
    network: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    count: int = sum(
        layer.weight.numel()
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and not name.endswith("head")
    )
    return 2 * count


def test_a_torch_without_the_operators_keeps_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute")

    network = load(tmp_path, "Llama", torch.float32)
    monkeypatch.setattr(PackedLinear, "__init__", missing)
    assert not pack_linears(network, measure=False)
    assert logits(network).isfinite().all()
