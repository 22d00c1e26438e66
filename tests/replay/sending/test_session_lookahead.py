"""Sending follow-ups in real time: due times, order, failures, and agreement with virtual time."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.records import request_record
from tests.builders.sessions import follow_ups_of, session_row

from goodput_core.errors import InputError
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.emulation.arrivals import ArrivalQueue
from goodput_replay.sending.body import PreparedRequest
from goodput_replay.sending.pacer import Pacer, open_pacer
from goodput_replay.sending.sender import OpenLoopSender
from goodput_replay.sending.session_lookahead import SessionLookahead

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import PlannedRequest
    from goodput_replay.sessions import FollowUps
    from goodput_traces.format.schema import TraceRow

Schedule = list[tuple[int, str]]


def render(planned: PlannedRequest) -> PreparedRequest:
    return PreparedRequest(planned=planned, body=b"x" * 100, input_tokens=1, headers={})


class SteppedPacer(Pacer):
    """A clock that the test advances."""

    def __init__(self) -> None:
        super().__init__()
        self.at_ns = 0
        self.deadline_ns: int | None = None

    def now_ns(self) -> int:
        return self.at_ns

    async def wait_until(self, deadline_ns: int) -> None:
        if deadline_ns <= self.at_ns:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        self.deadline_ns = deadline_ns
        try:
            await self._waiter
        finally:
            self._waiter = self.deadline_ns = None

    def advance(self, now_ns: int) -> None:
        self.at_ns = now_ns
        if self.deadline_ns is not None and self.deadline_ns <= now_ns:
            self.interrupt()


class SteppedRun:
    """A sender and a server with a given latency for each request, on a stepped clock.

    Args:
        follow_ups: follow-ups of the plan.
        latencies_ns: latency by request id, from the scheduled time.
        zero_ns: time zero of the run on the clock.
    """

    def __init__(
        self, follow_ups: FollowUps, latencies_ns: Mapping[str, int], *, zero_ns: int = 0,
        early_bytes: int = 1 << 20,
    ) -> None:  # fmt: skip
        self.sent: Schedule = []
        self._pacer = SteppedPacer()
        self._zero_ns = zero_ns
        self._latencies_ns = latencies_ns
        self._ends: list[tuple[int, int, asyncio.Future[None]]] = []
        self._lookahead = SessionLookahead(
            follow_ups.starts(), follow_ups, render, self._pacer, max_bytes=early_bytes
        )

    async def drive(self) -> Schedule:
        await self._lookahead.fill()
        self._lookahead.begin(self._zero_ns)
        sender = OpenLoopSender(self._exchange, self._pacer, self._record)
        task = asyncio.ensure_future(sender.run(self._lookahead, self._zero_ns))
        try:
            while not task.done():
                await self._settle()
                times = [] if self._pacer.deadline_ns is None else [self._pacer.deadline_ns]
                times += [self._ends[0][0]] if self._ends else []
                if not times:
                    continue
                self._pacer.advance(min(times))
                if self._ends and self._ends[0][0] <= self._pacer.at_ns:
                    heappop(self._ends)[2].set_result(None)
            task.result()
        finally:
            task.cancel()
            self._lookahead.close()
        return self.sent

    async def _settle(self) -> None:
        """Let every task and the thread that prepares follow-ups finish its work."""
        loop = asyncio.get_running_loop()
        for _ in range(3):
            await loop.run_in_executor(self._lookahead._worker, int)
            for _ in range(8):
                await asyncio.sleep(0)

    async def _exchange(self, request: PreparedRequest, zero_ns: int) -> RequestRecord:
        planned = request.planned
        self.sent.append((planned.scheduled_ns, planned.request_id))
        end_ns = planned.scheduled_ns + self._latencies_ns[planned.request_id]
        ended = asyncio.get_running_loop().create_future()
        heappush(self._ends, (zero_ns + end_ns, len(self.sent), ended))
        await ended
        return request_record(
            request_id=planned.request_id, scheduled_ns=planned.scheduled_ns, end_ns=end_ns
        )

    def _record(self, request: PreparedRequest, record: RequestRecord) -> None:
        assert record.end_ns is not None
        self._lookahead.ended(request.planned, record.end_ns)


def in_virtual_time(follow_ups: FollowUps, latencies_ns: Mapping[str, int]) -> Schedule:
    arrivals = ArrivalQueue(follow_ups.starts(), follow_ups)
    schedule: Schedule = []
    ends: list[tuple[int, int, PlannedRequest]] = []
    while arrivals.open:
        times = [] if arrivals.next_ns is None else [arrivals.next_ns]
        now_ns = min([*times, *(end[0] for end in ends[:1])])
        while (planned := arrivals.take(now_ns)) is not None:
            assert planned.scheduled_ns == now_ns
            schedule.append((now_ns, planned.request_id))
            end_ns = now_ns + latencies_ns[planned.request_id]
            heappush(ends, (end_ns, planned.number, planned))
        while ends and ends[0][0] <= now_ns:
            end_ns, _, ended = heappop(ends)
            arrivals.ended(ended, end_ns)
    assert arrivals.next_ns is None
    return schedule


def expected_schedule(rows: list[TraceRow], latencies_ns: Mapping[str, int]) -> Schedule:
    """Compute every time from the definition; every row of a session has a think time."""
    ends: dict[str, int] = {}
    last: dict[str, str] = {}
    schedule: Schedule = []
    for row in rows:
        before = None if row.session_id is None else last.get(row.session_id)
        at_ns = row.timestamp_start_unix_ns - rows[0].timestamp_start_unix_ns
        if before is not None:
            at_ns = ends[before] + round((row.delay_ms or 0) * NS_PER_MS)
        schedule.append((at_ns, row.request_id))
        ends[row.request_id] = at_ns + latencies_ns[row.request_id]
        if row.session_id is not None:
            last[row.session_id] = row.request_id
    return sorted(schedule)


def draw_rows(data: st.DataObject) -> tuple[list[TraceRow], dict[str, int]]:
    """Draw rows with ties, pauses from none to a minute, and latencies from none to a minute."""
    rows: list[TraceRow] = []
    at_ms = 0
    for number in range(data.draw(st.integers(2, 12))):
        at_ms += data.draw(st.sampled_from([0, 3, 40_000]))
        session = "a" if number < 2 else data.draw(st.sampled_from(["a", "b", None]))
        think_ms = data.draw(st.sampled_from([0, 2, 4_999, 60_000]))
        rows.append(session_row(number, at_ms, session, delay_ms=think_ms))
    return rows, {
        row.request_id: data.draw(st.sampled_from([0, 1, NS_PER_MS, 3 * NS_PER_S, 60 * NS_PER_S]))
        for row in rows
    }


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_real_and_virtual_time_have_the_same_schedule_if_latencies_are_the_same(
    data: st.DataObject,
) -> None:
    rows, latencies_ns = draw_rows(data)
    early_bytes = data.draw(st.sampled_from([0, 150, 1 << 20]))
    with TemporaryDirectory() as folder, follow_ups_of(Path(folder), rows) as follow_ups:
        run = SteppedRun(follow_ups, latencies_ns, zero_ns=777, early_bytes=early_bytes)
        in_real_time = asyncio.run(asyncio.wait_for(run.drive(), 30))
        virtual = in_virtual_time(follow_ups, latencies_ns)
    assert sorted(in_real_time) == sorted(virtual) == expected_schedule(rows, latencies_ns)
    assert [at_ns for at_ns, _ in in_real_time] == sorted(at_ns for at_ns, _ in in_real_time)


async def test_a_follow_up_due_before_the_next_start_ends_the_wait_for_that_start(
    tmp_path: Path,
) -> None:
    # The second session starts after an hour. The turn is due after 60 ms of real time.
    rows = [
        session_row(0, 0),
        session_row(1, 3_600_000, "b"),
        session_row(2, 3_600_001, delay_ms=20),
    ]
    pacer = open_pacer()
    with follow_ups_of(tmp_path, rows) as follow_ups:
        lookahead = SessionLookahead(follow_ups.starts(), follow_ups, render, pacer)
        await lookahead.fill()
        zero_ns = pacer.now_ns()
        lookahead.begin(zero_ns)
        first = await lookahead.take()
        assert first is not None
        waiting = asyncio.ensure_future(lookahead.take())
        await asyncio.sleep(0.04)
        lookahead.ended(first.planned, pacer.now_ns() - zero_ns)
        turn = await asyncio.wait_for(waiting, 5)
        lookahead.close()
    pacer.close()
    assert turn is not None
    assert turn.planned.request_id == "row-2"
    assert 60 * NS_PER_MS <= turn.planned.scheduled_ns < 5 * NS_PER_S


async def test_an_error_while_a_request_is_prepared_ends_the_run(
    tmp_path: Path,
) -> None:
    def fail_on_turns(planned: PlannedRequest) -> PreparedRequest:
        if planned.number:
            raise InputError("row-1 cannot be rendered")
        return render(planned)

    pacer = SteppedPacer()
    with follow_ups_of(tmp_path, [session_row(0, 0), session_row(1, 1)]) as follow_ups:
        lookahead = SessionLookahead(follow_ups.starts(), follow_ups, fail_on_turns, pacer)
        await lookahead.fill()
        lookahead.begin(0)
        assert await lookahead.take() is not None
        with pytest.raises(InputError, match="row-1 cannot be rendered"):
            await asyncio.wait_for(lookahead.take(), 5)
        lookahead.close()


@pytest.mark.parametrize("make", [Pacer, open_pacer])
async def test_a_wait_can_be_interrupted_and_repeated(make: Callable[[], Pacer]) -> None:
    pacer = make()
    pacer.interrupt()  # without effect, as nothing waits
    waiting = asyncio.ensure_future(pacer.wait_until(pacer.now_ns() + 3600 * NS_PER_S))
    await asyncio.sleep(0)
    pacer.interrupt()
    await asyncio.wait_for(waiting, 5)
    deadline_ns = pacer.now_ns() + 20 * NS_PER_MS
    await pacer.wait_until(deadline_ns)
    assert pacer.now_ns() >= deadline_ns - NS_PER_MS
    pacer.close()
