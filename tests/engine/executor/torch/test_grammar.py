"""Outputs with a grammar: each is valid, whatever the other requests and the scheduler do."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import jsonschema
import torch
from tests.builders.torch_models import ModelBench, Outputs, TinyModel, make_folder
from tests.engine.server.test_real_text import VOCABULARY, make_tokenizer
from tokenizers import Tokenizer, decoders

from goodput_core.spec.choices import Preemption
from goodput_engine.executor.torch.grammar import Grammars
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.grammars import grammar_problem, json_grammar
from goodput_engine.messages import SamplingOptions

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

SCHEMAS: list[dict[str, Any]] = [
    {"enum": ["quick", "brown", "fox"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"const": "the"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
]
GRAMMARS = [json_grammar(json.dumps(schema)) for schema in SCHEMAS]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarModel:
    """A tiny model with a tokenizer."""

    model: TinyModel
    grammars: Grammars
    tokenizer: Tokenizer

    def bench(self, policy: str, preemption: Preemption, **options: Any) -> ModelBench:
        settings = {"blocks": 28, "block_size": 4, **options}
        return ModelBench(self.model, policy, preemption, grammars=self.grammars, **settings)

    def text(self, bench: ModelBench, rid: int) -> str:
        """Return the text of an output, without the token that ended it."""
        stops = self.model.packed.stop_ids
        return self.tokenizer.decode([one for one in bench.token_ids[rid] if one not in stops])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GrammarModel:
    """A model whose logits have more rows than its tokenizer has tokens."""
    # The tokens 0 and 1 have no text.
    folder = make_folder(
        tmp_path_factory.mktemp("tiny"), "Llama", vocab_size=VOCABULARY, eos_token_id=[0, 1]
    )
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    packed = load_model(folder, dtype="float64")
    grammars = Grammars(
        folder / "tokenizer.json", vocab_size=packed.vocab_size, stop_ids=packed.stop_ids
    )
    outputs = Outputs(folder, "float64")
    return GrammarModel(
        model=TinyModel(packed=packed, outputs=outputs), grammars=grammars, tokenizer=tokenizer
    )


def sampled(seed: int, temperature: float = 1.0) -> SamplingOptions:
    return SamplingOptions(temperature=temperature, seed=seed)


@pytest.mark.parametrize("preemption", list(Preemption))
@pytest.mark.parametrize("depth", [0, 2])
def test_outputs_are_valid_and_the_same_alone_and_in_a_crowd(
    model: GrammarModel, preemption: Preemption, depth: int
) -> None:
    rng = random.Random(depth)
    bench = model.bench("vllm", preemption, depth=depth, budget=16)
    alone = model.bench("vllm", preemption, blocks=200)
    with torch.random.fork_rng():
        rids = {}
        for seed in range(24):
            kind, length = seed % len(SCHEMAS), rng.randint(1, 30)
            for one in (bench, alone):
                rids[seed] = one.submit(
                    length, 80, family=seed, sampling=sampled(seed), grammar=GRAMMARS[kind]
                )
            if rng.random() < 0.3:
                free = bench.submit(length, 20, family=seed, sampling=sampled(seed))
                alone.submit(length, 20, family=seed, sampling=sampled(seed))
                if rng.random() < 0.5:
                    bench.step()
                    bench.cancel(free)
            bench.step()
        bench.finish()
        alone.finish()
    assert not bench.rejected
    assert bench.scheduler.stats.preemptions > 0
    complete = 0
    for seed, rid in rids.items():
        assert bench.token_ids[rid] == alone.token_ids[rid]
        if bench.finished[rid] == "stop":
            complete += 1
            value = json.loads(model.text(bench, rid))
            jsonschema.validate(value, SCHEMAS[seed % len(SCHEMAS)])
    assert complete >= 20


def test_a_complete_output_ends_although_the_end_is_ignored_or_too_early(
    model: GrammarModel,
) -> None:
    bench = model.bench("vllm", Preemption.RECOMPUTE)
    ignored = bench.submit(5, 80, ignore_eos=True, grammar=GRAMMARS[0])
    early = bench.submit(5, 80, min_tokens=60, grammar=GRAMMARS[0])
    bench.finish()
    for rid in (ignored, early):
        assert bench.finished[rid] == "stop"
        assert json.loads(model.text(bench, rid)) in SCHEMAS[0]["enum"]


def test_an_output_continues_as_long_as_it_can_if_the_end_is_ignored(model: GrammarModel) -> None:
    digits = json_grammar('{"type": "integer"}')
    bench = model.bench("vllm", Preemption.RECOMPUTE, blocks=100)
    rids = [
        bench.submit(4, 30, family=seed, ignore_eos=True, sampling=sampled(seed), grammar=digits)
        for seed in range(6)
    ]
    bench.finish()
    assert {bench.finished[rid] for rid in rids} <= {"length", "stop"}
    assert any(len(bench.token_ids[rid]) == 30 for rid in rids)


def test_an_output_that_the_parser_gives_up_fails_alone(model: GrammarModel) -> None:
    bench = model.bench("vllm", Preemption.RECOMPUTE)
    bad = bench.submit(4, 20, grammar="start: /[/")
    good = bench.submit(4, 80, sampling=sampled(1), grammar=GRAMMARS[2])
    bench.finish()
    assert bench.rejected == {bad: "invalid"}
    assert bench.token_ids[bad] == []
    assert 10 <= int(model.text(bench, good)) <= 99


class _PanicError(BaseException):
    """As the class that llguidance raises for an error in its own code."""


def _failed(*arguments: str) -> Future[Any]:
    state: Future[Any] = Future()
    state.set_exception(_PanicError(*arguments))
    return state


def _broken() -> Future[Any]:
    state: Future[Any] = Future()
    state.set_result(object())  # has none of the methods
    return state


@pytest.mark.parametrize(
    "state",
    [_failed("a panic"), _failed(), _broken()],
    ids=["compilation", "no message", "mask"],
)
@pytest.mark.parametrize("steps", [0, 1], ids=["at the start", "later"])
def test_any_exception_of_a_grammar_fails_its_request_only(
    model: GrammarModel, state: Future[Any], steps: int
) -> None:
    bench = model.bench("vllm", Preemption.RECOMPUTE)
    alone = model.bench("vllm", Preemption.RECOMPUTE)
    for one in (bench, alone):
        one.submit(4, 80, sampling=sampled(1), grammar=GRAMMARS[2])
    bad = bench.submit(4, 80, sampling=sampled(2), grammar=GRAMMARS[1])
    grammar = bench.executor._sequences[bad].grammar
    assert grammar is not None
    for _ in range(steps):
        bench.step()
    grammar._compiled = state
    assert not grammar.append(7)
    del grammar
    bench.finish()
    alone.finish()
    assert bench.rejected == {bad: "invalid"}
    assert bench.token_ids[0] == alone.token_ids[0]
    assert bench.finished == alone.finished


def test_a_tokenizer_that_no_grammar_knows_fails_only_requests_with_a_grammar(
    model: GrammarModel, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    packed = model.model.packed
    grammars = Grammars(
        tmp_path / "tokenizer.json", vocab_size=packed.vocab_size, stop_ids=packed.stop_ids
    )
    assert "decoder type" in grammars.problem()
    assert not model.grammars.problem()
    bench = ModelBench(
        model.model, "vllm", Preemption.RECOMPUTE, blocks=28, block_size=4, grammars=grammars
    )
    bad = bench.submit(4, 20, grammar=GRAMMARS[2])
    free = bench.submit(4, 20)
    bench.finish()
    assert bench.rejected == {bad: "invalid"}
    assert bench.finished.keys() == {free}


def test_logits_that_are_not_finite_do_not_blame_the_grammar(model: GrammarModel) -> None:
    bench = model.bench("vllm", Preemption.RECOMPUTE)
    bad = bench.submit(4, 20, grammar=GRAMMARS[2])
    weights = model.model.packed.model.get_input_embeddings().weight
    with torch.no_grad():
        row = weights[bench.submits[bad].executor.token_ids[0]]
        before = row.clone()
        row.fill_(torch.nan)
        try:
            bench.finish(broken=True)
        finally:
            row.copy_(before)
    assert bench.rejected == {bad: "not_finite"}
    assert bench.token_ids[bad] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"uniqueItems": True}, "Unimplemented keys"),
        ({"$ref": "#/none"}, "does not exist"),
        ({"$ref": "http://127.0.0.1:9/x"}, "retrieving it failed"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ],
    ids=["type", "keyword", "reference", "remote", "pattern"],
)
def test_a_schema_that_cannot_be_compiled_is_named(schema: dict[str, Any], message: str) -> None:
    problem = grammar_problem(json_grammar(json.dumps(schema)))
    assert problem is not None
    assert message in problem
