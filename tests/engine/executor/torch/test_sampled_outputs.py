"""Sampled outputs of the engine: the seed decides them, and options end them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.torch_models import STOP_IDS, ModelBench, TinyModel

from goodput_core.spec.choices import Preemption
from goodput_engine.messages import SamplingOptions

if TYPE_CHECKING:
    from goodput_engine.scheduler.plan import TokenLogprobs

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.build(tmp_path_factory.mktemp("llama"), "Llama", "float64")


def serve(
    model: TinyModel, preemption: Preemption = Preemption.RECOMPUTE, *, blocks: int = 100
) -> ModelBench:
    return ModelBench(model, "sarathi", preemption, blocks=blocks, block_size=4)


_SAMPLING = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 8]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([{}, {3: 2.0, 11: -100.0}]),
    seed=st.integers(0, 5),
    stop_ids=st.sampled_from([[], [7, 20]]),
    logprobs=st.sampled_from([None, 2]),
)
_REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "length": st.integers(1, 30),
            "max_output": st.integers(1, 16),
            "family": st.integers(0, 2),
            "min_tokens": st.sampled_from([0, 4]),
            "ignore_eos": st.booleans(),
            "sampling": _SAMPLING,
        }
    ),
    min_size=1,
    max_size=5,
)
_alone: dict[str, tuple[list[int], str, list[TokenLogprobs]]] = {}


def output_alone(
    model: TinyModel, request: dict[str, object]
) -> tuple[list[int], str, list[TokenLogprobs]]:
    """Return the output of a request on an engine of its own, with its prompt in one chunk."""
    key = repr(sorted(request.items()))
    if key not in _alone:
        bench = serve(model)
        rid = bench.submit(**request)  # type: ignore[arg-type]
        bench.finish()
        _alone[key] = bench.token_ids[rid], bench.finished[rid], bench.logprobs[rid]
    return _alone[key]


@pytest.mark.parametrize("preemption", list(Preemption))
@settings(max_examples=examples(25), deadline=None)
@given(
    policy=st.sampled_from(["sarathi", "vllm", "slo"]),
    requests=_REQUESTS,
    blocks=st.integers(12, 30),
    block_size=st.sampled_from([1, 4, 16]),
    budget=st.integers(1, 60),
    prefill_chunk=st.sampled_from([None, 1, 5]),
    depth=st.integers(0, 2),
    starts_ahead=st.booleans(),
    decode_sizes=st.sampled_from([(), (2, 4)]),
)
def test_no_schedule_changes_a_sampled_token(
    llama: TinyModel,
    preemption: Preemption,
    policy: str,
    requests: list[dict[str, object]],
    blocks: int,
    block_size: int,
    budget: int,
    prefill_chunk: int | None,
    depth: int,
    starts_ahead: bool,
    decode_sizes: tuple[int, ...],
) -> None:
    bench = ModelBench(
        llama,
        policy,
        preemption,
        blocks=max(blocks, 50 // block_size + 1),
        block_size=block_size,
        budget=budget,
        prefill_chunk=prefill_chunk,
        depth=depth,
        starts_ahead=starts_ahead,
        decode_sizes=decode_sizes,
    )
    rids = [bench.submit(**request) for request in requests]  # type: ignore[arg-type]
    bench.finish()
    for rid, request in zip(rids, requests, strict=True):
        ids, reason, logprobs = output_alone(llama, request)
        assert (bench.token_ids[rid], bench.finished[rid]) == (ids, reason)
        assert len(bench.logprobs[rid]) == (len(ids) if logprobs else 0)
        for own, alone in zip(bench.logprobs[rid], logprobs, strict=True):
            assert own.top_ids == alone.top_ids
            assert own.logprob == pytest.approx(alone.logprob, abs=1e-5)


@pytest.mark.parametrize("preemption", list(Preemption))
def test_preempted_requests_continue_with_the_sampled_tokens(
    llama: TinyModel, preemption: Preemption
) -> None:
    bench = serve(llama, preemption, blocks=12)
    requests: list[dict[str, object]] = [
        {
            "length": 9,
            "max_output": 16,
            "family": family,
            "ignore_eos": True,
            "sampling": SamplingOptions(temperature=1.0, frequency_penalty=0.5, seed=family),
        }
        for family in range(5)
    ]
    for request in requests:
        bench.submit(**request)  # type: ignore[arg-type]
    bench.finish()
    assert bench.scheduler.stats.preemptions > 0
    for rid, request in enumerate(requests):
        assert bench.token_ids[rid] == output_alone(llama, request)[0]


def test_seeds_give_different_outputs_and_equal_seeds_the_same(llama: TinyModel) -> None:
    bench = serve(llama)
    rids = [
        bench.submit(9, 16, ignore_eos=True, sampling=SamplingOptions(temperature=1.0, seed=seed))
        for seed in (1, 2, 1, -1, 2**63 - 1)
    ]
    bench.finish()
    outputs = [tuple(bench.token_ids[rid]) for rid in rids]
    assert outputs[0] == outputs[2]
    assert len(set(outputs)) == 4


def test_a_stop_id_ends_the_output_even_if_the_end_token_is_ignored(llama: TinyModel) -> None:
    free = serve(llama)
    rid = free.submit(9, 16, ignore_eos=True)
    free.finish()
    ids = free.token_ids[rid]
    stop = next(one for one in ids[3:] if one not in ids[:3])
    bench = serve(llama)
    options = SamplingOptions(stop_ids=[stop])
    stopped = bench.submit(9, 16, ignore_eos=True, sampling=options)
    early = bench.submit(9, 16, ignore_eos=True, sampling=options, min_tokens=16)
    bench.finish()
    assert bench.finished[stopped] == "stop"
    assert bench.token_ids[stopped] == ids[: ids.index(stop) + 1]
    assert bench.finished[early] == "length"
    assert stop not in bench.token_ids[early][:15]


def test_no_end_token_is_sampled_before_the_minimum(llama: TinyModel) -> None:
    bench = serve(llama)
    for seed in range(20):
        bench.submit(5, 16, min_tokens=10, sampling=SamplingOptions(temperature=2.0, seed=seed))
    bench.finish()
    outputs = list(bench.token_ids.values())
    assert all(len(ids) > 10 for ids in outputs)
    assert all(set(ids[:10]).isdisjoint(STOP_IDS) for ids in outputs)
    assert "stop" in bench.finished.values()


def test_a_greedy_output_is_the_same_beside_sampled_ones(llama: TinyModel) -> None:
    bench = serve(llama)
    for family in range(6):
        bench.submit(9, 12, family=family, sampling=SamplingOptions(temperature=1.0 * (family % 2)))
    bench.finish()
    for rid in (0, 2, 4):
        expected, reason = llama.outputs.of(bench.submits[rid])
        assert (bench.token_ids[rid], bench.finished[rid]) == (expected, reason)
