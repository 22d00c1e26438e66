from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goodput_core.control import PromiseCounts, Signal
from goodput_core.engine_state import EngineState
from goodput_core.histogram import LengthBin
from goodput_core.units import NS_PER_S
from goodput_operator.control.measures import Attained, LastReading, Measures, measure_interval
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
    """A router at which everything that came was judged, and a tenth of it missed TPOT."""
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
                ttft=PromiseCounts(judged=arrivals),
                tpot=PromiseCounts(judged=arrivals, missed=missed),
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
    told = None if arrivals is None else counters(arrivals, **counted)
    source = ScrapeTarget(name=uid, uid=uid, url="http://10.0.0.1:9000", ready=ready)
    return RouterScrape(source=source, signal=signal, counters=told)


SILENT = Signal.FAILED
ENGINE = EngineCounters(
    epoch="e",
    state=EngineState(
        preemptions=5, limits_revision=3, budget_law="model", running=4, waiting=1,
        kv_free_blocks=90, kv_total_blocks=100, token_budget=2048, max_num_seqs=64,
        safety_percent=90,
    ),
    token_bounds=(256, 8192),
    max_width=64,
    answered=(LengthBin(requests=2, input_tokens=200, cached_tokens=10, output_tokens=40),),
)  # fmt: skip


def engine(told: EngineCounters | None = ENGINE, signal: Signal = Signal.FRESH) -> EngineScrape:
    source = ScrapeTarget(name="chat-0", uid="e0", url="http://10.0.0.2:9000")
    return EngineScrape(source=source, signal=signal, counters=told)


def read(
    at_s: int, *routers: RouterScrape, engines: tuple[EngineScrape, ...] = ()
) -> ServiceReading:
    return ServiceReading(at_ns=at_s * NS_PER_S, routers=routers, engines=engines)


def run(*readings: ServiceReading) -> Measures:
    """The measures of the last of several readings."""
    baseline: LastReading | None = None
    for reading in readings:
        baseline, measures = measure_interval(
            baseline, reading, classes=("chat",), interval_ns=TEN_S
        )
    return measures


def test_the_first_reading_is_what_the_next_is_held_against() -> None:
    first = run(read(0, router(1000)))
    assert first.traffic.signal is Signal.MISSING
    assert first.interval_ns == TEN_S
    assert first.attained == (Attained(name="chat", good=0, total=0),)


def test_an_interval_is_what_counters_grew_by() -> None:
    measures = run(read(0, router(1000)), read(10, router(1100)))
    assert measures.interval_ns == TEN_S
    assert measures.traffic.signal is Signal.FRESH
    assert (measures.traffic.arrivals, measures.traffic.in_flight) == (100, 2)
    assert measures.attained == (Attained(name="chat", good=90, total=100),)
    (window,) = measures.classes
    assert window.tpot == PromiseCounts(judged=100, missed=10)


def test_routers_are_added_up() -> None:
    measures = run(
        read(0, router(10), router(20, uid="r1")), read(10, router(15), router(40, uid="r1"))
    )
    assert measures.traffic.arrivals == 25
    assert measures.traffic.in_flight == 4


def test_what_was_the_client_s_own_fault_is_no_demand() -> None:
    readings = read(0, router(10)), read(10, router(15, client_errors=4))
    assert run(*readings).traffic.arrivals == 1
    # It arrived earlier and ended now: no arrival, and no restart.
    assert run(*readings, read(20, router(15, client_errors=5))).traffic.arrivals == 0


def test_no_traffic_is_fresh_and_has_no_class_that_was_judged() -> None:
    measures = run(read(0, router(10)), read(10, router(10)))
    assert measures.traffic.signal is Signal.FRESH
    assert measures.traffic.arrivals == 0
    assert measures.classes == ()
    assert measures.attained == (Attained(name="chat", good=0, total=0),)


@pytest.mark.parametrize(
    ("second", "arrivals"),
    [
        pytest.param(router(7, epoch="b", uptime_s=5), 7, id="it started again"),
        pytest.param(router(12, epoch="b", uptime_s=5), 12, id="and has passed its old count"),
        pytest.param(router(7, epoch="a"), 7, id="its count fell without a word"),
        pytest.param(router(9, uid="r9", uptime_s=8), 9, id="another came in its place"),
        pytest.param(router(9000, uid="r9", uptime_s=800), 0, id="one was there and not known"),
    ],
)
def test_a_count_that_begins_anew_is_counted_from_zero(second: RouterScrape, arrivals: int) -> None:
    measures = run(read(0, router(10)), read(10, second))
    assert measures.traffic.signal is Signal.FRESH
    assert measures.traffic.arrivals == arrivals


@pytest.mark.parametrize(
    ("routers", "signal"),
    [
        pytest.param((), Signal.MISSING, id="there is no router"),
        pytest.param((router(20), router(uid="r1", signal=SILENT)), SILENT, id="one is silent"),
        pytest.param((router(signal=Signal.MISSING),), Signal.MISSING, id="no numbers in it"),
        pytest.param(
            (router(signal=Signal.MISSING), router(uid="r1", signal=SILENT)),
            SILENT,
            id="one is silent and one has no numbers",
        ),
    ],
)
def test_what_could_not_be_learnt_is_never_a_zero(
    routers: tuple[RouterScrape, ...], signal: Signal
) -> None:
    measures = run(read(0, router(10)), read(10, *routers))
    assert measures.traffic.signal is signal
    assert measures.classes == ()


def test_a_router_that_starts_or_ends_may_be_silent() -> None:
    leaving = router(uid="r1", ready=False, signal=Signal.FAILED)
    measures = run(read(0, router(10)), read(10, router(30), leaving))
    assert (measures.traffic.signal, measures.traffic.arrivals) == (Signal.FRESH, 20)


def test_a_ready_process_without_numbers_is_named() -> None:
    hung = replace(router(uid="r1", signal=SILENT), detail="did not answer")
    starting = router(uid="r2", ready=False, signal=SILENT)
    empty = replace(engine(None, Signal.MISSING), detail="the state cannot be used")
    measures = run(read(0, router(1)), read(10, router(1), hung, starting, engines=(empty,)))
    assert [(one.role, one.pod, one.signal, one.detail) for one in measures.silent] == [
        ("router", "r1", Signal.FAILED, "did not answer"),
        ("engine", "chat-0", Signal.MISSING, "the state cannot be used"),
    ]


def test_after_silence_the_whole_time_is_one_interval() -> None:
    measures = run(
        read(0, router(10), router(10, uid="r1")),
        read(10, router(20), router(uid="r1", signal=SILENT)),
        read(20, router(30), router(50, uid="r1")),
    )
    assert measures.interval_ns == 2 * TEN_S
    assert measures.traffic.arrivals == 20 + 40


@pytest.mark.parametrize(
    "known",
    [
        pytest.param({}, id="nothing of a class"),
        pytest.param({"chat": ClassCounters(total=70)}, id="a part of its outcomes"),
    ],
)
def test_counts_missing_for_a_moment_count_once(known: dict[str, ClassCounters]) -> None:
    lacking = router(1100, client_errors=1)
    assert lacking.counters is not None
    lacking = replace(lacking, counters=replace(lacking.counters, classes=known, client_errors=0))
    readings = [
        read(0, router(1000, client_errors=1)),
        read(10, lacking),
        read(20, router(1100, client_errors=1)),
    ]
    assert run(*readings[:2]).attained == (Attained(name="chat", good=0, total=0),)
    measures = run(*readings)
    assert measures.traffic.arrivals == 0
    assert measures.attained == (Attained(name="chat", good=90, total=100),)
    assert measures.classes[0].tpot == PromiseCounts(judged=100, missed=10)


def test_the_same_numbers_once_more_are_missing_not_an_idle_interval() -> None:
    assert run(read(5, router(10)), read(5, router(10))).traffic.signal is Signal.MISSING


def test_an_engine_tells_what_it_preempted_and_answered_since() -> None:
    later = replace(
        ENGINE,
        state=replace(ENGINE.state, preemptions=8),
        answered=(
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


def test_a_silent_engine_is_failed_and_its_answers_are_counted_when_it_speaks_again() -> None:
    later = replace(
        ENGINE,
        answered=(LengthBin(requests=4, input_tokens=400, cached_tokens=10, output_tokens=80),),
    )
    readings = [
        read(0, router(1), engines=(engine(),)),
        read(10, router(1), engines=(engine(None, Signal.FAILED),)),
    ]
    assert run(*readings).engines[0].signal is Signal.FAILED
    assert run(*readings).traffic.signal is Signal.FRESH, "engines may be silent"
    readings.append(read(20, router(1), engines=(engine(later),)))
    assert run(*readings).traffic.finished.requests == 2


def test_an_engine_that_started_again_adds_nothing_of_before() -> None:
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
def test_whatever_fails_or_restarts_no_request_is_counted_twice(
    counts: list[tuple[int, bool, bool]],
) -> None:
    baseline: LastReading | None = None
    total = came = seen = 0
    epoch = 0
    for at, (more, restarts, answers) in enumerate(counts):
        if restarts:
            epoch, total = epoch + 1, 0
        total, came = total + more, came + more
        scrape = router(
            total if answers else None,
            signal=Signal.FRESH if answers else Signal.FAILED,
            epoch=str(epoch),
        )
        baseline, measures = measure_interval(
            baseline, read(10 * at, scrape), classes=("chat",), interval_ns=TEN_S
        )
        seen += measures.traffic.arrivals
        assert measures.interval_ns > 0
    assert seen <= came
