"""The memory that a model may take is measured, and weights that exceed it are refused."""

from __future__ import annotations

import json
import mmap
import struct
import weakref
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from tests.builders.torch_models import ModelBench, TinyModel, make_folder
from triton.runtime.errors import OutOfResources

from goodput_core.errors import InputError
from goodput_core.spec.choices import Preemption
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.memory import PeakMemory, available_bytes, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from goodput_engine.executor.torch.kv_pool import KVPool
    from goodput_engine.executor.torch.model import LateTokens, PackedModel, PackedRow
    from goodput_engine.scheduler.plan import StepResult

pytestmark = pytest.mark.torch

KIB, MIB = 1024, 1 << 20


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write files below a root folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


MEMINFO = "MemTotal: 9000 kB\nMemAvailable:    8192 kB\nBuffers: 1 kB\n"
V2 = {
    "proc/self/cgroup": "0::/pod/main\n",
    "sys/fs/cgroup/pod/main/memory.max": "max\n",
    "sys/fs/cgroup/pod/main/memory.current": "1\n",
    "sys/fs/cgroup/pod/main/memory.stat": "inactive_file 0\n",
}
PARENT = {
    "sys/fs/cgroup/pod/memory.max": f"{4 * MIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{3 * MIB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"anon 7\ninactive_file {MIB}\n",
}
V1 = {
    "proc/self/cgroup": "4:cpu,memory:/outside/of/the/container\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * MIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{MIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 9\ntotal_inactive_file {KIB}\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 8 * MIB, id="no control groups"),
        pytest.param(V2, 8 * MIB, id="a group without a limit"),
        pytest.param({**V2, **PARENT}, 2 * MIB, id="the limit of a parent"),
        pytest.param(V1, MIB + KIB, id="version 1 inside a container"),
        pytest.param(
            {**V2, **PARENT, "sys/fs/cgroup/pod/memory.current": f"{9 * MIB}"}, 0, id="exhausted"
        ),
    ],
)
def test_available_memory_is_the_least_of_machine_and_control_groups(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    root = write_files(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert available_bytes(root) == expected


def test_a_system_that_does_not_report_its_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="memory cannot be measured on this system"):
        available_bytes(tmp_path)


def touch_and_free(size: int) -> None:
    """Use pages of their own; an allocator could reuse memory that other tests freed."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        for at in range(0, size, mmap.PAGESIZE):
            pages[at] = 1


def test_peak_memory_sees_a_buffer_that_is_already_freed_but_no_earlier_one() -> None:
    touch_and_free(128 * MIB)
    peak = PeakMemory(torch.device("cpu"))
    assert peak.grown_bytes() < 8 * MIB
    touch_and_free(64 * MIB)
    assert 60 * MIB < peak.grown_bytes() < 72 * MIB


def test_memory_that_was_freed_on_the_heap_does_not_hide_a_growth() -> None:
    # glibc puts pieces on the heap that are smaller than one that was freed before. The pieces that
    # are kept hold the gaps between them.
    torch.zeros(7 * MIB)
    pieces = [torch.zeros(MIB // 4) for _ in range(80)]
    kept = pieces[::5]
    del pieces
    peak = PeakMemory(torch.device("cpu"))
    reusing = [torch.zeros(MIB // 4) for _ in range(60)]
    assert 56 * MIB < peak.grown_bytes() < 72 * MIB
    assert len(kept) + len(reusing) == 76


def test_a_model_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "Llama")
    rows = 1 << 36
    header = json.dumps({"x": {"dtype": "F16", "shape": [rows, 4], "data_offsets": [0, rows * 8]}})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(8 + len(header) + rows * 8)  # sparse: takes no space
    with pytest.raises(InputError, match=r"the weights take 1024\.0 GiB as float32, but only"):
        load_model(folder)


class ScarceModel:
    """A model whose steps fail above a number of tokens, as if the memory were too small.

    Args:
        packed: the model that computes the other steps.
        most: largest number of tokens of a step.

    Attributes:
        refused: token ids that no step can compute.
        fails_ahead: True if steps fail that start before the tokens of the last one are read.
        failures: number of steps that failed.
        computed: the rows of all other steps.
        kept: number of steps that began while a tensor of an earlier, failed step was in memory.
    """

    def __init__(self, packed: PackedModel, most: int) -> None:
        self._packed, self._most = packed, most
        self.refused: set[int] = set()
        self.fails_ahead = False
        self.failures = 0
        self.computed: list[PackedRow] = []
        self.kept = 0
        self.error: Exception = torch.OutOfMemoryError("CUDA out of memory")
        self._failed: weakref.ref[torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packed, name)

    def compute(
        self, rows: Sequence[PackedRow], pool: KVPool, late: LateTokens | None = None
    ) -> torch.Tensor:
        """Compute a step, or fail after it wrote some keys and values."""
        self.kept += self._failed is not None and self._failed() is not None
        ids = {token_id for row in rows for token_id in row.token_ids}
        fits = sum(len(row.token_ids) for row in rows) <= self._most and not ids & self.refused
        if fits and not (self.fails_ahead and late is not None):
            self.computed += rows
            return self._packed.compute(rows, pool, late)
        self.failures += 1
        hidden_states = torch.empty(1)
        self._failed = weakref.ref(hidden_states)
        for row in rows:
            block, slot = divmod(row.start, pool.block_size)
            pool.device_blocks[row.blocks[block], :, :, slot] = 7
        raise type(self.error)(*self.error.args)


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    return TinyModel.build(tmp_path, "Llama", "float64")


def make_bench(tiny: TinyModel, scarce: ScarceModel, depth: int) -> ModelBench:
    """Return an engine that computes with the scarce model."""
    model = TinyModel(packed=cast("PackedModel", scarce), outputs=tiny.outputs)
    return ModelBench(
        model,
        "sarathi",
        Preemption.RECOMPUTE,
        blocks=90,
        block_size=4,
        budget=40,
        depth=depth,
        starts_ahead=depth == 2,
    )


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("most", [1, 3, 17])
def test_a_step_that_runs_out_of_memory_is_computed_in_parts(
    tiny: TinyModel, most: int, depth: int
) -> None:
    scarce = ScarceModel(tiny.packed, most)
    bench = make_bench(tiny, scarce, depth)
    for family in range(5):
        bench.submit(7 * family + 2, 12, family=family)
    bench.run_dry()
    assert scarce.failures > 0
    assert scarce.kept == 0
    assert len(bench.finished) == 5


def test_a_step_that_runs_out_of_memory_ahead_of_unread_tokens_is_computed_after_them(
    tiny: TinyModel,
) -> None:
    scarce = ScarceModel(tiny.packed, 64)
    scarce.fails_ahead = True
    bench = make_bench(tiny, scarce, 2)
    for family in range(5):
        bench.submit(7 * family + 2, 12, family=family)
    bench.run_dry()
    assert scarce.failures > 0
    assert len(bench.finished) == 5


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_that_cannot_be_computed_alone_fails_and_the_others_continue(
    tiny: TinyModel, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = ScarceModel(tiny.packed, 64)
    bench = make_bench(tiny, scarce, depth)
    prompt = bench.submit(60, 12, family=1)  # in two chunks
    ids = bench.submits[prompt].executor.token_ids
    others = [bench.submit(9, 12, family=family, ignore_eos=True) for family in (2, 3)]
    later = next(at for at in range(12, 30) if ids.index(ids[at]) == at)
    scarce.refused = {ids[later]} - {
        token_id
        for rid in others
        for token_id in bench.submits[rid].executor.token_ids
        + tiny.outputs.of(bench.submits[rid])[0]
    }
    assert scarce.refused
    results = []
    collect = bench.executor.collect

    def recorded(now_ns: int) -> StepResult | None:
        result = collect(now_ns)
        results.append(result)
        return result

    monkeypatch.setattr(bench.executor, "collect", recorded)
    for _ in range(4):
        bench.step()
    assert bench.rejected == {prompt: "out_of_memory"}
    assert [(rid, *failure) for one in results if one for rid, failure in one.failed.items()] == [
        (prompt, "out_of_memory", "the device has too little free memory for this request", 1)
    ]
    assert not any(prompt in one.token_ids for one in results if one), "half of its prompt failed"
    behind = [row for row in scarce.computed if row.start > later]
    assert not any(ids[row.start :][: len(row.token_ids)] == row.token_ids for row in behind)
    scarce.refused = set()
    # The prefix of the failed request, of which a part was never computed.
    again = bench.submit(60, 12, family=1)
    bench.run_dry()
    assert set(bench.finished) == {*others, again}
    assert bench.scheduler.free_blocks == bench.scheduler.total_blocks


# As a GPU raises them; the second lines of torch's are the same for every error of CUDA.
GPU_ERRORS = {
    "torch": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.80 GiB"
    ),
    "driver": torch.AcceleratorError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some "
        "other API call, so the stacktrace below might be incorrect."
    ),
    "cuBLAS": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "Triton": RuntimeError("Triton Error [CUDA]: out of memory"),
}


@pytest.mark.parametrize("error", GPU_ERRORS.values(), ids=GPU_ERRORS)
def test_a_step_is_computed_in_parts_after_each_error_of_a_gpu_without_memory(
    tiny: TinyModel, error: Exception
) -> None:
    scarce = ScarceModel(tiny.packed, 17)
    scarce.error = error
    bench = make_bench(tiny, scarce, 0)
    for family in range(3):
        bench.submit(7 * family + 2, 6, family=family)
    bench.run_dry()
    assert scarce.failures > 0
    assert len(bench.finished) == 3


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(…)`"),
        OutOfResources(300_000, 232_448, "shared memory"),
    ],
    ids=["assert", "access", "cuBLAS", "shared memory"],
)
def test_an_error_of_a_gpu_that_a_smaller_step_would_repeat_is_no_lack_of_memory(
    error: Exception,
) -> None:
    assert not is_out_of_memory(error)


def test_another_error_of_a_step_is_not_taken_for_a_lack_of_memory(tiny: TinyModel) -> None:
    class BrokenModel(ScarceModel):
        def compute(
            self, rows: Sequence[PackedRow], pool: KVPool, late: LateTokens | None = None
        ) -> torch.Tensor:
            raise RuntimeError("the matrices do not match")

    bench = make_bench(tiny, BrokenModel(tiny.packed, 64), 0)
    bench.submit(5, 3)
    with pytest.raises(RuntimeError, match="matrices"):
        bench.run_dry()


def test_an_allocation_that_a_cpu_refuses_is_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as python:
        bytearray(1 << 62)
    assert is_out_of_memory(python.value)
