"""Models on a GPU: what can be checked without one, and outputs where one is present."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
import transformers
from tests.builders.schedulers import make_configure
from tests.builders.torch_models import (
    ARCHITECTURES,
    CONTEXT,
    VOCABULARY,
    ModelBench,
    Outputs,
    TinyModel,
    make_folder,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from goodput_core.spec.choices import Preemption
from goodput_engine.core.build import build_model_core
from goodput_engine.executor.torch import triton_attention
from goodput_engine.executor.torch.downloads import CudaDownloads
from goodput_engine.executor.torch.kv_pool import KVGeometry, KVPool, pin_exact_sizes
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.model import LateTokens, PackedModel, PackedRow
from goodput_engine.executor.torch.padded_decodes import CudaGraphs, PaddedDecodes, batch_sizes
from goodput_engine.executor.torch.sampling import RequestSampling, SampledRow, Sampler
from goodput_engine.executor.torch.start_up import _compile_kernels, start_model
from goodput_engine.messages import ExecutorInput, ModelFolder, SamplingOptions, Submit
from goodput_engine.scheduler.plan import Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from goodput_engine.executor.torch.attention import AttentionRule, RaggedBatch
    from goodput_engine.executor.torch.chosen_tokens import ChosenTokens

pytestmark = pytest.mark.torch

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: needs an NVIDIA GPU")
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Shared memory of a program, by compute capability. Source: CUDA C++ Programming Guide."""


CPU_OR_GPU = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", id="gpu", marks=[pytest.mark.gpu, on_gpu]),
]


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


class HostCopies(TorchDispatchMode):  # type: ignore[misc] # torch has no types here
    """Finds the operations that copy from a GPU to the host.

    Attributes:
        found: their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = NotImplemented
        if func.namespace == "aten":
            with self:  # inference mode hands over operations that consist of others
                out = func.decompose(*args, **(kwargs or {}))
        if out is NotImplemented:
            out = func(*args, **(kwargs or {}))
        if "cuda" in _devices((args, kwargs)) and "cpu" in _devices(out):
            self.found.append(str(func))
        return out


def _devices(values: object) -> set[str]:
    return {one.device.type for one in tree_leaves(values) if isinstance(one, torch.Tensor)}


class CountedDownloads:
    """Copies to the host that a test only counts."""

    def __init__(self) -> None:
        self.copies = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copies += 1
        return tensor

    def record(self) -> object:
        return None

    def wait(self, event: object) -> None:
        raise AssertionError("the tokens are not read")


LIMITED = {
    "temperature": SamplingOptions(temperature=0.8, seed=3),
    "min-p": SamplingOptions(temperature=0.8, min_p=0.1),
    "top-p": SamplingOptions(temperature=0.8, top_p=0.9, logprobs=2),
    "top-k": SamplingOptions(temperature=0.8, top_k=20),
    "a large top-k": SamplingOptions(temperature=0.8, top_k=500),
    "all limits": SamplingOptions(temperature=0.8, top_k=20, top_p=0.9, min_p=0.1),
    "penalties": SamplingOptions(repetition_penalty=1.2, frequency_penalty=0.3, logprobs=0),
    "a bias": SamplingOptions(logit_bias={3: 2.0}),
}


def limited_rows() -> list[SampledRow]:
    """Return a row for each option, a greedy one, and one that follows a grammar."""
    return [
        SampledRow(None, 3, frozenset({5, 6})),
        SampledRow(None, 3, allowed=np.array([0b110], dtype=np.int32)),
        *(SampledRow(RequestSampling(one, [1, 2]), 6) for one in LIMITED.values()),
    ]


def test_no_option_of_sampling_reads_from_the_device() -> None:
    downloads = CountedDownloads()
    # Tensors without values cannot be read.
    with FakeTensorMode(allow_non_fake_inputs=True), HostCopies() as copies:
        rows = limited_rows()
        logits = torch.zeros(len(rows), 5_000, device="cuda")
        chosen = Sampler(downloads).choose(logits, rows)
    assert chosen.ids.device.type == "cuda"
    assert copies.found == []
    # Tokens, and three tensors of log-probabilities.
    assert downloads.copies == 4


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


def test_few_versions_of_the_kernels_are_compiled_for_steps_of_all_shapes() -> None:
    """A decode has a kernel with and without shared keys, and prompts have one."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.builders.compiled_kernels", "90", "versions"],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    versions = json.loads(result.stdout)
    # Of one kernel, for 2, 4, 8 and 16 programs that share the keys of a sequence.
    assert versions == {"_attend": 3, "_join": 4}


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Fail if the body waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
    sampled = limited_rows()
    rows = [PackedRow([at, 2, 3], 0, [at % 8], True) for at in range(len(sampled))]
    sampler = Sampler(CudaDownloads())

    def start() -> ChosenTokens:
        return sampler.choose(model.compute(rows, pool), sampled)

    for one, row in zip(start().read(), sampled, strict=True):
        if row.sampling is not None:
            row.sampling.append(one.token_id)
    with no_synchronization():
        chosen = start()
    assert len(chosen.read()) == len(sampled)


@on_gpu
@pytest.mark.gpu
def test_a_recorded_step_after_a_copy_is_started_without_waiting_for_the_device(
    tmp_path: Path,
) -> None:
    model = TinyModel.build(tmp_path, "Llama", "float32", "cuda").packed
    pool = KVPool(
        model.geometry, num_blocks=9, block_size=4, num_host_blocks=2, device=model.device
    )
    padded = PaddedDecodes(model, pool, sizes=batch_sizes(4), recorder=CudaGraphs())
    pool.device_blocks.zero_()
    rows = [PackedRow([0], 3, [at], True) for at in range(3)]
    ids = torch.tensor([5, 6, 7], device=model.device)
    late = LateTokens([0, 1, 2], [0, 1, 2], ids)
    copy = Copy(rid=9, to_host=True, device_blocks=(1, 4), host_blocks=(0, 1))

    def start() -> torch.Tensor:
        pool.copy(copy)
        pool.before_step(row.blocks for row in rows)
        return padded.compute(rows, late)

    expected = start().clone()
    with no_synchronization():
        logits = start()
    torch.testing.assert_close(logits, expected)


def test_this_version_of_torch_can_pin_exact_sizes() -> None:
    assert pin_exact_sizes()


@on_gpu
@pytest.mark.gpu
def test_the_pinned_pool_takes_no_more_than_its_size() -> None:
    geometry = KVGeometry(
        num_layers=1, num_kv_heads=1, head_dim=1 << 19, dtype=torch.float16
    )  # 2 MiB for each block of one token
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    pool = KVPool(
        geometry, num_blocks=2, block_size=1, num_host_blocks=700, device=torch.device("cuda")
    )
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert pool.host_blocks.is_pinned()
    assert taken <= 1.05 * pool.host_blocks.nbytes


@on_gpu
@pytest.mark.gpu
def test_memory_can_be_freed_after_a_step_that_waits_for_the_device_was_not_recorded() -> None:
    """A recording that torch cannot end blocks `empty_cache` for the rest of the process."""
    numbers = torch.ones(8, device="cuda")

    def step() -> torch.Tensor:
        return numbers * numbers.sum().item()

    with pytest.raises(RuntimeError, match="synchronizing"):
        CudaGraphs().record(step)
    torch.cuda.empty_cache()
    assert int(CudaGraphs().record(numbers.sum)()) == 8


@on_gpu
@pytest.mark.gpu
def test_tokens_are_read_while_later_work_runs_on_the_gpu() -> None:
    sampler = Sampler(CudaDownloads())
    logits = torch.randn(4, 5_000, device="cuda")
    rows = [SampledRow(RequestSampling(LIMITED["top-p"]), at) for at in range(4)]
    sampler.sample(logits.clone(), rows)
    expected = sampler.sample(logits.clone(), rows)
    chosen = sampler.choose(logits.clone(), rows)
    torch.cuda._sleep(2_000_000_000)  # clock cycles, about a second
    later = torch.cuda.Event()
    later.record()
    tokens = chosen.read()
    assert not later.query(), "the host waited for the later work"
    assert [one.token_id for one in tokens] == [one.token_id for one in expected]


@pytest.mark.parametrize("device", CPU_OR_GPU)
def test_a_started_model_is_measured_and_serves_its_own_outputs(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The complete start; on a GPU with recorded steps, and a plan in flight behind the running."""
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        # In a pod, the kernels of the attention are not measured.
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    make_folder(tmp_path, "Llama")
    config = make_configure(
        preemption="swap", token_budget=64, max_num_seqs=8, swap_space_bytes=1 << 30
    )
    settings = ModelFolder(path=str(tmp_path), dtype="float32", block_size=4)
    load_ns: list[int] = []
    loaded = start_model(config, settings, with_swap=True, on_warm_up=load_ns.append)
    # All running requests of full length.
    assert (loaded.kv_blocks, loaded.host_blocks) == (8 * CONTEXT // 4, 8 * CONTEXT // 4)
    assert min(loaded.swap_ns_per_block, loaded.longest_step_ns, *load_ns) > 0
    assert len(load_ns) == 5
    assert len(set(load_ns)) == 1
    facts = loaded.facts
    assert facts["dtype"] == "float32"
    if device == "cuda":
        assert facts["gpu"] == torch.cuda.get_device_name()
        assert (facts["attention"], facts["graphs"]) == ("triton-paged", "1 to 8 rows")
        assert loaded.executor.default_depth == 1
    else:
        assert (facts["attention"], loaded.executor.default_depth) == ("torch-sdpa", 0)

    core = build_model_core(config, loaded)
    prompts = [[(7 * rid + 3 * at) % VOCABULARY for at in range(5 * rid + 1)] for rid in range(12)]
    for rid, token_ids in enumerate(prompts):
        submit = Submit(
            rid=rid,
            arrival_ns=time.monotonic_ns(),
            input_tokens=len(token_ids),
            max_output_tokens=16,
            executor=ExecutorInput(token_ids=token_ids, ignore_eos=True),
        )
        assert core.submit(submit, time.monotonic_ns()) is None
    outputs: list[list[int]] = [[] for _ in prompts]
    while core.scheduler.has_work:
        step = core.step(time.monotonic_ns())
        for one in step.outputs if step is not None else ():
            outputs[one.rid] += one.token_ids
    assert core.take_rejected() == []
    own = Outputs(tmp_path, "float32")
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == 16
        logits = own.logits(prompt + output)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert float((logits.max(1).values - chosen).max()) < 1e-3


def compiled_versions() -> int:
    """Return the number of versions of our kernels that are compiled for the device."""
    kernels = (triton_attention._attend, triton_attention._join)
    return sum(len(caches[0]) for one in kernels for caches in one.device_caches.values())


@on_gpu
@pytest.mark.gpu
def test_no_kernel_is_compiled_after_the_start(tmp_path: Path) -> None:
    make_folder(tmp_path, "Llama", max_position_embeddings=8192, head_dim=64)
    model = load_model(tmp_path, dtype="bfloat16", device=torch.device("cuda"))
    assert model.adapter.name == "triton-paged"
    pool = KVPool(model.geometry, num_blocks=600, block_size=16, device=model.device)
    pool.device_blocks.zero_()
    model.compute([PackedRow([0] * 64, 0, [0, 1, 2, 3], True)], pool)  # the first step
    _compile_kernels(model, pool)
    before = compiled_versions()
    rng = random.Random(3)
    for _ in range(200):
        rows = []
        for _ in range(rng.randint(1, 40)):
            num_keys = rng.randint(1, 8192)
            num_tokens = rng.choice([1, 1, 1, min(num_keys, rng.randint(2, 100))])
            blocks = rng.sample(range(599), -(-num_keys // 16))
            rows.append(PackedRow([0] * num_tokens, num_keys - num_tokens, blocks, True))
        model.compute(rows, pool)
    assert compiled_versions() == before


def take_steps(bench: ModelBench) -> None:
    """Take steps until no request is left, and accept further ones afterwards."""
    while bench.scheduler.has_work:
        bench.step()


@on_gpu
@pytest.mark.gpu
def test_a_gpu_that_runs_out_of_memory_computes_parts_and_fails_a_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half a megabyte for each token and layer, and weights that remain small.
    make_folder(tmp_path, "Llama", intermediate_size=1 << 16)
    device = torch.device("cuda")
    # In float64, the parts of a step give the same tokens.
    packed = load_model(tmp_path, dtype="float64", device=device)
    bench = ModelBench(
        TinyModel(packed=packed, outputs=Outputs(tmp_path, "float64")),
        "sarathi",
        Preemption.RECOMPUTE,
        blocks=200,
        block_size=4,
        budget=512,
        depth=1,
        starts_ahead=True,
    )
    bench.submit(5, 4)  # libraries take their own memory now
    take_steps(bench)
    total = torch.cuda.get_device_properties(device).total_memory
    compute = packed.compute
    failed: list[str] = []

    def counted(*arguments: Any) -> torch.Tensor:
        try:
            return compute(*arguments)
        except torch.OutOfMemoryError as error:
            failed.append(str(error))
            raise

    def allow(more_bytes: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
        torch.cuda.set_per_process_memory_fraction((reserved + more_bytes) / total, device)

    held: list[torch.Tensor] = []

    def hold_all(size: int) -> None:
        while True:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))

    monkeypatch.setattr(packed, "compute", counted)
    try:
        allow(64 << 20)
        for family in range(4):
            bench.submit(110, 8, family=family)
        take_steps(bench)
        assert failed, "the memory was large enough"
        assert not bench.rejected
        allow(0)
        # torch divides the memory into a part for large tensors and one for those up to 1 MiB.
        for size in (2 << 20, (1 << 20) + 512, 1 << 18):
            with pytest.raises(torch.OutOfMemoryError):
                hold_all(size)
        held.pop()  # too small for a token, but not for the description of a step
        refused = bench.submit(110, 8, family=5)
        take_steps(bench)
        assert bench.rejected == {refused: "out_of_memory"}
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    bench.submit(110, 8, family=5)
    bench.run_dry()
