"""Per-second counts of several routers, on the operator's clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.operator.control.test_measures import counters

from goodput_core.control import ClassOutcomes, Signal
from goodput_core.slo.window import SecondRing
from goodput_core.units import NS_PER_S
from goodput_operator.control.readings import RouterScrape, ScrapeTarget
from goodput_operator.control.window import ServiceWindow

S = NS_PER_S


def scrape(
    window: ServiceWindow, ring: SecondRing, end_s: int, *, name: str = "r0", epoch: str = "e"
) -> RouterScrape:
    """Return a router's scrape at a second of its own clock."""
    target = ScrapeTarget(name=name, uid=name, url="")
    return RouterScrape(
        target=target,
        signal=Signal.FRESH,
        counters=replace(
            counters(0), epoch=epoch, seconds=ring.recent(window.since().get(name, 0), end_s)
        ),
    )


def failed(name: str = "r0") -> RouterScrape:
    return RouterScrape(target=ScrapeTarget(name=name, uid=name, url=""), signal=Signal.FAILED)


def totals(window: ServiceWindow) -> list[int]:
    counts = window.counts(["chat"])
    assert counts is not None
    return list(counts["chat"].total)


def test_there_are_no_counts_before_the_first_response() -> None:
    window = ServiceWindow()
    assert window.counts(["chat"]) is None
    window.add([failed()], 5 * S)
    assert window.counts(["chat"]) is None


def test_each_second_is_added_once() -> None:
    window, ring = ServiceWindow(), SecondRing(100)
    ring.add("chat", 103, good=1, total=2)
    window.add([scrape(window, ring, 105)], 1_000 * S)
    assert totals(window) == [0, 0, 0, 2, 0]
    ring.add("chat", 107, good=1, total=1)
    again = scrape(window, ring, 108)
    window.add([again], 1_003 * S)
    window.add([again], 1_003 * S)
    assert totals(window) == [0, 0, 0, 2, 0, 0, 0, 1]


def test_a_late_response_does_not_shift_seconds() -> None:
    window, ring = ServiceWindow(), SecondRing(100)
    window.add([scrape(window, ring, 105)], 1_000 * S)
    ring.add("chat", 106, good=1, total=1)
    window.add([scrape(window, ring, 108)], 1_005 * S)
    assert totals(window) == [0] * 6 + [1] + [0] * 3


def test_routers_with_different_clocks_are_summed_by_second() -> None:
    window, one, two = ServiceWindow(), SecondRing(100), SecondRing(9_000)
    one.add("chat", 103, good=1, total=1)
    two.add("chat", 9_004, good=1, total=3)
    window.add([scrape(window, one, 105), scrape(window, two, 9_006, name="r1")], 1_000 * S)
    assert totals(window) == [0, 0, 0, 0, 1 + 3, 0]


def test_a_router_returns_missed_seconds_with_its_next_response() -> None:
    window, ring = ServiceWindow(), SecondRing(100)
    window.add([scrape(window, ring, 105)], 1_000 * S)
    ring.add("chat", 106, good=1, total=1)
    window.add([failed()], 1_010 * S)
    assert sum(totals(window)) == 0
    window.add([scrape(window, ring, 125)], 1_020 * S)
    assert totals(window) == [0] * 6 + [1] + [0] * 18


def test_a_restarted_router_is_counted_from_its_new_start() -> None:
    window, ring = ServiceWindow(), SecondRing(100)
    ring.add("chat", 103, good=1, total=1)
    window.add([scrape(window, ring, 105)], 1_000 * S)
    fresh = SecondRing(2)
    fresh.add("chat", 4, good=2, total=2)
    window.add([scrape(window, fresh, 6, epoch="f")], 1_010 * S)  # the request named a later second
    assert sum(totals(window)) == 1
    window.add([scrape(window, fresh, 6, epoch="f")], 1_010 * S)
    assert sum(totals(window)) == 1 + 2
    fresh.add("chat", 7, good=1, total=1)
    window.add([scrape(window, fresh, 16, epoch="f")], 1_020 * S)
    assert sum(totals(window)) == 1 + 2 + 1


@pytest.mark.parametrize(("good", "total"), [(0, 0), (7, 9), (100, 101), (3, 1000)])
def test_the_counts_of_an_interval_are_distributed_evenly(good: int, total: int) -> None:
    window = ServiceWindow()
    window.add_interval([ClassOutcomes(name="chat", good=good, total=total)], 10 * S, 1_000 * S)
    counts = window.counts(["chat"])
    assert counts is not None
    chat = counts["chat"]
    assert (chat.attainment.good, chat.attainment.total) == (good, total)
    assert len(chat.total) == 10
    assert max(chat.total) - min(chat.total) <= 2
    assert all(g <= t for g, t in zip(chat.good, chat.total, strict=True))
