"""Sampled tokens have the distribution of the options, and do not depend on other rows."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

torch = pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import transformers
from scipy import stats
from tests.builders.queued_downloads import QueuedDownloads

from goodput_engine.executor.torch.penalties import PenaltyCounts, rows_at_once
from goodput_engine.executor.torch.sampling import (
    RequestSampling,
    SampledRow,
    Sampler,
    _gumbel_log,
    _mix_32,
    _mix_64,
    _signed,
)
from goodput_engine.messages import SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    MakeSampler = Callable[[], Sampler]

pytestmark = pytest.mark.torch

ERROR_RATE = 1e-5
"""Probability that a test of a distribution fails although the code is right, for other seeds."""


def without_waiting() -> Sampler:
    """Return a sampler that does not read from the device, like that of a GPU."""
    return Sampler(QueuedDownloads())


on_each_device = pytest.mark.parametrize(
    "make_sampler", [Sampler, without_waiting], ids=["reading", "not reading"]
)


def make_logits(vocabulary: int, *, spread: float = 2.0, seed: int = 3, rows: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * spread


def state(options: SamplingOptions, prompt: Iterable[int] = (), output: Iterable[int] = ()) -> Any:
    sampling = RequestSampling(options, prompt)
    for token_id in output:
        sampling.append(token_id)
    return sampling


def reference(options: SamplingOptions, logits: Any, prompt: list[int], output: list[int]) -> Any:
    """Return logits `[vocabulary]` in float64 as transformers changes them; -inf is excluded."""
    seen = torch.tensor([[*prompt, *output]], dtype=torch.long)
    scores = logits.double()[None]
    if options.repetition_penalty != 1 and seen.numel():
        scores = transformers.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)(
            seen, scores
        )
    for token_id in output:
        scores[0, token_id] -= options.frequency_penalty
    for token_id in set(output):
        scores[0, token_id] -= options.presence_penalty
    for token_id, bias in options.logit_bias.items():
        scores[0, token_id] += bias
    scores = transformers.TemperatureLogitsWarper(options.temperature)(seen, scores)
    if options.top_k:
        scores = transformers.TopKLogitsWarper(options.top_k)(seen, scores)
    if options.top_p < 1:
        scores = transformers.TopPLogitsWarper(options.top_p)(seen, scores)
    if options.min_p:
        scores = transformers.MinPLogitsWarper(options.min_p)(seen, scores)
    return scores[0]


def noise(options: SamplingOptions, position: int, vocabulary: int) -> Any:
    """Return the Gumbel noise of each token."""
    hashes = _mix_32(torch.arange(1, vocabulary + 1, dtype=torch.int32) * -1640531527, 0)
    key = _mix_64(_mix_64(options.seed % 2**64) + position)
    keys = torch.tensor([[_signed(key & 0xFFFFFFFF), _signed(key >> 32)]], dtype=torch.int32)
    return -_gumbel_log(hashes, keys)[0]


DISTRIBUTIONS = {
    "temperature 1": SamplingOptions(temperature=1.0),
    "a low temperature": SamplingOptions(temperature=0.4),
    "a high temperature": SamplingOptions(temperature=1.9),
    "top-k": SamplingOptions(temperature=1.0, top_k=7),
    "top-p": SamplingOptions(temperature=1.3, top_p=0.8),
    "min-p": SamplingOptions(temperature=1.0, min_p=0.05),
    "all limits": SamplingOptions(temperature=1.5, top_k=20, top_p=0.9, min_p=0.03),
    "penalties": SamplingOptions(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.5
    ),
    "a bias": SamplingOptions(temperature=1.0, logit_bias={3: 2.5, 4: -100.0}),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("varies", ["position", "seed"])
def test_tokens_have_the_distribution_of_the_options(name: str, varies: str) -> None:
    options = DISTRIBUTIONS[name]
    vocabulary, draws, prompt, output = 60, 20_000, [1, 2, 2, 5], [5, 9, 9, 9]
    logits = make_logits(vocabulary)
    sampler, rows = Sampler(), []
    for draw in range(draws):
        if varies == "seed":
            changed = SamplingOptions(**{**_fields(options), "seed": draw})
            rows.append(SampledRow(state(changed, prompt, output), 9))
        else:
            sampling = rows[0].sampling if rows else state(options, prompt, output)
            rows.append(SampledRow(sampling, draw))
    tokens = sampler.sample(logits.expand(draws, -1).clone(), rows)
    counts = torch.bincount(torch.tensor([one.token_id for one in tokens]), minlength=vocabulary)
    expected = reference(options, logits[0], prompt, output).softmax(-1) * draws
    assert counts[expected == 0].sum() == 0, "excluded tokens are never sampled"
    frequent = expected >= 5
    rest = float(expected[~frequent].sum())
    observed = [*counts[frequent].tolist(), int(counts[~frequent].sum())]
    wanted = [*expected[frequent].tolist(), rest]
    if rest < 5:
        observed, wanted = (
            observed[:-1],
            [one * sum(observed[:-1]) / sum(wanted[:-1]) for one in wanted[:-1]],
        )
    assert stats.chisquare(observed, wanted).pvalue > ERROR_RATE


def _fields(options: SamplingOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__struct_fields__}


def test_rows_of_several_groups_have_penalties_of_their_own() -> None:
    """The logits of five of these rows fit into the cache of a CPU."""
    logits = make_logits(49_152, rows=13)
    assert rows_at_once(logits) == 5
    rows = []
    for at in range(len(logits)):
        options = SamplingOptions(
            temperature=1.0,
            repetition_penalty=1 + at / 10,
            presence_penalty=at / 20,
            frequency_penalty=at % 4 / 4,
        )
        rows.append(SampledRow(state(options, range(at), [at, 7, 7]), 20 + at))
    rows[6] = SampledRow(None, 26)
    together, alone = logits.clone(), logits.clone()
    PenaltyCounts().apply(together, rows)
    for at, row in enumerate(rows):
        PenaltyCounts().apply(alone[at : at + 1], [row])
    assert torch.equal(together, alone)
    assert [at for at in range(13) if torch.equal(alone[at], logits[at])] == [0, 6], (
        "without a penalty"
    )


def test_a_large_vocabulary_is_sampled_evenly() -> None:
    vocabulary, draws, bins = 49_152, 4_096, 64
    logits = torch.zeros(64, vocabulary)
    sampler, sampling = Sampler(), state(SamplingOptions(temperature=1.0, seed=5))
    found: list[int] = []
    for start in range(0, draws, 64):
        rows = [SampledRow(sampling, position) for position in range(start, start + 64)]
        found += [one.token_id for one in sampler.sample(logits.clone(), rows)]
    ids = torch.tensor(found)
    for group in (ids % bins, ids // (vocabulary // bins)):
        counts = torch.bincount(group, minlength=bins).tolist()
        assert stats.chisquare(counts).pvalue > ERROR_RATE
    assert len(set(found)) > draws * 0.9


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0, seed=5),
        SamplingOptions(temperature=1.0, seed=5, min_p=0.4),
        SamplingOptions(temperature=1.0, seed=5, top_p=0.9),
        SamplingOptions(temperature=1.0, seed=5, top_k=2),
    ],
    ids=["temperature", "min-p", "top-p", "top-k"],
)
@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "masked"])
def test_the_extreme_hashes_of_a_large_vocabulary_select_no_token(
    options: SamplingOptions, is_masked: bool
) -> None:
    # Of the 49,152 hashes at positions 7,214 and 7,303, one is the least int32 or close to it.
    vocabulary, likely, positions = 49_152, 7, range(7_200, 7_328)
    logits = torch.zeros(len(positions), vocabulary)
    logits[:, likely] = 40
    allowed = None
    if is_masked:
        allowed = np.zeros(vocabulary // 32, dtype=np.int32)
        allowed[0] = 0b1111 << 6
    sampling = state(options)
    rows = [SampledRow(sampling, position, allowed=allowed) for position in positions]
    found = {one.token_id for one in Sampler().sample(logits, rows)}
    assert found == {likely}


def test_successive_tokens_are_independent() -> None:
    logits = torch.zeros(10_001, 4)
    sampling = state(SamplingOptions(temperature=1.0))
    rows = [SampledRow(sampling, position) for position in range(10_001)]
    found = [one.token_id for one in Sampler().sample(logits, rows)]
    pairs = [4 * one + other for one, other in pairwise(found)]
    counts = torch.bincount(torch.tensor(pairs), minlength=16).tolist()
    assert stats.chisquare(counts).pvalue > ERROR_RATE


_OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.floats(0.2, 2.0),
    top_k=st.sampled_from([0, 0, 1, 5, 300, 5_000]),
    top_p=st.sampled_from([1.0, 0.0, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, 40), st.floats(-5, 5), max_size=3),
)


@on_each_device
@settings(deadline=None, max_examples=examples(40))
@given(
    options=_OPTIONS,
    vocabulary=st.sampled_from([41, 300, 5_000]),
    spread=st.sampled_from([0.1, 2.0, 6.0]),
    prompt=st.lists(st.integers(0, 40), max_size=6),
    output=st.lists(st.integers(0, 40), max_size=80),
    position=st.integers(0, 2**20),
)
def test_a_token_is_that_of_the_logits_of_transformers(
    make_sampler: MakeSampler,
    options: SamplingOptions,
    vocabulary: int,
    spread: float,
    prompt: list[int],
    output: list[int],
    position: int,
) -> None:
    logits = make_logits(vocabulary, spread=spread, seed=position % 97)
    row = SampledRow(state(options, prompt, output), position)
    (token,) = make_sampler().sample(logits.clone(), [row])
    scores = reference(options, logits[0], prompt, output) + noise(options, position, vocabulary)
    best = float(scores.max())
    # In single precision, two nearly equal scores may change places.
    assert float(scores[token.token_id]) >= best - 1e-4 * max(1.0, abs(best))


@on_each_device
@settings(deadline=None, max_examples=examples(25))
@given(
    rows=st.lists(
        st.tuples(st.one_of(st.none(), _OPTIONS), st.integers(0, 500)), min_size=1, max_size=9
    ),
    logprobs=st.lists(st.sampled_from([None, 0, 3]), min_size=9, max_size=9),
    vocabulary=st.sampled_from([41, 700]),
)
def test_a_row_does_not_depend_on_the_others(
    make_sampler: MakeSampler,
    rows: list[tuple[SamplingOptions | None, int]],
    logprobs: list[int | None],
    vocabulary: int,
) -> None:
    logits = make_logits(vocabulary, rows=len(rows))

    def row(at: int) -> SampledRow:
        options, position = rows[at]
        if options is None:
            return SampledRow(None, position, frozenset({3} if position % 2 else ()))
        changed = SamplingOptions(**{**_fields(options), "logprobs": logprobs[at]})
        return SampledRow(state(changed, [1, 2], [2, 7]), position, frozenset({5, 6}))

    together = make_sampler().sample(logits.clone(), [row(at) for at in range(len(rows))])
    for at, token in enumerate(together):
        (alone,) = make_sampler().sample(logits[at : at + 1].clone(), [row(at)])
        assert alone.token_id == token.token_id
        assert (alone.logprobs is None) == (token.logprobs is None)
        if alone.logprobs is not None and token.logprobs is not None:
            assert alone.logprobs.top_ids == token.logprobs.top_ids
            assert alone.logprobs.logprob == pytest.approx(token.logprobs.logprob, abs=1e-5)


@settings(deadline=None, max_examples=examples(40))
@given(
    rows=st.lists(st.tuples(_OPTIONS, st.integers(0, 500)), min_size=1, max_size=4),
    vocabulary=st.sampled_from([41, 300, 5_000]),
    spread=st.sampled_from([0.1, 2.0, 6.0]),
    step=st.sampled_from([0.0, 1.0]),
)
def test_a_sampler_that_does_not_read_from_the_device_samples_the_same_tokens(
    rows: list[tuple[SamplingOptions, int]], vocabulary: int, spread: float, step: float
) -> None:
    logits = make_logits(vocabulary, spread=spread, rows=len(rows))
    if step:  # many equal logits, also across the bounds of top-k and top-p
        logits = (logits / step).round() * step
    sampled = [SampledRow(state(options, [1, 2], [2, 7]), at) for options, at in rows]
    expected = Sampler().sample(logits.clone(), sampled)
    assert without_waiting().sample(logits.clone(), sampled) == expected


@on_each_device
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [0, 1, 5, 60, 99])
def test_log_probabilities_are_those_of_the_model(
    make_sampler: MakeSampler, temperature: float, count: int
) -> None:
    options = SamplingOptions(
        temperature=temperature,
        logprobs=count,
        top_k=3,
        repetition_penalty=1.5,
        logit_bias={1: 9.0},
    )
    logits = make_logits(60, rows=4)
    expected = logits.double().log_softmax(-1)
    rows = [SampledRow(state(options, [2], [3]), at) for at in range(4)]
    for at, token in enumerate(make_sampler().sample(logits.clone(), rows)):
        assert token.logprobs is not None
        own = expected[at, token.token_id]
        assert token.logprobs.logprob == pytest.approx(float(own), abs=1e-5)
        top = expected[at].topk(min(count, 60))
        assert token.logprobs.top_ids == top.indices.tolist()
        assert token.logprobs.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)


@on_each_device
@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(logprobs=1),
        SamplingOptions(temperature=1e-9),
        SamplingOptions(temperature=2.0, top_k=1),
        SamplingOptions(temperature=2.0, top_p=0.0),
        SamplingOptions(temperature=2.0, min_p=1.0),
    ],
    ids=str,
)
def test_limits_to_one_token_give_the_most_probable(
    make_sampler: MakeSampler, options: SamplingOptions
) -> None:
    logits = make_logits(1_000, rows=5)
    tokens = make_sampler().sample(
        logits.clone(), [SampledRow(state(options), at) for at in range(5)]
    )
    assert [one.token_id for one in tokens] == logits.argmax(-1).tolist()


@on_each_device
@pytest.mark.parametrize("size", [250, 300, 5_000])
def test_equally_probable_tokens_are_kept_together(make_sampler: MakeSampler, size: int) -> None:
    """The bound lies within a plateau, which is longer than the first prefixes."""
    logits = torch.zeros(1, 6_000)
    logits[0, :size] = 3.0
    sampling = state(SamplingOptions(temperature=1.0, top_k=9))
    rows = [SampledRow(sampling, position) for position in range(200)]
    found = {one.token_id for one in make_sampler().sample(logits.expand(200, -1).clone(), rows)}
    assert max(found) < size
    assert len(found) > 100


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_banned_tokens_are_not_sampled(temperature: float) -> None:
    logits = make_logits(20)
    banned = logits[0].topk(12).indices.tolist()
    sampling = state(SamplingOptions(temperature=temperature))
    rows = [SampledRow(sampling, position, frozenset(banned)) for position in range(100)]
    tokens = Sampler().sample(logits.expand(100, -1).clone(), rows)
    assert {one.token_id for one in tokens}.isdisjoint(banned)


@on_each_device
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_invalid_logits_of_one_row_do_not_change_another(
    make_sampler: MakeSampler, value: float
) -> None:
    options = [
        SamplingOptions(temperature=1.0, logprobs=2),
        SamplingOptions(temperature=1.0, top_p=0.9),
        SamplingOptions(temperature=1.0, min_p=0.1),
    ]
    rows = [SampledRow(state(one), 4) for one in options for _ in range(2)]
    logits = make_logits(300, rows=6)
    valid = make_sampler().sample(logits.clone(), rows)
    logits[::2] = value
    tokens = make_sampler().sample(logits.clone(), rows)
    assert [one.token_id for one in tokens[1::2]] == [one.token_id for one in valid[1::2]]
    assert all(0 <= one.token_id < 300 for one in tokens)


def test_sixteen_bit_logits_are_sampled_in_single_precision() -> None:
    logits = make_logits(100).bfloat16()
    rows = [SampledRow(state(SamplingOptions(temperature=1.0)), 4)]
    (token,) = Sampler().sample(logits.clone(), rows)
    (expected,) = Sampler().sample(logits.float(), rows)
    assert token == expected
