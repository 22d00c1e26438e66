"""With a plan in flight, the device computes the next step while the host reads the last tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.queued_downloads import QueuedDownloads
from tests.builders.schedulers import make_configure
from tests.builders.torch_models import ModelBench, TinyModel

from goodput_core.spec.choices import Preemption
from goodput_engine.core.build import build_model_core
from goodput_engine.executor.base import LoadedModel
from goodput_engine.executor.torch.executor import TorchExecutor
from goodput_engine.executor.torch.roofline import measure_roofline
from goodput_engine.messages import SamplingOptions

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch


@pytest.fixture
def llama(tmp_path: Path) -> TinyModel:
    return TinyModel.build(tmp_path, "Llama", "float64")


@pytest.mark.parametrize(
    ("sampling", "copies"),
    [
        pytest.param(SamplingOptions(), 1, id="tokens"),
        pytest.param(SamplingOptions(logprobs=2), 4, id="tokens and log-probabilities"),
    ],
)
def test_tokens_are_read_while_the_next_step_is_computed(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch, sampling: SamplingOptions, copies: int
) -> None:
    log: list[str] = []
    compute = llama.packed.compute

    def log_compute(*arguments: Any) -> Any:
        log.append("forward")
        return compute(*arguments)

    monkeypatch.setattr(llama.packed, "compute", log_compute)
    bench = ModelBench(
        llama,
        "sarathi",
        Preemption.RECOMPUTE,
        blocks=20,
        block_size=4,
        depth=1,
        starts_ahead=True,
        downloads=QueuedDownloads(log),
    )
    bench.submit(5, 4, ignore_eos=True, sampling=sampling)
    bench.run_dry()

    def step(number: int) -> list[str]:
        return ["forward", *["copy"] * copies, f"event {number}"]

    # The copies of a step are before the next forward pass, and no read waits for an event after
    # it.
    assert log == [
        *step(0),
        *(entry for number in (1, 2, 3) for entry in (*step(number), f"wait {number - 1}")),
        "wait 3",
    ]
    assert len(bench.logprobs[0]) == (0 if sampling.logprobs is None else 4)


@pytest.mark.parametrize(
    ("starts_ahead", "configured", "depth"), [(False, None, 0), (True, None, 1), (True, 0, 0)]
)
def test_a_plan_waits_behind_the_running_one_where_the_executor_starts_it_ahead(
    llama: TinyModel, starts_ahead: bool, configured: int | None, depth: int
) -> None:
    executor = TorchExecutor(
        llama.packed,
        num_blocks=64,
        block_size=16,
        clock=lambda: 0,
        starts_ahead=starts_ahead,
    )
    loaded = LoadedModel(
        executor=executor,
        name="llama",
        vocab_size=llama.packed.vocab_size,
        max_model_tokens=llama.packed.max_model_tokens,
        block_size=16,
        kv_blocks=64,
        host_blocks=0,
        swap_ns_per_block=1,
        longest_step_ns=1,
        facts={},
        measure_roofline=lambda: measure_roofline(llama.packed),
    )
    core = build_model_core(make_configure(depth=configured), loaded)
    assert core.scheduler.depth == depth
