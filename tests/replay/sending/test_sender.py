"""The open-loop sender and its pacers, in virtual and in real time."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.records import request_record
from tests.replay.sending.builders import make_planned

from goodput_core.errors import InputError
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_S
from goodput_replay.sending.body import PreparedRequest
from goodput_replay.sending.lookahead import Lookahead
from goodput_replay.sending.pacer import Pacer, TimerFdPacer, open_pacer
from goodput_replay.sending.sender import OpenLoopSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from goodput_replay.plan import PlannedRequest

ZERO_NS = 1_000


class VirtualPacer(Pacer):
    """A clock of sends and responses that jumps when no task can run."""

    def __init__(self) -> None:
        super().__init__()
        self._now_ns = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    def now_ns(self) -> int:
        return self._now_ns

    async def wait_until(self, deadline_ns: int) -> None:
        if deadline_ns <= self._now_ns:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((deadline_ns, len(self._waiting), future))
        await future

    async def run(self) -> None:
        while True:
            for _ in range(12):  # run every task that is ready
                await asyncio.sleep(0)
            self._waiting = [w for w in self._waiting if not w[2].done()]
            if self._waiting:
                deadline_ns, _, future = min(self._waiting, key=lambda w: w[:2])
                self._now_ns = max(self._now_ns, deadline_ns)
                future.set_result(None)


def render(planned: PlannedRequest) -> PreparedRequest:
    return PreparedRequest(planned=planned, body=b"{}", input_tokens=1, headers={})


def record(request: PreparedRequest) -> RequestRecord:
    planned = request.planned
    return request_record(request_id=planned.request_id, scheduled_ns=planned.scheduled_ns)


async def send_times(times: list[int], delays: list[int]) -> list[int]:
    """Return the send times, with responses that take the `delays` in order."""
    pacer = VirtualPacer()
    sent: list[int] = []
    answered: list[str] = []

    async def exchange(request: PreparedRequest, zero_ns: int) -> RequestRecord:
        sent.append(pacer.now_ns() - zero_ns)
        await pacer.wait_until(pacer.now_ns() + delays[len(sent) % len(delays)])
        return record(request)

    lookahead = Lookahead((make_planned(i, t) for i, t in enumerate(times)), render)
    await lookahead.fill()
    clock = asyncio.ensure_future(pacer.run())
    sender = OpenLoopSender(
        exchange, pacer, lambda request, _: answered.append(request.planned.request_id)
    )
    await sender.run(lookahead, ZERO_NS)
    clock.cancel()
    lookahead.close()
    assert sorted(answered) == sorted(f"row-{i}" for i in range(len(times)))
    assert (sender.sent, sender.in_flight) == (len(times), 0)
    return sent


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=10).map(sorted),
    st.lists(st.integers(0, 50_000), min_size=1, max_size=10),
)
def test_send_times_do_not_depend_on_responses(times: list[int], delays: list[int]) -> None:
    assert asyncio.run(send_times(times, delays)) == times


async def test_requests_are_sent_without_any_response() -> None:
    sent: list[str] = []
    all_sent = asyncio.Event()
    ended: list[RequestRecord] = []

    async def exchange(request: PreparedRequest, _zero_ns: int) -> RequestRecord:
        sent.append(request.planned.request_id)
        if len(sent) == 3000:
            all_sent.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return replace(record(request), outcome=Outcome.CANCELLED)
        raise AssertionError

    lookahead = Lookahead((make_planned(i, i) for i in range(3000)), render)
    await lookahead.fill()
    sender = OpenLoopSender(exchange, Pacer(), lambda _, record: ended.append(record))
    running = asyncio.ensure_future(sender.run(lookahead, 0))
    await all_sent.wait()
    assert sender.in_flight == sender.peak_in_flight == 3000
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    lookahead.close()
    assert len(ended) == 3000
    assert {record.outcome for record in ended} == {Outcome.CANCELLED}


async def test_a_failure_of_recording_ends_the_run_and_is_raised() -> None:
    async def exchange(request: PreparedRequest, _zero_ns: int) -> RequestRecord:
        return record(request)

    def full(_request: PreparedRequest, _record: RequestRecord) -> None:
        raise OSError(28, "No space left on device")

    far_ns = time.monotonic_ns() + 3600 * NS_PER_S
    lookahead = Lookahead((make_planned(i, i * far_ns) for i in range(2)), render)
    await lookahead.fill()
    with pytest.raises(OSError, match="No space left"):
        await OpenLoopSender(exchange, Pacer(), full).run(lookahead, 0)
    lookahead.close()


async def test_an_invalid_row_ends_the_run_after_all_rows_before_it() -> None:
    def rows() -> Iterator[PlannedRequest]:
        yield make_planned(0, 0)
        raise InputError("row 2 is bad")

    sent: list[str] = []

    async def exchange(request: PreparedRequest, _zero_ns: int) -> RequestRecord:
        return record(request)

    lookahead = Lookahead(rows(), render)
    await lookahead.fill()
    sender = OpenLoopSender(exchange, Pacer(), lambda r, _: sent.append(r.planned.request_id))
    with pytest.raises(InputError, match="row 2 is bad"):
        await sender.run(lookahead, 0)
    assert sent == ["row-0"]
    lookahead.close()


@pytest.mark.parametrize("make", [Pacer, open_pacer], ids=["loop", "best"])
async def test_a_pacer_never_wakes_more_than_a_loop_tick_early(make: Callable[[], Pacer]) -> None:
    pacer = make()
    for step_ns in (0, 300_000, 2_000_000, 7_300_000):
        deadline_ns = pacer.now_ns() + step_ns
        await pacer.wait_until(deadline_ns)
        assert pacer.now_ns() >= deadline_ns - 1_500_000
    pacer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="timer file descriptors are Linux's")
async def test_a_timer_descriptor_never_wakes_early() -> None:
    pacer = TimerFdPacer()
    for step_ns in range(50_000, 3_000_000, 170_000):
        deadline_ns = pacer.now_ns() + step_ns
        await pacer.wait_until(deadline_ns)
        assert pacer.now_ns() >= deadline_ns
    pacer.close()
