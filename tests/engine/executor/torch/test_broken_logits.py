"""A request whose logits are not finite numbers fails alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.torch_models import ModelBench, TinyModel

from goodput_core.spec.choices import Preemption
from goodput_engine.executor.torch.sampling import RequestSampling, SampledRow, Sampler
from goodput_engine.messages import Rejected, SamplingOptions
from goodput_engine.openai.rejections import rejection_error

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

OPTIONS = {
    "greedy": SamplingOptions(),
    "penalties": SamplingOptions(repetition_penalty=1.2),
    "random": SamplingOptions(temperature=0.7, seed=1),
    "min-p": SamplingOptions(temperature=0.7, min_p=0.1, seed=1),
    "top-p": SamplingOptions(temperature=0.7, top_p=0.9, top_k=5, logprobs=2, seed=1),
}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_broken_prompt_fails_and_the_others_keep_their_tokens(
    tmp_path: Path, depth: int, name: str
) -> None:
    tiny = TinyModel.build(tmp_path, "Llama", "float64")
    bench = ModelBench(
        tiny,
        "sarathi",
        Preemption.RECOMPUTE,
        blocks=90,
        block_size=4,
        budget=40,
        depth=depth,
        starts_ahead=depth == 2,
    )
    others = [bench.submit(9, 12, family=family, ignore_eos=True) for family in (2, 3)]
    bad = bench.submit(20, 12, family=1, sampling=OPTIONS[name])
    used = {
        token_id
        for rid in others
        for token_id in bench.submits[rid].executor.token_ids
        + tiny.outputs.of(bench.submits[rid])[0]
    }
    broken = next(
        token_id for token_id in bench.submits[bad].executor.token_ids if token_id not in used
    )
    with torch.no_grad():
        tiny.packed.model.get_input_embeddings().weight[broken] = torch.nan
    bench.finish(broken=True)
    assert bench.rejected == {bad: "not_finite"}
    assert bench.token_ids[bad] == []
    for rid in others:
        assert bench.token_ids[rid] == tiny.outputs.of(bench.submits[rid])[0]
    assert bench.scheduler.free_blocks == bench.scheduler.total_blocks


def test_a_surplus_token_after_the_end_of_an_output_cannot_fail_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel.build(tmp_path, "Llama", "float64")
    for family in range(40):
        bench = ModelBench(
            tiny,
            "sarathi",
            Preemption.RECOMPUTE,
            blocks=90,
            block_size=4,
            depth=2,
            starts_ahead=True,
        )
        rid = bench.submit(9, 16, family=family)
        ids, reason = tiny.outputs.of(bench.submits[rid])
        before = [*bench.submits[rid].executor.token_ids, *ids[:-1]]
        if reason == "stop" and ids[-1] not in before:
            break
    else:
        pytest.fail("no output ends with a token that occurs once")
    with torch.no_grad():
        tiny.packed.model.get_input_embeddings().weight[ids[-1]] = torch.nan
    compute, broken = tiny.packed.compute, []

    def note_broken(*arguments: Any) -> Any:
        logits = compute(*arguments)
        broken.append(not logits.isfinite().all())
        return logits

    monkeypatch.setattr(tiny.packed, "compute", note_broken)
    bench.finish()
    assert any(broken), "no surplus token was computed"
    assert bench.rejected == {}
    assert (bench.token_ids[rid], bench.finished) == (ids, {rid: "stop"})


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", OPTIONS)
def test_one_broken_logit_is_found_in_its_row_alone(name: str, value: float) -> None:
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(1))
    logits[1, 50] = value
    rows = [SampledRow(RequestSampling(OPTIONS[name]), 0) for _ in range(3)]
    assert [one.is_finite for one in Sampler().sample(logits, rows)] == [True, False, True]


def test_an_excluded_token_is_no_broken_logit() -> None:
    logits = torch.full((1, 97), -torch.inf)
    logits[0, 3] = 1.0
    (token,) = Sampler().sample(logits, [SampledRow(None, 0)])
    assert (token.token_id, token.is_finite) == (3, True)


def test_the_client_gets_a_server_error() -> None:
    error = rejection_error(Rejected(rid=0, reason="not_finite", detail="why"))
    assert (error.status, error.code, error.param) == (500, "logits_not_finite", None)
    assert (error.kind, error.message) == ("server_error", "why")
