"""Models on a GPU: what can be checked without one, and outputs where one is present."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
import transformers
from tests.builders.torch_models import ARCHITECTURES, ModelBench, TinyModel
from torch._subclasses.fake_tensor import FakeTensorMode

from goodput_core.spec.choices import Preemption
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.model import PackedModel, PackedRow
from goodput_engine.executor.torch.padded_decodes import CudaGraphs, batch_sizes
from goodput_engine.executor.torch.sampling import RequestSampling, SampledRow, Sampler
from goodput_engine.messages import SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from goodput_engine.executor.torch.attention import AttentionRule, RaggedBatch

pytestmark = pytest.mark.torch

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: needs an NVIDIA GPU")
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Shared memory of a program, by compute capability. Source: CUDA C++ Programming Guide."""


class DeviceCheck:
    """An adapter that checks only where its arguments are."""

    name = "check"
    block_multiple = 1

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: RaggedBatch,
        rule: AttentionRule,
    ) -> torch.Tensor:
        tensors = (q, keys, values, batch.cu_seqlens_q, batch.seqused_k, batch.block_table)
        assert {tensor.device.type for tensor in tensors} == {"cuda"}
        return q.clone()


def test_all_tensors_of_a_step_are_on_the_device_of_the_model() -> None:
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    # Tensors without values, which know their device and reject operations between two devices.
    with FakeTensorMode():
        with torch.device("cuda"):
            network = transformers.AutoModelForCausalLM.from_config(config).eval()
        model = PackedModel(network, DeviceCheck())
        pool = KVPool(model.geometry, num_blocks=4, block_size=4, device=model.device)
        rows = [PackedRow([1, 2, 3], 0, [0], True), PackedRow([4], 5, [1, 2], True)]
        logits = model.compute(rows, pool)
    assert logits.device.type == "cuda"
    assert logits.shape == (2, 97)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_the_kernel_compiles_for_a_gpu_without_spilling_registers(capability: int) -> None:
    # In another process, because this one may have loaded the kernel for the interpreter.
    result = subprocess.run(
        [sys.executable, "-m", "tests.builders.compiled_kernels", str(capability)],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    for shape in json.loads(result.stdout):
        assert shape["shared_bytes"] <= SHARED_BYTES[capability], shape
        # Products of float32 are for checks; no matrix unit computes them.
        assert not shape["spilled_bytes"] or shape["dtype"] == "fp32", shape


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("preemption", list(Preemption))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_outputs_on_a_gpu_differ_from_those_of_a_cpu_only_after_ties(
    tmp_path: Path, architecture: str, preemption: Preemption, tell: Callable[[str], None]
) -> None:
    model = TinyModel.build(tmp_path, architecture, "float32", "cuda")
    assert model.packed.adapter.name == "triton-paged"
    bench = ModelBench(model, "slo", preemption, blocks=16, block_size=4)
    for family in range(12):
        bench.submit(3 * family + 1, 16, family=family, ignore_eos=True)
    bench.run_dry(tie=1e-3)
    if bench.ties:
        tell(f"{architecture}: {bench.ties} of {bench.compared_tokens} tokens differ by a tie")


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Gemma2", "GPT2"])
def test_replayed_graphs_give_the_outputs_of_a_cpu(
    tmp_path: Path, architecture: str, tell: Callable[[str], None]
) -> None:
    model = TinyModel.build(tmp_path, architecture, "float32", "cuda")
    bench = ModelBench(
        model,
        "sarathi",
        Preemption.SWAP,
        blocks=60,
        block_size=4,
        depth=1,
        starts_ahead=True,
        decode_sizes=batch_sizes(8),
        recorder=CudaGraphs(),
    )
    for family in range(12):
        bench.submit(3 * family + 1, 16, family=family, ignore_eos=True)
    bench.run_dry(tie=1e-3)
    if bench.ties:
        tell(f"{architecture}: {bench.ties} of {bench.compared_tokens} tokens differ by a tie")


@on_gpu
@pytest.mark.gpu
def test_a_step_is_started_without_waiting_for_the_device(tmp_path: Path) -> None:
    model = TinyModel.build(tmp_path, "Llama", "float32", "cuda").packed
    pool = KVPool(model.geometry, num_blocks=8, block_size=4, device=model.device)
    rows = [PackedRow([1, 2, 3], 0, [0], True), PackedRow([4], 5, [1, 2], True)]
    model.compute(rows, pool)
    sampler = Sampler()
    sampling = RequestSampling(
        SamplingOptions(temperature=0.8, repetition_penalty=1.2, min_p=0.1), [1, 2]
    )
    sampled = [SampledRow(None, 3, frozenset({5})), SampledRow(sampling, 6)]
    sampler.choose(model.compute(rows, pool), sampled)
    sampling.append(4)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.choose(model.compute(rows, pool), sampled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
