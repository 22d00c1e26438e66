"""A step reaches the model of transformers as one packed sequence, without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.torch_models import ModelBench, TinyModel

from goodput_core.spec.choices import Preemption

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from goodput_engine.executor.torch.kv_pool import KVPool
    from goodput_engine.executor.torch.model import PackedRow
    from goodput_engine.scheduler.plan import StepPlan

pytestmark = pytest.mark.torch


class ForwardInput(NamedTuple):
    """The input of one forward pass, and the hidden states of which logits are computed."""

    ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Size


def test_the_model_gets_one_ragged_sequence_and_computes_only_the_logits_that_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel.build(tmp_path, "Llama", "float64")
    bench = ModelBench(
        tiny, "sarathi", Preemption.RECOMPUTE, blocks=60, block_size=4, budget=24, seqs=5
    )
    calls: list[dict[str, Any]] = []
    kept: list[torch.Size] = []
    plans: list[StepPlan] = []
    steps: list[list[PackedRow]] = []
    submit, compute = bench.executor.submit, tiny.packed.compute

    def log_plan(plan: StepPlan, ready_ns: int) -> None:
        if plan.shape.num_tokens:
            plans.append(plan)
        submit(plan, ready_ns)

    def log_rows(rows: list[PackedRow], pool: KVPool) -> torch.Tensor:
        # A block table of an executor grows later.
        steps.append([row._replace(blocks=()) for row in rows])
        return compute(rows, pool)

    monkeypatch.setattr(bench.executor, "submit", log_plan)
    monkeypatch.setattr(tiny.packed, "compute", log_rows)
    tiny.packed.model.register_forward_pre_hook(
        lambda _module, _positional, keywords: calls.append(keywords), with_kwargs=True
    )
    tiny.packed.model.lm_head.register_forward_pre_hook(
        lambda _module, arguments: kept.append(arguments[0].shape)
    )
    for family in range(7):
        bench.submit(9 * family + 1, 6, family=family, ignore_eos=True)
    bench.run_dry()

    inputs = [
        ForwardInput(call["input_ids"], call["position_ids"], shape)
        for call, shape in zip(calls, kept, strict=True)
    ]
    hidden = tiny.packed.model.config.hidden_size
    for one, plan, rows in zip(inputs, plans, steps, strict=True):
        num_tokens = plan.shape.num_tokens
        samples = plan.num_decodes + sum(chunk.samples for chunk in plan.chunks)
        assert one.ids.shape == one.positions.shape == (1, num_tokens)
        assert one.ids[0].tolist() == [token for row in rows for token in row.token_ids]
        assert one.positions[0].tolist() == [
            at for row in rows for at in range(row.start, row.start + len(row.token_ids))
        ]
        assert one.kept == (1, samples, hidden)
    ragged = [
        rows
        for rows in steps
        if len({len(row.token_ids) for row in rows}) > 2 and not all(row.samples for row in rows)
    ]
    assert ragged, "no step has rows of different lengths and one that does not sample"
