"""The share of tokens that may differ from the model's own in chats over HTTP."""

from __future__ import annotations

import pytest
from benchmarks.real_chats import ChatCheck


@pytest.mark.parametrize(
    ("tokens", "ties", "passed"),
    [(6_400, 0, True), (6_400, 1, False), (9_999, 1, False), (10_000, 1, True), (20_000, 3, False)],
)
def test_at_most_one_token_in_ten_thousand_may_be_a_tie(
    tokens: int, ties: int, passed: bool
) -> None:
    check = ChatCheck(tokens=tokens, ties=ties, wrong=0, other_prompts=0, other_texts=0)
    assert check.passed is passed


@pytest.mark.parametrize("field", ["wrong", "other_prompts", "other_texts"])
def test_other_differences_are_never_allowed(field: str) -> None:
    counts = {"wrong": 0, "other_prompts": 0, "other_texts": 0, field: 1}
    assert not ChatCheck(tokens=1_000_000, ties=0, **counts).passed
