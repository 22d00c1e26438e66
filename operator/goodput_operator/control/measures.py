"""Measures: one interval of a service, as the difference of two readings. Pure.

Counters start at zero with each process. A router that does not respond now may later return all
its counts of the meantime. Therefore the readings of all routers are used together or not at all:
while a ready router does not respond, nothing is counted, and the next complete reading covers the
longer interval. Engines are independent of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from goodput_core.contract import ROLE_ENGINE, ROLE_ROUTER
from goodput_core.control import ClassWindow, Signal, TargetCounts, Traffic
from goodput_core.control.step import EngineReading
from goodput_core.histogram import LengthBin, LengthMix
from goodput_core.slo.attainment import SecondCounts
from goodput_operator.control.readings import ClassCounters, EngineCounters, RouterCounters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from goodput_operator.control.readings import EngineScrape, RouterScrape, ServiceReading

__all__ = ["Attained", "LastReading", "Measures", "UnmeasuredPod", "measure_interval"]

_NOTHING: Final = ClassCounters()
_AT_START: Final = RouterCounters(
    epoch="", uptime_ns=None, arrivals=0, client_errors=0, in_flight=0, classes={}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attained:
    """Outcomes of one class in an interval, as counted by the routers.

    Args:
        name: name of the class.
        good: requests that attained.
        total: requests in the denominator: attained, missed, shed, error and timeout.
    """

    name: str
    good: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmeasuredPod:
    """A ready pod without measurements.

    Args:
        role: role of the pod.
        pod: name of the pod.
        signal: FAILED if the pod did not respond, MISSING if it responded without measurements.
        detail: message for users.
    """

    role: str
    pod: str
    signal: Signal
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """One interval of one service.

    Args:
        interval_ns: length of the interval, above 0.
        traffic: traffic over all routers.
        classes: met and missed targets of the requests that ended in the interval.
        attained: outcomes of each class of the manifest.
        seconds: judged requests of the last hour by class and second; None if a ready router did
            not return them.
        engines: one reading for each engine that has an address.
        unmeasured: ready pods without measurements, routers first.
    """

    interval_ns: int
    traffic: Traffic
    classes: tuple[ClassWindow, ...] = ()
    attained: tuple[Attained, ...] = ()
    seconds: Mapping[str, SecondCounts] | None = None
    engines: tuple[EngineReading, ...] = ()
    unmeasured: tuple[UnmeasuredPod, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReading:
    """The last complete reading.

    Args:
        at_ns: time of the reading.
        routers, engines: the latest counters of each process, by uid.
    """

    at_ns: int
    routers: Mapping[str, RouterCounters]
    engines: Mapping[str, EngineCounters]


def measure_interval(
    last: LastReading | None, reading: ServiceReading, *, classes: Sequence[str], interval_ns: int
) -> tuple[LastReading | None, Measures]:
    """Return the difference between a reading and the last one.

    Args:
        last: the last complete reading; None at the first one.
        reading: the new reading.
        classes: classes of the manifest; other classes are not counted.
        interval_ns: the configured interval, used without a last reading.

    Returns:
        The last reading of the next interval, and the measures of this one.
    """
    signal = _signal(last, reading)
    engines = tuple(_engine(last, scrape) for scrape in reading.engines)
    unmeasured = (
        *_unmeasured(ROLE_ROUTER, reading.routers),
        *_unmeasured(ROLE_ENGINE, reading.engines),
    )
    if last is None or signal is not Signal.FRESH:
        if last is None and signal is Signal.FRESH:
            last, signal = _latest(None, reading), Signal.MISSING
        return last, Measures(
            interval_ns=interval_ns,
            traffic=Traffic(signal=signal),
            attained=tuple(Attained(name=name, good=0, total=0) for name in classes),
            engines=engines,
            unmeasured=unmeasured,
        )
    interval_ns = reading.at_ns - last.at_ns
    counters = [
        (scrape.counters, _before(last, scrape.target.uid, scrape.counters, interval_ns))
        for scrape in reading.routers
        if scrape.counters is not None
    ]
    windows = [_class_counts(name, counters) for name in classes]
    return _latest(last, reading), Measures(
        interval_ns=interval_ns,
        traffic=Traffic(
            signal=Signal.FRESH,
            arrivals=max(
                0, sum(_load_arrivals(now) - _load_arrivals(was) for now, was in counters)
            ),
            in_flight=sum(now.in_flight for now, _ in counters),
            finished=_finished(last, reading.engines),
        ),
        classes=tuple(window for window, _ in windows if window.ttft.judged or window.tpot.judged),
        attained=tuple(attained for _, attained in windows),
        engines=engines,
        unmeasured=unmeasured,
    )


def _signal(last: LastReading | None, reading: ServiceReading) -> Signal:
    signals = {scrape.signal for scrape in reading.routers if scrape.target.ready}
    if Signal.FAILED in signals:
        return Signal.FAILED
    if not signals or Signal.MISSING in signals:
        return Signal.MISSING
    if last is not None and reading.at_ns <= last.at_ns:
        return Signal.MISSING  # an unchanged reading
    return Signal.FRESH


def _unmeasured(
    role: str, scrapes: Iterable[RouterScrape | EngineScrape]
) -> Iterator[UnmeasuredPod]:
    for scrape in scrapes:
        if scrape.target.ready and scrape.signal is not Signal.FRESH:
            yield UnmeasuredPod(
                role=role, pod=scrape.target.name, signal=scrape.signal, detail=scrape.detail
            )


def _latest(last: LastReading | None, reading: ServiceReading) -> LastReading:
    """Return the latest counters of every process that still exists."""
    routers = {} if last is None else last.routers
    engines = {} if last is None else last.engines
    return LastReading(
        at_ns=reading.at_ns,
        routers={
            # The window already has the seconds.
            scrape.target.uid: replace(counters, seconds=None)
            for scrape in reading.routers
            if (counters := _largest(routers.get(scrape.target.uid), scrape.counters)) is not None
        },
        engines={
            scrape.target.uid: latest
            for scrape in reading.engines
            if (latest := scrape.counters or engines.get(scrape.target.uid)) is not None
        },
    )


def _largest(was: RouterCounters | None, now: RouterCounters | None) -> RouterCounters | None:
    """Return the largest known counters of a router.

    A Prometheus server ingests series one by one and may lack some for a moment. Counters never
    decrease while the router runs, so the earlier value remains a lower bound.
    """
    if was is None or now is None or not _same_run(was, now):
        return now or was
    return replace(
        now,
        client_errors=max(was.client_errors, now.client_errors),
        classes={
            name: _largest_of_class(
                was.classes.get(name, _NOTHING), now.classes.get(name, _NOTHING)
            )
            for name in was.classes.keys() | now.classes.keys()
        },
    )


def _largest_of_class(was: ClassCounters, now: ClassCounters) -> ClassCounters:
    return ClassCounters(
        good=max(was.good, now.good),
        total=max(was.total, now.total),
        ttft=was.ttft + _since(now.ttft, was.ttft),
        tpot=was.tpot + _since(now.tpot, was.tpot),
    )


def _same_run(was: RouterCounters, now: RouterCounters) -> bool:
    """True if both counters belong to the same start of the router."""
    return was.epoch == now.epoch and was.arrivals <= now.arrivals


def _before(last: LastReading, uid: str, now: RouterCounters, interval_ns: int) -> RouterCounters:
    """Return the counters of a router at the start of the interval."""
    was = last.routers.get(uid)
    if was is not None and _same_run(was, now):
        return was
    started = was is not None or (now.uptime_ns is not None and now.uptime_ns <= interval_ns)
    # Of a router that started earlier, the part in this interval is not known.
    return _AT_START if started else now


def _load_arrivals(counters: RouterCounters) -> int:
    """Return the arrivals without client errors, which cause hardly any load."""
    return counters.arrivals - counters.client_errors


def _class_counts(
    name: str, counters: Iterable[tuple[RouterCounters, RouterCounters]]
) -> tuple[ClassWindow, Attained]:
    ttft, tpot = TargetCounts(), TargetCounts()
    good = total = 0
    for now, was in counters:
        after = now.classes.get(name, _NOTHING)
        before = was.classes.get(name, _NOTHING)
        ttft += _since(after.ttft, before.ttft)
        tpot += _since(after.tpot, before.tpot)
        good += max(0, after.good - before.good)
        total += max(0, after.total - before.total)
    window = ClassWindow(name=name, ttft=ttft, tpot=tpot)
    return window, Attained(name=name, good=good, total=total)


def _since(after: TargetCounts, before: TargetCounts) -> TargetCounts:
    return TargetCounts(
        judged=max(0, after.judged - before.judged),
        missed=max(0, after.missed - before.missed),
        close=max(0, after.close - before.close),
    )


def _engine(last: LastReading | None, scrape: EngineScrape) -> EngineReading:
    name, uid, now = scrape.target.name, scrape.target.uid, scrape.counters
    if now is None:
        return EngineReading(name=name, signal=scrape.signal)
    was = _same_start(last, uid, now)
    return EngineReading(
        name=name,
        signal=scrape.signal,
        state=now.state,
        preemptions=0 if was is None else max(0, now.state.preemptions - was.state.preemptions),
        settled=now.settled,
        token_bounds=now.token_bounds,
        max_width=now.max_width,
        device=now.device,
    )


def _same_start(last: LastReading | None, uid: str, now: EngineCounters) -> EngineCounters | None:
    """Return the last counters if they belong to the same start of the engine, else None."""
    was = None if last is None else last.engines.get(uid)
    return was if was is not None and was.epoch == now.epoch else None


def _finished(last: LastReading, engines: Iterable[EngineScrape]) -> LengthMix:
    """Return the lengths of the requests that finished since the last reading."""
    bins = (
        _bins_since(now.answered, was.answered)
        for scrape in engines
        if (now := scrape.counters) is not None
        and (was := _same_start(last, scrape.target.uid, now)) is not None
    )
    return LengthMix.of(chain.from_iterable(bins))


def _bins_since(after: Iterable[LengthBin], before: Iterable[LengthBin]) -> Iterable[LengthBin]:
    known = {bin_.key: bin_ for bin_ in before}
    for now in after:
        was = known.get(now.key)
        if was is None:
            yield now
        elif now.requests > was.requests:
            yield LengthBin(
                requests=now.requests - was.requests,
                input_tokens=max(0, now.input_tokens - was.input_tokens),
                cached_tokens=max(0, now.cached_tokens - was.cached_tokens),
                output_tokens=max(0, now.output_tokens - was.output_tokens),
            )
