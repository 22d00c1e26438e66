"""When tokens are due, and when a promise is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.slo.targets import Targets
from goodput_engine.scheduler.policies.slo.deadline import NEVER_NS, has_missed, next_due_ns
from goodput_engine.scheduler.request_table import ScheduledRequest


def _request(
    *,
    ttft: int | None = None,
    tpot: int | None = None,
    e2e: int | None = None,
    first: int = 0,
) -> ScheduledRequest:
    return ScheduledRequest(
        rid=1,
        arrival_ns=1000,
        input_tokens=10,
        targets=Targets(ttft_ns=ttft, tpot_ns=tpot, e2e_ns=e2e),
        first_token_ns=first,
    )


@pytest.mark.parametrize(
    ("request_", "sampled", "due_ns"),
    [
        (_request(ttft=500), 0, 1500),
        (_request(), 0, NEVER_NS),
        (_request(tpot=50, first=1200), 3, 1350),
        (_request(tpot=50), 1, 2050),
        (_request(ttft=500, e2e=300), 0, 1300),
        (_request(tpot=50, e2e=300, first=1200), 9, 1300),
        (_request(ttft=500, first=1200), 3, NEVER_NS),
    ],
    ids=[
        "the first token by TTFT",
        "nothing promised",
        "the fourth token three TPOTs after the first",
        "the first token is in flight",
        "the end by E2E before TTFT",
        "the end by E2E before TPOT",
        "no TPOT promised",
    ],
)
def test_the_next_token_is_due(request_: ScheduledRequest, sampled: int, due_ns: int) -> None:
    assert next_due_ns(request_, sampled, now_ns=2000) == due_ns


@given(gaps=st.lists(st.integers(0, 100), min_size=1, max_size=20), tpot=st.integers(1, 60))
def test_tokens_in_time_keep_the_mean_whenever_the_answer_ends(gaps: list[int], tpot: int) -> None:
    request = _request(tpot=tpot, first=1200)
    now_ns, held = 1200, True
    for sampled, gap in enumerate(gaps, start=1):
        due_ns = next_due_ns(request, sampled, now_ns)
        now_ns += gap
        held = now_ns <= due_ns
        assert held == ((now_ns - 1200) / sampled <= tpot)


@pytest.mark.parametrize(
    ("request_", "sampled", "now_ns", "missed"),
    [
        (_request(ttft=500), 0, 1500, False),
        (_request(ttft=500), 0, 1501, True),
        (_request(ttft=500, first=1501), 5, 1502, True),
        (_request(ttft=500, first=1499), 5, 9999, False),
        (_request(e2e=300), 4, 1301, True),
        (_request(tpot=50, first=1200), 2, 1300, False),
        (_request(tpot=50, first=1200), 2, 1700, False),
        (_request(tpot=50, first=1200), 2, 1701, True),
    ],
    ids=[
        "its TTFT is now",
        "its TTFT was",
        "its first token was late",
        "its first token was in time",
        "its end was due",
        "on schedule",
        "ten tokens at 10 ns make up for 400 ns",
        "and for no more",
    ],
)
def test_a_promise_is_missed_when_nothing_can_keep_it(
    request_: ScheduledRequest, sampled: int, now_ns: int, *, missed: bool
) -> None:
    left = 10.0
    assert has_missed(request_, sampled, now_ns, tokens_left=lambda _: left, token_ns=10) is missed
