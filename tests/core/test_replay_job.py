"""Messages between a coordinator and its replay pods survive the limits of Kubernetes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.replay_job import (
    ABResult,
    ReplayResult,
    decode_ab_result,
    decode_message,
    encode_message,
)
from goodput_core.slo.verdict import VerdictKind


@settings(max_examples=examples(30))
@given(st.sampled_from([*VerdictKind, None]), st.text(max_size=3000), st.integers(0, 10**9))
def test_a_result_is_decoded_from_its_termination_message(
    verdict: VerdictKind | None, sentence: str, good: int
) -> None:
    result = ReplayResult(verdict=verdict, reason="Attained", message=sentence, good=good)
    text = encode_message(result)
    assert len(text.encode()) <= 4096
    decoded = decode_message(text)
    assert decoded is not None
    assert sentence.startswith(decoded.message)
    assert (decoded.verdict, decoded.good) == (verdict, good)
    if len(sentence.encode()) < 500:
        assert decoded.message == sentence


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Killed",
        "{}",
        "[" * 100_000,
        '{"reason": "Attained", "message": 3}',
        '{"verdict": "OK"}',
    ],
    ids=["empty", "text", "no fields", "deep", "wrong type", "unknown verdict"],
)
def test_other_texts_are_no_result(text: str) -> None:
    assert decode_message(text) is None
    assert decode_ab_result(text) is None


def test_a_comparison_is_decoded_from_its_termination_message() -> None:
    result = ABResult(
        verdict=VerdictKind.FAIL, reason="WorseThanBaseline", message="−" * 5000, pairs=4
    )
    text = encode_message(result)
    assert len(text.encode()) <= 4096
    decoded = decode_ab_result(text)
    assert decoded is not None
    assert (decoded.verdict, decoded.pairs) == (VerdictKind.FAIL, 4)
    assert result.message.startswith(decoded.message)
