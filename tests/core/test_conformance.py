"""Token counts of responses whose sources contradict each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.records import finished_request

from goodput_core.slo.conformance import Deviation, count_tokens, describe_deviation
from goodput_core.slo.judging import (
    JudgementKind,
    MissReason,
    is_cut_by_client,
    judge,
    judge_favourably,
)
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_MS

EARLY, CUT = Deviation.ENDED_EARLY, Deviation.CUT_OFF
EXCEEDED, WRONG = Deviation.EXCEEDED_LIMIT, Deviation.WRONG_USAGE
NO_USAGE, SEVERAL = Deviation.NO_USAGE, Deviation.SEVERAL_TOKENS_PER_EVENT
UNREADABLE = Deviation.UNREADABLE_OUTPUT

# events, usage, at limit: tokens, most tokens, deviations; the output is pinned to 8 tokens.
PINNED = {
    "conforming": (8, 8, True, 8, 8, ()),
    "conforming, with stop as the reason": (8, 8, False, 8, 8, ()),
    "two tokens an event": (4, 8, True, 8, 8, (SEVERAL,)),
    "one event": (1, 8, True, 8, 8, (SEVERAL,)),
    "no usage": (8, None, True, 8, 8, (NO_USAGE,)),
    "no usage, two tokens an event": (4, None, True, 4, 8, (NO_USAGE,)),
    "no usage, ended early or two tokens an event": (4, None, False, 4, 8, (NO_USAGE,)),
    "usage ten times too high": (8, 80, True, 8, 8, (WRONG,)),
    "usage of 0": (8, 0, True, 8, 8, (WRONG,)),
    "usage of the last event only": (8, 1, True, 8, 8, (WRONG,)),
    "usage too high, two tokens an event": (4, 80, True, 4, 80, (WRONG,)),
    "usage of 0, two tokens an event": (4, 0, True, 4, 8, (WRONG,)),
    "ended early": (5, 5, False, 5, 5, (EARLY,)),
    "ended early, two tokens an event": (3, 5, False, 5, 5, (EARLY, SEVERAL)),
    "cut off": (5, 5, True, 5, 5, (CUT,)),
    "ended early, with a usage below the events": (5, 2, False, 2, 5, (EARLY, WRONG)),
    "a usage of one token has a TPOT": (5, 1, False, 2, 5, (EARLY, WRONG)),
    "more than the limit": (80, 80, True, 80, 80, (EXCEEDED,)),
    "more than the limit, two tokens an event": (40, 80, False, 80, 80, (EXCEEDED, SEVERAL)),
    "more than the limit, no usage": (80, None, False, 80, 80, (EXCEEDED, NO_USAGE)),
    "characters as events": (30, 8, True, 8, 30, (WRONG,)),
    "empty": (0, 0, False, 0, 0, (EARLY,)),
    "empty, no usage": (0, None, False, 0, 0, (EARLY, NO_USAGE)),
    "one token without text": (0, 1, False, 1, 1, (EARLY, UNREADABLE)),
    "tokens without text": (0, 8, True, 8, 8, (UNREADABLE,)),
    "tokens without text or usage": (0, None, True, 0, 0, (CUT, NO_USAGE, UNREADABLE)),
}


@pytest.mark.parametrize(
    ("events", "usage", "at_limit", "tokens", "most", "deviations"), PINNED.values(), ids=PINNED
)
def test_tokens_of_a_pinned_output_are_counted(
    events: int,
    usage: int | None,
    at_limit: bool,
    tokens: int,
    most: int,
    deviations: tuple[Deviation, ...],
) -> None:
    count = count_tokens(events, usage, limit=8, pinned=True, at_limit=at_limit)
    assert (count.tokens, count.most_tokens, count.deviations) == (tokens, most, deviations)


# events, usage, limit, at limit: tokens, most tokens, deviations
FREE = {
    "conforming": (5, 5, None, False, 5, 5, ()),
    "below its limit": (5, 5, 8, False, 5, 5, ()),
    "at its limit": (8, 8, 8, True, 8, 8, ()),
    "at a limit of the server": (5, 5, 8, True, 5, 5, ()),
    "two tokens an event": (3, 5, None, False, 5, 5, (SEVERAL,)),
    "no usage": (5, None, None, False, 5, 5, (NO_USAGE,)),
    "no usage, two tokens an event, at its limit": (4, None, 8, True, 4, 8, (NO_USAGE,)),
    "no usage, below its limit": (4, None, 8, False, 4, 4, (NO_USAGE,)),
    "a usage below the events": (5, 3, None, False, 3, 5, (WRONG,)),
    "a usage above the limit": (5, 9, 8, False, 5, 9, (WRONG,)),
    "more than the limit": (9, 9, 8, False, 9, 9, (EXCEEDED,)),
}


@pytest.mark.parametrize(
    ("events", "usage", "limit", "at_limit", "tokens", "most", "deviations"),
    FREE.values(),
    ids=FREE,
)
def test_tokens_of_an_output_without_a_required_length_are_counted(
    events: int,
    usage: int | None,
    limit: int | None,
    at_limit: bool,
    tokens: int,
    most: int,
    deviations: tuple[Deviation, ...],
) -> None:
    count = count_tokens(events, usage, limit=limit, pinned=False, at_limit=at_limit)
    assert (count.tokens, count.most_tokens, count.deviations) == (tokens, most, deviations)


UNFINISHED = Deviation.NO_FINISH_REASON
# events, usage, limit, pinned: deviations of an output without a finish reason
ENDLESS: dict[str, tuple[int, int | None, int | None, bool, tuple[Deviation, ...]]] = {
    "complete": (8, 8, 8, True, ()),
    "complete, no usage": (8, None, 8, True, (NO_USAGE,)),
    "interrupted": (3, 3, 8, True, (UNFINISHED,)),
    "interrupted, no usage": (3, None, 8, True, (UNFINISHED, NO_USAGE)),
    "interrupted before the first token": (0, None, 8, True, (UNFINISHED, NO_USAGE)),
    "interrupted, below its limit": (3, 3, 8, False, (UNFINISHED,)),
    "interrupted, without a limit": (3, 3, None, False, (UNFINISHED,)),
}


@pytest.mark.parametrize(
    ("events", "usage", "limit", "pinned", "deviations"), ENDLESS.values(), ids=ENDLESS
)
def test_an_output_without_a_finish_reason_before_its_limit_is_named(
    events: int,
    usage: int | None,
    limit: int | None,
    pinned: bool,
    deviations: tuple[Deviation, ...],
) -> None:
    count = count_tokens(events, usage, limit=limit, pinned=pinned, at_limit=False, finished=False)
    assert count.tokens == events
    assert count.deviations == deviations


COUNTS = st.integers(0, 50)


@given(
    events=COUNTS,
    usage=st.none() | COUNTS,
    limit=st.none() | st.integers(1, 50),
    pinned=st.booleans(),
    at_limit=st.booleans(),
)
def test_a_count_is_certain_or_has_a_deviation_that_leaves_doubt(
    events: int, usage: int | None, limit: int | None, pinned: bool, at_limit: bool
) -> None:
    count = count_tokens(
        events, usage, limit=limit, pinned=pinned and limit is not None, at_limit=at_limit
    )
    assert min(events, 2) <= count.tokens <= count.most_tokens
    if count.tokens < count.most_tokens:
        assert any(deviation.leaves_doubt for deviation in count.deviations)


@given(
    length=st.integers(1, 50),
    per_event=st.integers(1, 60),
    usage=st.sampled_from(["right", "none", "zero", "too high"]),
    wanted=st.integers(1, 50),
    obeys=st.booleans(),
)
def test_the_true_number_of_tokens_is_possible_for_any_server_that_stops_at_the_limit(
    length: int, per_event: int, usage: str, wanted: int, obeys: bool
) -> None:
    true = wanted if obeys else min(length, wanted)
    reported = {"right": true, "none": None, "zero": 0, "too high": wanted + true}[usage]
    events = -(-true // per_event)
    count = count_tokens(
        events, reported, limit=wanted, pinned=True, at_limit=obeys or length >= wanted
    )
    assert count.tokens <= true <= count.most_tokens
    if usage == "right":
        assert count.tokens == count.most_tokens == true


@pytest.mark.parametrize("deviation", list(Deviation))
def test_every_deviation_is_described_with_its_count(deviation: Deviation) -> None:
    assert describe_deviation(deviation, 7).startswith("7 ")


TARGETS = Targets(ttft_ns=500 * NS_PER_MS, tpot_ns=50 * NS_PER_MS)


def deviating(deviation: Deviation, **fields: object) -> RequestRecord:
    return replace(finished_request(**fields), deviations=(deviation,))  # type: ignore[arg-type]


JUDGED = {
    "a short output": (
        deviating(EARLY, tokens=5, pinned_output_tokens=8),
        (MissReason.SHORT,),
        (),
    ),
    "a short and late output": (
        deviating(EARLY, tokens=5, ttft_ms=600, pinned_output_tokens=8),
        (MissReason.TTFT, MissReason.SHORT),
        (MissReason.TTFT,),
    ),
    "four events of eight tokens": (
        deviating(NO_USAGE, tokens=4, tpot_ms=60, pinned_output_tokens=8, most_output_tokens=8),
        (MissReason.TPOT, MissReason.SHORT),
        (),
    ),
    "four slow events of eight tokens": (
        deviating(NO_USAGE, tokens=4, tpot_ms=200, pinned_output_tokens=8, most_output_tokens=8),
        (MissReason.TPOT, MissReason.SHORT),
        (MissReason.TPOT,),
    ),
    "an output beyond its limit": (
        deviating(EXCEEDED, tokens=80, tpot_ms=60, pinned_output_tokens=8),
        (MissReason.TPOT,),
        (),
    ),
    "no output at all": (
        deviating(EARLY, tokens=1, first_token_ns=None, last_token_ns=None, pinned_output_tokens=8),
        (MissReason.TTFT, MissReason.SHORT),
        (),
    ),
    "an output in unknown fields": (
        deviating(UNREADABLE, tokens=8, first_token_ns=None, last_token_ns=None),
        (MissReason.TTFT,),
        (),
    ),
    "no stream": (
        deviating(Deviation.NOT_STREAMED, outcome=Outcome.ERROR),
        (MissReason.ERROR,),
        (),
    ),
    "an error in the stream": (
        deviating(Deviation.ERROR_IN_STREAM, outcome=Outcome.ERROR),
        (MissReason.ERROR,),
        (MissReason.ERROR,),
    ),
    "several tokens an event": (
        deviating(SEVERAL, tpot_ms=60),
        (MissReason.TPOT,),
        (MissReason.TPOT,),
    ),
}


@pytest.mark.parametrize(("record", "strict", "favourable"), JUDGED.values(), ids=JUDGED)
def test_a_deviating_response_is_judged_both_ways(
    record: RequestRecord, strict: tuple[MissReason, ...], favourable: tuple[MissReason, ...]
) -> None:
    assert judge(record, TARGETS).reasons == strict
    favoured = judge_favourably(record, TARGETS)
    assert favoured.reasons == favourable
    assert favoured.kind is (JudgementKind.MISSED if favourable else JudgementKind.ATTAINED)
    assert judge_favourably(record, Targets()).kind is JudgementKind.UNJUDGED


def timed_out(ms: int, *, ttft_ms: int | None = 100, **fields: Any) -> RequestRecord:
    """Return a request whose response the client ended after `ms`."""
    record = finished_request(ttft_ms=ttft_ms or 0, outcome=Outcome.TIMEOUT, **fields)
    record = replace(record, end_ns=ms * NS_PER_MS)
    return record if ttft_ms is not None else replace(record, first_token_ns=None)


# Targets: TTFT 500 ms, TPOT 50 ms.
TIMED_OUT = {
    "no token before the TTFT target": (timed_out(400, ttft_ms=None), True),
    "no token after the TTFT target": (timed_out(600, ttft_ms=None), False),
    "a late first token": (timed_out(700, ttft_ms=600), False),
    "enough time for the pinned tokens": (timed_out(300, pinned_output_tokens=60), True),
    "too little time for the pinned tokens": (timed_out(700, pinned_output_tokens=10), False),
    "the next token can still be in time": (timed_out(340, tokens=5), True),
    "the next token is late": (timed_out(400, tokens=5), False),
    "it ended by itself": (finished_request(), False),
}


@pytest.mark.parametrize(("record", "is_cut"), TIMED_OUT.values(), ids=TIMED_OUT)
def test_a_time_limit_shorter_than_the_targets_leaves_doubt(
    record: RequestRecord, is_cut: bool
) -> None:
    assert is_cut_by_client(record, TARGETS) is is_cut
    favoured, strict = judge_favourably(record, TARGETS), judge(record, TARGETS)
    assert favoured.kind is (JudgementKind.ATTAINED if is_cut else strict.kind)
    if record.outcome is Outcome.TIMEOUT:
        assert strict.reasons == (MissReason.TIMEOUT,)
    assert not is_cut_by_client(record, Targets())


@given(
    deviations=st.lists(st.sampled_from(Deviation), unique=True, max_size=3),
    outcome=st.sampled_from(Outcome),
    tokens=st.integers(0, 20),
    more=st.integers(0, 20),
    tpot_ms=st.integers(0, 100),
    ttft_ms=st.integers(0, 1000),
)
def test_doubts_decided_in_favour_never_add_a_miss(
    deviations: list[Deviation],
    outcome: Outcome,
    tokens: int,
    more: int,
    tpot_ms: int,
    ttft_ms: int,
) -> None:
    record = finished_request(
        tokens=max(1, tokens), tpot_ms=tpot_ms, ttft_ms=ttft_ms, outcome=outcome,
        deviations=tuple(deviations), most_output_tokens=max(1, tokens) + more,
        pinned_output_tokens=10,
    )  # fmt: skip
    strict, favoured = judge(record, TARGETS), judge_favourably(record, TARGETS)
    unexplained = {Deviation.UNKNOWN_FINISH_REASON, Deviation.NO_FINISH_REASON}
    most = strict
    if outcome is Outcome.ERROR:
        assert strict.reasons == (MissReason.ERROR,)
        if not unexplained.isdisjoint(deviations):
            # It is judged as one that did not fail.
            most = judge(replace(record, outcome=Outcome.OK), TARGETS)
    assert set(favoured.reasons) <= set(most.reasons)
    if not deviations and outcome is not Outcome.TIMEOUT:
        assert favoured == strict
