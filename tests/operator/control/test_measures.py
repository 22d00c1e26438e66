"""Intervals from two readings of routers and engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goodput_core.control import ClassOutcomes, Signal, TargetCounts
from goodput_core.engine_state import EngineState
from goodput_core.histogram import LengthBin
from goodput_core.units import NS_PER_S
from goodput_operator.control.measures import LastReading, Measures, measure_interval
from goodput_operator.control.readings import (
    ClassCounters,
    EngineCounters,
    EngineScrape,
    RouterCounters,
    RouterScrape,
    ScrapeTarget,
    ServiceReading,
)

TEN_S = 10 * NS_PER_S


def counters(
    arrivals: int, *, epoch: str = "a", uptime_s: float = 1000, client_errors: int = 0
) -> RouterCounters:
    """Counters of a router: all arrivals were judged, and a tenth of them missed TPOT."""
    missed = arrivals // 10
    return RouterCounters(
        epoch=epoch,
        uptime_ns=round(uptime_s * NS_PER_S),
        arrivals=arrivals,
        client_errors=client_errors,
        in_flight=2,
        classes={
            "chat": ClassCounters(
                good=arrivals - missed,
                total=arrivals,
                ttft=TargetCounts(judged=arrivals),
                tpot=TargetCounts(judged=arrivals, missed=missed),
            )
        },
    )


def router(
    arrivals: int | None = None,
    *,
    uid: str = "r0",
    ready: bool = True,
    signal: Signal = Signal.FRESH,
    **counted: Any,
) -> RouterScrape:
    found = None if arrivals is None else counters(arrivals, **counted)
    target = ScrapeTarget(name=uid, uid=uid, url="http://10.0.0.1:9000", ready=ready)
    return RouterScrape(target=target, signal=signal, counters=found)


ENGINE = EngineCounters(
    epoch="e",
    state=EngineState(
        preemptions=5, limits_revision=3, budget_law="model", running=4, waiting=1,
        kv_free_blocks=90, kv_total_blocks=100, token_budget=2048, max_num_seqs=64,
        safety_percent=90,
    ),
    token_bounds=(256, 8192),
    max_width=64,
    lengths=(LengthBin(requests=2, input_tokens=200, cached_tokens=10, output_tokens=40),),
)  # fmt: skip


def engine(found: EngineCounters | None = ENGINE, signal: Signal = Signal.FRESH) -> EngineScrape:
    target = ScrapeTarget(name="chat-0", uid="e0", url="http://10.0.0.2:9000")
    return EngineScrape(target=target, signal=signal, counters=found)


def read(
    at_s: int, *routers: RouterScrape, engines: tuple[EngineScrape, ...] = ()
) -> ServiceReading:
    return ServiceReading(at_ns=at_s * NS_PER_S, routers=routers, engines=engines)


def run(*readings: ServiceReading) -> Measures:
    """Return the measures of the last of several readings."""
    baseline: LastReading | None = None
    for reading in readings:
        baseline, measures = measure_interval(
            baseline, reading, classes=("chat",), interval_ns=TEN_S
        )
    return measures


def test_the_first_reading_has_no_measures() -> None:
    first = run(read(0, router(1000)))
    assert first.traffic.signal is Signal.MISSING
    assert first.interval_ns == TEN_S
    assert first.outcomes == (ClassOutcomes(name="chat", good=0, total=0),)


def test_an_interval_is_the_difference_of_two_readings() -> None:
    measures = run(read(0, router(1000)), read(10, router(1100)))
    assert measures.interval_ns == TEN_S
    assert measures.traffic.signal is Signal.FRESH
    assert (measures.traffic.arrivals, measures.traffic.in_flight) == (100, 2)
    assert measures.outcomes == (ClassOutcomes(name="chat", good=90, total=100),)
    (window,) = measures.classes
    assert window.tpot == TargetCounts(judged=100, missed=10)


def test_counts_of_routers_are_summed() -> None:
    measures = run(
        read(0, router(10), router(20, uid="r1")), read(10, router(15), router(40, uid="r1"))
    )
    assert measures.traffic.arrivals == 25
    assert measures.traffic.in_flight == 4


def test_the_first_problem_of_a_router_with_its_tenants_is_reported() -> None:
    problem = replace(counters(20), tenants_problem="line 2: x")
    silent = router(uid="r0", signal=Signal.FAILED)
    invalid = replace(router(20, uid="r2"), counters=problem)
    assert run(read(0, silent)).tenants_problem is None
    assert run(read(0, silent, router(10, uid="r1"))).tenants_problem == ""
    assert run(read(0, silent, router(10, uid="r1"), invalid)).tenants_problem == (
        "router r2: line 2: x"
    )


def test_client_errors_are_not_arrivals() -> None:
    readings = read(0, router(10)), read(10, router(15, client_errors=4))
    assert run(*readings).traffic.arrivals == 1
    # An earlier arrival ended with a client error: no arrival, and no restart.
    assert run(*readings, read(20, router(15, client_errors=5))).traffic.arrivals == 0


def test_an_interval_without_traffic_is_fresh_and_has_no_judged_class() -> None:
    measures = run(read(0, router(10)), read(10, router(10)))
    assert measures.traffic.signal is Signal.FRESH
    assert measures.traffic.arrivals == 0
    assert measures.classes == ()
    assert measures.outcomes == (ClassOutcomes(name="chat", good=0, total=0),)


@pytest.mark.parametrize(
    ("second", "arrivals"),
    [
        pytest.param(router(7, epoch="b", uptime_s=5), 7, id="restarted"),
        pytest.param(router(12, epoch="b", uptime_s=5), 12, id="restarted and above its old count"),
        pytest.param(router(7, epoch="a"), 7, id="a lower count in the same epoch"),
        pytest.param(router(9, uid="r9", uptime_s=8), 9, id="a new router"),
        pytest.param(
            router(9000, uid="r9", uptime_s=800), 0, id="an unknown router that started earlier"
        ),
    ],
)
def test_counters_of_a_restarted_or_new_router_begin_at_zero(
    second: RouterScrape, arrivals: int
) -> None:
    measures = run(read(0, router(10)), read(10, second))
    assert measures.traffic.signal is Signal.FRESH
    assert measures.traffic.arrivals == arrivals


@pytest.mark.parametrize(
    ("routers", "signal"),
    [
        pytest.param((), Signal.MISSING, id="no router"),
        pytest.param(
            (router(20), router(uid="r1", signal=Signal.FAILED)), Signal.FAILED, id="one failed"
        ),
        pytest.param((router(signal=Signal.MISSING),), Signal.MISSING, id="without numbers"),
        pytest.param(
            (router(signal=Signal.MISSING), router(uid="r1", signal=Signal.FAILED)),
            Signal.FAILED,
            id="one failed and one without numbers",
        ),
    ],
)
def test_unknown_traffic_is_not_reported_as_zero(
    routers: tuple[RouterScrape, ...], signal: Signal
) -> None:
    measures = run(read(0, router(10)), read(10, *routers))
    assert measures.traffic.signal is signal
    assert measures.classes == ()


def test_a_router_that_starts_or_stops_need_not_respond() -> None:
    leaving = router(uid="r1", ready=False, signal=Signal.FAILED)
    measures = run(read(0, router(10)), read(10, router(30), leaving))
    assert (measures.traffic.signal, measures.traffic.arrivals) == (Signal.FRESH, 20)


def test_ready_processes_without_measurements_are_listed() -> None:
    hung = replace(router(uid="r1", signal=Signal.FAILED), detail="did not respond")
    starting = router(uid="r2", ready=False, signal=Signal.FAILED)
    empty = replace(engine(None, Signal.MISSING), detail="the state cannot be used")
    measures = run(read(0, router(1)), read(10, router(1), hung, starting, engines=(empty,)))
    assert [(one.role, one.name, one.signal, one.detail) for one in measures.unmeasured] == [
        ("router", "r1", Signal.FAILED, "did not respond"),
        ("engine", "chat-0", Signal.MISSING, "the state cannot be used"),
    ]


def test_the_interval_after_a_failed_scrape_covers_the_complete_time() -> None:
    measures = run(
        read(0, router(10), router(10, uid="r1")),
        read(10, router(20), router(uid="r1", signal=Signal.FAILED)),
        read(20, router(30), router(50, uid="r1")),
    )
    assert measures.interval_ns == 2 * TEN_S
    assert measures.traffic.arrivals == 20 + 40


@pytest.mark.parametrize(
    "known",
    [
        pytest.param({}, id="no count of a class"),
        pytest.param({"chat": ClassCounters(total=70)}, id="some outcomes of a class"),
    ],
)
def test_series_missing_for_a_moment_are_counted_once(known: dict[str, ClassCounters]) -> None:
    lacking = router(1100, client_errors=1)
    assert lacking.counters is not None
    lacking = replace(lacking, counters=replace(lacking.counters, classes=known, client_errors=0))
    readings = [
        read(0, router(1000, client_errors=1)),
        read(10, lacking),
        read(20, router(1100, client_errors=1)),
    ]
    assert run(*readings[:2]).outcomes == (ClassOutcomes(name="chat", good=0, total=0),)
    measures = run(*readings)
    assert measures.traffic.arrivals == 0
    assert measures.outcomes == (ClassOutcomes(name="chat", good=90, total=100),)
    assert measures.classes[0].tpot == TargetCounts(judged=100, missed=10)


def test_an_unchanged_reading_is_missing_and_not_an_idle_interval() -> None:
    assert run(read(5, router(10)), read(5, router(10))).traffic.signal is Signal.MISSING


def test_an_engine_reading_has_the_preemptions_and_finished_requests_of_the_interval() -> None:
    later = replace(
        ENGINE,
        state=replace(ENGINE.state, preemptions=8),
        lengths=(
            LengthBin(requests=3, input_tokens=320, cached_tokens=10, output_tokens=60),
            LengthBin(requests=1, input_tokens=9, cached_tokens=0, output_tokens=1),
        ),
    )
    measures = run(
        read(0, router(1), engines=(engine(),)), read(10, router(1), engines=(engine(later),))
    )
    (reading,) = measures.engines
    assert (reading.name, reading.signal, reading.preemptions) == ("chat-0", Signal.FRESH, 3)
    assert reading.state.limits_revision == 3
    assert measures.traffic.finished.bins == (
        LengthBin(requests=1, input_tokens=9, cached_tokens=0, output_tokens=1),
        LengthBin(requests=1, input_tokens=120, cached_tokens=0, output_tokens=20),
    )


def test_counters_of_an_engine_that_contradict_each_other_have_no_negative_prompts() -> None:
    start = LengthBin(requests=2, input_tokens=250, cached_tokens=0, output_tokens=20)
    end = LengthBin(requests=3, input_tokens=260, cached_tokens=90, output_tokens=30)
    readings = (
        read(at, router(1), engines=(engine(replace(ENGINE, lengths=(bin_,))),))
        for at, bin_ in ((0, start), (10, end))
    )
    assert run(*readings).traffic.finished.bins == (
        LengthBin(requests=1, input_tokens=10, cached_tokens=10, output_tokens=10),
    )


def test_requests_of_a_failed_engine_are_counted_when_it_responds_again() -> None:
    later = replace(
        ENGINE,
        lengths=(LengthBin(requests=4, input_tokens=400, cached_tokens=10, output_tokens=80),),
    )
    readings = [
        read(0, router(1), engines=(engine(),)),
        read(10, router(1), engines=(engine(None, Signal.FAILED),)),
    ]
    assert run(*readings).engines[0].signal is Signal.FAILED
    assert run(*readings).traffic.signal is Signal.FRESH, "an engine need not respond"
    readings.append(read(20, router(1), engines=(engine(later),)))
    assert run(*readings).traffic.finished.requests == 2


def test_a_restarted_engine_adds_no_counts_from_before() -> None:
    state = replace(ENGINE.state, preemptions=1, limits_revision=0)
    later = replace(ENGINE, epoch="f", state=state)
    measures = run(
        read(0, router(1), engines=(engine(),)), read(10, router(1), engines=(engine(later),))
    )
    assert measures.engines[0].preemptions == 0
    assert measures.engines[0].state.limits_revision == 0
    assert measures.traffic.finished.requests == 0


@settings(deadline=None)
@given(
    counts=st.lists(
        st.tuples(st.integers(0, 50), st.booleans(), st.booleans()), min_size=2, max_size=12
    )
)
def test_no_request_is_counted_twice_after_failures_and_restarts(
    counts: list[tuple[int, bool, bool]],
) -> None:
    baseline: LastReading | None = None
    total = arrived = counted = 0
    epoch = 0
    for at, (more, restarts, responds) in enumerate(counts):
        if restarts:
            epoch, total = epoch + 1, 0
        total, arrived = total + more, arrived + more
        scrape = router(
            total if responds else None,
            signal=Signal.FRESH if responds else Signal.FAILED,
            epoch=str(epoch),
        )
        baseline, measures = measure_interval(
            baseline, read(10 * at, scrape), classes=("chat",), interval_ns=TEN_S
        )
        counted += measures.traffic.arrivals
        assert measures.interval_ns > 0
    assert counted <= arrived
