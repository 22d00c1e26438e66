"""Look-ahead: requests are prepared in order, within bounds of time and size."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from goodput_replay.sending.body import PreparedRequest
from goodput_replay.sending.lookahead import Lookahead

if TYPE_CHECKING:
    from tests.replay.sending.builders import Planned

    from goodput_replay.plan import PlannedRequest


class Renderer:
    """Records the requests that it renders."""

    def __init__(self, size: int = 10) -> None:
        self.rendered: list[str] = []
        self._size = size

    def __call__(self, planned: PlannedRequest) -> PreparedRequest:
        self.rendered.append(planned.request_id)
        return PreparedRequest(planned=planned, body=b"x" * self._size, input_tokens=1, headers={})


async def drain(lookahead: Lookahead) -> list[str]:
    taken = []
    while (request := await lookahead.take()) is not None:
        taken.append(request.planned.request_id)
    lookahead.close()
    return taken


async def test_every_request_is_taken_once_and_in_order(planned: Planned) -> None:
    lookahead = Lookahead((planned(i, i * 1000) for i in range(5000)), Renderer(), ahead_ns=2000)
    await lookahead.fill()
    assert await drain(lookahead) == [f"row-{i}" for i in range(5000)]


async def test_prepared_requests_are_bounded_by_schedule_time(planned: Planned) -> None:
    render = Renderer()
    lookahead = Lookahead((planned(i, i * 100) for i in range(100)), render, ahead_ns=450)
    await lookahead.fill()
    assert render.rendered == [f"row-{i}" for i in range(5)]
    assert len(await drain(lookahead)) == 100


async def test_prepared_requests_are_bounded_by_size(planned: Planned) -> None:
    render = Renderer(size=100)
    lookahead = Lookahead((planned(i) for i in range(50)), render, max_bytes=250)
    await lookahead.fill()
    assert len(render.rendered) == 3
    assert len(await drain(lookahead)) == 50


async def test_a_single_body_above_the_bound_is_prepared(planned: Planned) -> None:
    lookahead = Lookahead((planned(i) for i in range(3)), Renderer(size=99), max_bytes=10)
    await lookahead.fill()
    assert len(await drain(lookahead)) == 3


async def test_a_gap_longer_than_the_look_ahead_does_not_block(
    planned: Planned,
) -> None:
    lookahead = Lookahead((planned(i, i * 10**15) for i in range(4)), Renderer(), ahead_ns=1)
    await lookahead.fill()
    assert len(await drain(lookahead)) == 4


async def test_closing_ends_the_thread_before_the_last_row(planned: Planned) -> None:
    before = threading.active_count()
    lookahead = Lookahead((planned(i, i * 10**9) for i in range(10**6)), Renderer(), ahead_ns=1)
    await lookahead.fill()
    lookahead.close()
    assert threading.active_count() == before


async def test_closing_before_the_start_does_nothing(planned: Planned) -> None:
    Lookahead((planned(i) for i in range(3)), Renderer()).close()
