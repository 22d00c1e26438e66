"""The first requests of a run decide neither its validity nor its limit of the send lag."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.records import finished_request
from tests.builders.sessions import plan_of_rows, session_row
from tests.replay.conftest import INFO, SLO, write_run

from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.live.page import LivePage
from goodput_replay.live.summary import summarise_so_far
from goodput_replay.live.tally import LiveTally, LiveWindow, RunProgress
from goodput_replay.plan import survey
from goodput_replay.shares import Share
from goodput_replay.statistics.evidence import EvidenceTally

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.slo.record import RequestRecord

WINDOW = LiveWindow(slo=SLO, start_ns=0, length_ns=300 * NS_PER_S, confidence=0.95)
LATE = replace(finished_request(lag_ms=60), slo_class="interactive")
REJECTED = replace(
    finished_request(outcome=Outcome.ERROR, status=404, detail="HTTP 404"), slo_class="interactive"
)


def _progress(done: int, planned: int = 1000, elapsed_s: float = 5) -> RunProgress:
    return RunProgress(
        elapsed_ns=round(elapsed_s * NS_PER_S),
        duration_ns=300 * NS_PER_S,
        planned=planned,
        sent=min(done + 2, planned),
        in_flight=min(done + 2, planned) - done,
    )


def _tally(record: RequestRecord, count: int, window: LiveWindow = WINDOW) -> LiveTally:
    tally = LiveTally(window)
    for number in range(count):
        tally.add(replace(record, request_id=str(number)))
    return tally


@pytest.mark.parametrize("record", [LATE, REJECTED], ids=["late sends", "rejected requests"])
def test_the_first_requests_do_not_make_a_run_invalid(record: RequestRecord) -> None:
    for count in (1, 12, 99):
        so_far = _tally(record, count).so_far(_progress(count))
        verdict = so_far.verdict
        assert (verdict.kind, verdict.reason) == (
            VerdictKind.INCONCLUSIVE,
            Reason.TOO_FEW_REQUESTS,
        )
        assert verdict.sentence == (
            f"Not enough yet: {count} requests have ended, and the client is judged from 100, "
            f"{100 - count} more."
        )
        validity = summarise_so_far(so_far, INFO).validity
        assert validity.sentence == "Too few requests have ended to judge the client."
    enough = _tally(record, 100).so_far(_progress(100))
    assert enough.verdict.kind is VerdictKind.INVALID
    assert not enough.early


def test_a_run_of_few_requests_is_invalid_when_all_have_ended() -> None:
    assert _tally(LATE, 12).so_far(_progress(12, planned=12)).verdict.kind is VerdictKind.INVALID


def test_requests_that_were_not_sent_make_a_run_invalid_at_once() -> None:
    unsent = replace(LATE, outcome=Outcome.UNSENT, sent_ns=None, first_token_ns=None)
    verdict = _tally(unsent, 1).so_far(_progress(1)).verdict
    assert (verdict.kind, verdict.reason) == (VerdictKind.INVALID, Reason.UNSENT_ROWS)


def _answered(number: int) -> RequestRecord:
    return finished_request(scheduled_ns=number * NS_PER_S // 5, slo_class="interactive")


@pytest.mark.parametrize(
    ("rejected", "reason"),
    [
        (0, Reason.ATTAINED),
        (1, Reason.ATTAINED),
        (10, Reason.CLIENT_ERROR),
        (60, Reason.CLIENT_ERROR),
        (300, Reason.CLIENT_ERROR),
    ],
)
def test_the_live_verdict_on_a_run_with_rejections_is_that_of_the_finished_run(
    rejected: int, reason: Reason, tmp_path: Path
) -> None:
    records = [
        replace(
            REJECTED if number < rejected else _answered(number),
            request_id=str(number),
            scheduled_ns=number * NS_PER_S // 5,
        )
        for number in range(300)
    ]
    window_ns = 60 * NS_PER_S
    tally = LiveTally(replace(WINDOW, length_ns=window_ns))
    for record in records:
        tally.add(record)
    live = tally.so_far(_progress(300, planned=300, elapsed_s=60)).verdict
    info = replace(INFO, window_ns=window_ns, rows_planned=300, warmup_rows=0)
    finished = write_run(tmp_path, info, records).verdict
    assert live.reason is reason
    assert (live.kind, live.reason, live.sentence) == (
        finished.kind,
        finished.reason,
        finished.sentence,
    )


def test_a_closed_loop_says_from_its_first_request_that_it_gets_no_verdict() -> None:
    closed = replace(WINDOW, closed_loop=True, length_ns=None)
    verdict = _tally(LATE, 3, closed).so_far(_progress(3)).verdict
    assert verdict.reason is Reason.CLOSED_LOOP


def test_the_window_that_a_run_needs_is_stated_while_it_goes_on() -> None:
    on_time = replace(LATE, sent_ns=0)
    page = LivePage(_tally(on_time, 30), INFO, lambda: _progress(30))
    verdict = _tally(on_time, 30).so_far(_progress(30)).verdict
    assert verdict.reason is Reason.TOO_FEW_BLOCKS
    assert verdict.sentence == (
        "Not enough yet: interactive: 30 of 30 requests met their targets, but a PASS requires a "
        "window of at least 20 s, 15 s more than the 5 s of this one; a window of about 20 s would "
        "probably decide."
    )
    assert '<span class="tag">not enough yet</span>' in page.render()
    ended = _tally(on_time, 30).so_far(_progress(30, planned=30)).verdict
    assert ended.sentence.endswith("the spread between runs is not included.")


def test_the_limit_of_the_send_lag_is_that_of_the_plan_from_the_first_request() -> None:
    window = replace(WINDOW, tightest_ttft_ns=500 * NS_PER_MS)
    tally = LiveTally(window)
    limits = {tally.so_far(_progress(0)).validity.lag_limit_ns}
    for name in ("batch", "batch", "interactive"):
        tally.add(replace(LATE, slo_class=name))
        limits.add(tally.so_far(_progress(1)).validity.lag_limit_ns)
    assert limits == {25 * NS_PER_MS}


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["interactive", "batch"]), st.none() | st.integers(1, 90_000)),
        min_size=2,
        max_size=12,
    ),
    warmup=st.integers(0, 1),
    index=st.integers(0, 1),
)
def test_the_tightest_target_of_a_plan_is_that_of_its_records(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, int | None]],
    warmup: int,
    index: int,
) -> None:
    folder: Path = tmp_path_factory.mktemp("trace")
    share = Share(index=index, count=2)
    plan = plan_of_rows(
        folder,
        [
            session_row(n, n, f"s{n}", slo_class=name, ttft_target_ms=ttft_ms)
            for n, (name, ttft_ms) in enumerate(rows)
        ],
        warmup=warmup,
        slo=SLO,
    )
    judged = EvidenceTally(classes=SLO.classes, window_ns=NS_PER_S)
    for planned in filter(share.holds, plan.requests()):
        if not planned.warmup:
            judged.add(replace(LATE, slo_class=planned.slo_class, targets=planned.targets))
    assert survey(plan, share).tightest_ttft_ns == judged.tightest_ttft_ns
