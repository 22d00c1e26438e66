"""Greedy tokens of the engine on real models equal those of transformers' own `generate`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from tests.builders.torch_models import ARCHITECTURES, ModelBench, TinyModel

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Preemption
from goodput_engine.executor.torch.chosen_tokens import ChosenTokens
from goodput_engine.scheduler.policies.registry import POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.executor.torch.attention import AttentionRule, RaggedBatch

    LoadTiny = Callable[..., TinyModel]

pytestmark = pytest.mark.torch


TIE = 1e-3
_TARGETS = (Targets(), Targets(tpot_ns=20_000), Targets(ttft_ns=60_000, tpot_ns=8_000))


@pytest.fixture(scope="module")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadTiny:
    """Return a function that builds the model of an architecture and a data type once."""
    models: dict[tuple[str, str], TinyModel] = {}

    def load(architecture: str, dtype: str = "float64") -> TinyModel:
        if (architecture, dtype) not in models:
            folder = tmp_path_factory.mktemp(architecture)
            models[architecture, dtype] = TinyModel.build(folder, architecture, dtype)
        return models[architecture, dtype]

    return load


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_gives_its_own_tokens_in_chunks_and_batches(
    load_tiny: LoadTiny, architecture: str
) -> None:
    bench = ModelBench(
        load_tiny(architecture), "sarathi", Preemption.RECOMPUTE, blocks=100, block_size=4, budget=9
    )
    for length in (1, 2, 13, 30):
        bench.submit(length, 16, family=length, ignore_eos=length == 13)
    bench.run_dry()
    assert len(bench.finished) == 4


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("preemption", list(Preemption))
def test_preempted_requests_continue_with_the_same_tokens(
    load_tiny: LoadTiny, preemption: Preemption, depth: int
) -> None:
    bench = ModelBench(
        load_tiny("Llama"),
        "sarathi",
        preemption,
        blocks=12,
        block_size=4,
        depth=depth,
        starts_ahead=depth > 0,
    )
    for family in range(5):
        bench.submit(9, 16, family=family, ignore_eos=True)
    bench.run_dry()
    stats = bench.scheduler.stats
    assert stats.preemptions > 0
    if preemption is Preemption.SWAP:
        assert stats.swapped_tokens > 0
    if preemption is Preemption.RECOMPUTE:
        assert stats.recomputed_tokens > 0


def test_a_step_starts_before_the_tokens_of_the_previous_one_are_read(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    packed = load_tiny("Llama").packed
    compute, read = packed.compute, ChosenTokens.read

    def log_compute(*arguments: Any) -> Any:
        events.append("late" if len(arguments) > 2 else "compute")
        return compute(*arguments)

    def log_read(chosen: ChosenTokens) -> Any:
        events.append("read")
        return read(chosen)

    monkeypatch.setattr(packed, "compute", log_compute)
    monkeypatch.setattr(ChosenTokens, "read", log_read)
    bench = ModelBench(
        load_tiny("Llama"),
        "sarathi",
        Preemption.RECOMPUTE,
        blocks=20,
        block_size=4,
        depth=1,
        starts_ahead=True,
    )
    bench.submit(5, 4, ignore_eos=True)
    bench.run_dry()
    assert events == ["compute", "late", "read", "late", "read", "late", "read", "read"]


def test_a_reused_prefix_gives_the_same_tokens(load_tiny: LoadTiny) -> None:
    bench = ModelBench(load_tiny("Qwen3"), "sarathi", Preemption.RECOMPUTE, blocks=40, block_size=4)
    for _ in range(2):
        for length in (14, 14, 20):
            bench.submit(length, 8, family=3, ignore_eos=True)
        for _ in range(30):
            bench.step()
    bench.run_dry()
    assert bench.scheduler.stats.prefix_hit_tokens == 12 + 12 + 16


def test_a_replayed_request_ends_after_its_recorded_length(
    load_tiny: LoadTiny,
) -> None:
    bench = ModelBench(load_tiny("Llama"), "sarathi", Preemption.RECOMPUTE, blocks=40, block_size=4)
    rid = bench.submit(9, 16, output_tokens=7)
    unlimited = bench.submit(9, 16, ignore_eos=True)
    while bench.scheduler.has_work:
        bench.step()
    assert bench.token_ids[rid] == bench.token_ids[unlimited][:7]
    assert bench.finished == {rid: "stop", unlimited: "length"}


_SUBMIT = st.fixed_dictionaries(
    {
        "length": st.integers(1, 40),
        "max_output": st.integers(1, 16),
        "family": st.integers(0, 2),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "ignore_eos": st.booleans(),
        "priority": st.integers(-1, 2),
        "targets": st.sampled_from(_TARGETS),
    }
)
_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), _SUBMIT),
        st.tuples(st.just("steps"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 8)),
        st.tuples(st.just("limits"), st.integers(1, 40), st.integers(1, 8)),
    ),
    min_size=3,
    max_size=14,
)


_SCHEDULES = st.fixed_dictionaries(
    {
        "blocks": st.integers(6, 30),
        "block_size": st.sampled_from([1, 4, 16]),
        "budget": st.integers(1, 60),
        "prefill_chunk": st.sampled_from([None, 1, 5, 16]),
        "depth": st.integers(0, 2),
        "starts_ahead": st.booleans(),
        "decode_sizes": st.sampled_from([(), (1, 2, 4, 8), (3,)]),
        "reuses_prefixes": st.booleans(),
    }
)


def act(bench: ModelBench, actions: list[tuple[object, ...]]) -> None:
    """Submit, cancel, and take steps, as drawn."""
    for action in actions:
        match action:
            case ("submit", dict(request)):
                bench.submit(**request)
            case ("steps", int(number)):
                for _ in range(number):
                    bench.step()
            case ("cancel", int(rid)):
                bench.cancel(rid)
            case ("limits", int(tokens), int(seqs)):
                bench.set_limits(tokens, seqs)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("preemption", list(Preemption))
@settings(max_examples=examples(8), deadline=None)
@given(
    architecture=st.sampled_from(["Llama", "Gemma2", "Mistral", "GPTNeoX", "Mixtral"]),
    first=_SUBMIT,
    actions=_ACTIONS,
    schedule=_SCHEDULES,
)
def test_no_schedule_changes_a_token(
    load_tiny: LoadTiny,
    policy: str,
    preemption: Preemption,
    architecture: str,
    first: dict[str, object],
    actions: list[tuple[object, ...]],
    schedule: dict[str, Any],
) -> None:
    bench = ModelBench(load_tiny(architecture), policy, preemption, **schedule)
    act(bench, [("submit", first), *actions])
    bench.run_dry()
    scheduler = bench.scheduler
    assert scheduler.free_blocks == scheduler.total_blocks


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_schedule_changes_a_token_in_float32_except_at_ties(
    load_tiny: LoadTiny, architecture: str, tell: Callable[[str], None]
) -> None:
    model = load_tiny(architecture, "float32")
    ties = compared = 0

    def serve(bench: ModelBench) -> None:
        nonlocal ties, compared
        bench.run_dry(tie=TIE)
        ties, compared = ties + bench.ties, compared + bench.compared_tokens

    @settings(max_examples=examples(6), deadline=None)
    @given(
        policy=st.sampled_from(sorted(POLICIES)),
        preemption=st.sampled_from(list(Preemption)),
        first=_SUBMIT,
        actions=_ACTIONS,
        schedule=_SCHEDULES,
    )
    def serve_any(
        policy: str,
        preemption: Preemption,
        first: dict[str, object],
        actions: list[tuple[object, ...]],
        schedule: dict[str, Any],
    ) -> None:
        bench = ModelBench(model, policy, preemption, **schedule)
        act(bench, [("submit", first), *actions])
        serve(bench)

    # Long outputs that are swapped, and then schedules of any kind.
    bench = ModelBench(model, "slo", Preemption.SWAP, blocks=16, block_size=4)
    for family in range(12):
        bench.submit(3 * family + 1, 16, family=family, ignore_eos=True)
    serve(bench)
    assert compared == 12 * 16
    serve_any()
    tell(f"{architecture} in float32: {ties} of {compared} tokens differ from the best by a tie")


def test_a_token_that_is_not_the_best_is_found_unless_it_is_within_a_tie(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = load_tiny("Llama", "float32").packed
    compute = packed.compute
    gaps: list[float] = []

    def prefer_the_second(*arguments: Any) -> torch.Tensor:
        logits = compute(*arguments)
        if len(logits) == 3 and not gaps:
            (best, second), ids = logits[1].topk(2)
            gaps.append(float(best - second))
            logits = logits.clone()
            logits[1, ids] = torch.stack([second, best])
        return logits

    monkeypatch.setattr(packed, "compute", prefer_the_second)
    bench = ModelBench(
        load_tiny("Llama", "float32"), "sarathi", Preemption.RECOMPUTE, blocks=40, block_size=4
    )
    for family in range(3):
        bench.submit(9, 16, family=family, ignore_eos=True)
    bench.finish()
    (gap,) = gaps
    assert gap > TIE
    for tie in (TIE, 0.99 * gap):
        with pytest.raises(AssertionError, match="of request 1"):
            bench.run_dry(tie=tie)
    bench.run_dry(tie=1.01 * gap)
    assert bench.ties == 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_that_are_half_as_large_again_are_found_in_float32(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    model = load_tiny(architecture, "float32")
    attend = model.packed.adapter.attend

    def attend_with_larger_scores(
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: RaggedBatch,
        rule: AttentionRule,
    ) -> torch.Tensor:
        softcap = None if rule.softcap is None else 1.5 * rule.softcap
        larger = replace(rule, scale=1.5 * rule.scale, softcap=softcap)
        return attend(q, keys, values, batch, larger)

    monkeypatch.setattr(model.packed.adapter, "attend", attend_with_larger_scores)
    bench = ModelBench(model, "sarathi", Preemption.RECOMPUTE, blocks=80, block_size=4)
    for family in range(6):
        bench.submit(5 * family + 4, 16, family=family, ignore_eos=True)
    with pytest.raises(AssertionError, match=r"token \d+ of request"):
        bench.run_dry(tie=TIE)
