"""Measures: one interval of a service, as the difference between two readings.

Counters start at zero with each process. A router that does not respond now may later return
everything it counted in the meantime. Therefore the readings of all routers are used together or
not at all: while a ready router does not respond, nothing is counted, and the next complete reading
covers the longer interval. Engines are measured independently: one that does not respond does not
affect the others. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from goodput_core.contract import ROLE_ENGINE, ROLE_ROUTER
from goodput_core.control import (
    ClassOutcomes,
    ClassWindow,
    EngineReading,
    Signal,
    TargetCounts,
    Traffic,
)
from goodput_core.histogram import LengthBin, LengthMix
from goodput_core.slo.attainment import SecondCounts
from goodput_operator.control.readings import ClassCounters, EngineCounters, RouterCounters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from goodput_operator.control.readings import EngineScrape, RouterScrape, ServiceReading

__all__ = ["LastReading", "Measures", "UnmeasuredPod", "measure_interval"]

_NO_REQUESTS: Final = ClassCounters()
_ZERO: Final = RouterCounters(
    epoch="", uptime_ns=None, arrivals=0, client_errors=0, in_flight=0, classes={}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmeasuredPod:
    """A ready pod without measurements.

    Args:
        role: role of the pod.
        name: name of the pod.
        signal: FAILED if the pod did not respond, MISSING if it responded without measurements.
        detail: message for users.
    """

    role: str
    name: str
    signal: Signal
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """One interval of one service.

    Args:
        interval_ns: length of the interval, above 0.
        traffic: traffic over all routers.
        classes: met and missed targets of the requests that ended in the interval.
        outcomes: outcomes of each class of the manifest.
        seconds: judged requests of the last hour by class and second. None here; `pod_measures`
            adds them if all ready routers returned them.
        engines: one reading for each engine that has an address.
        unmeasured: ready pods without measurements, routers first.
        tenants_problem: the first router that does not use its present file of tenants, and why;
            empty if there is none, None if no router responded.
    """

    interval_ns: int
    traffic: Traffic
    classes: tuple[ClassWindow, ...] = ()
    outcomes: tuple[ClassOutcomes, ...] = ()
    seconds: Mapping[str, SecondCounts] | None = None
    engines: tuple[EngineReading, ...] = ()
    unmeasured: tuple[UnmeasuredPod, ...] = ()
    tenants_problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReading:
    """The last complete reading.

    Args:
        at_ns: time of the reading.
        routers, engines: latest counters of each process by uid.
    """

    at_ns: int
    routers: Mapping[str, RouterCounters]
    engines: Mapping[str, EngineCounters]


def measure_interval(
    last: LastReading | None, reading: ServiceReading, *, classes: Sequence[str], interval_ns: int
) -> tuple[LastReading | None, Measures]:
    """Return the difference between a reading and the last one.

    Args:
        last: the last complete reading; None if there is none yet.
        reading: the new reading.
        classes: classes of the manifest; other classes are not counted.
        interval_ns: the configured interval, used if there is no last reading.

    Returns:
        The reading to pass as `last` for the next interval, and the measures of this one.
    """
    signal = _signal(last, reading)
    engines = tuple(_engine(last, scrape) for scrape in reading.engines)
    tenants_problem = _tenants_problem(reading.routers)
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
            outcomes=tuple(ClassOutcomes(name=name, good=0, total=0) for name in classes),
            engines=engines,
            unmeasured=unmeasured,
            tenants_problem=tenants_problem,
        )
    interval_ns = reading.at_ns - last.at_ns
    pairs = [
        (_counters_at_start(last, scrape.target.uid, scrape.counters, interval_ns), scrape.counters)
        for scrape in reading.routers
        if scrape.counters is not None
    ]
    windows = [_class_counts(name, pairs) for name in classes]
    return _latest(last, reading), Measures(
        interval_ns=interval_ns,
        traffic=Traffic(
            signal=Signal.FRESH,
            arrivals=max(
                0, sum(_load_arrivals(end) - _load_arrivals(start) for start, end in pairs)
            ),
            in_flight=sum(end.in_flight for _, end in pairs),
            finished=_finished(last, reading.engines),
        ),
        classes=tuple(window for window, _ in windows if window.ttft.judged or window.tpot.judged),
        outcomes=tuple(outcomes for _, outcomes in windows),
        engines=engines,
        unmeasured=unmeasured,
        tenants_problem=tenants_problem,
    )


def _tenants_problem(routers: Iterable[RouterScrape]) -> str | None:
    found = None
    for scrape in routers:
        if scrape.counters is not None:
            if scrape.counters.tenants_problem:
                return f"router {scrape.target.name}: {scrape.counters.tenants_problem}"
            found = ""
    return found


def _signal(last: LastReading | None, reading: ServiceReading) -> Signal:
    signals = {scrape.signal for scrape in reading.routers if scrape.target.ready}
    if Signal.FAILED in signals:
        return Signal.FAILED
    if not signals or Signal.MISSING in signals:
        return Signal.MISSING
    if last is not None and reading.at_ns <= last.at_ns:
        return Signal.MISSING  # Prometheus has not scraped the routers again
    return Signal.FRESH


def _unmeasured(
    role: str, scrapes: Iterable[RouterScrape | EngineScrape]
) -> Iterator[UnmeasuredPod]:
    for scrape in scrapes:
        has_page = bool(scrape.target.url)  # some other servers have none
        if scrape.target.ready and has_page and scrape.signal is not Signal.FRESH:
            yield UnmeasuredPod(
                role=role, name=scrape.target.name, signal=scrape.signal, detail=scrape.detail
            )


def _latest(last: LastReading | None, reading: ServiceReading) -> LastReading:
    """Return the latest counters of each existing process."""
    routers = {} if last is None else last.routers
    engines = {} if last is None else last.engines
    return LastReading(
        at_ns=reading.at_ns,
        routers={
            # The per-second counts are not kept twice: the service's window stores them.
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


def _largest(earlier: RouterCounters | None, later: RouterCounters | None) -> RouterCounters | None:
    """Return the largest value of each counter of a router.

    A Prometheus server ingests series one by one, so the later counters may lack some series.
    Counters never decrease while the router runs, so the earlier value is a lower bound.
    """
    if earlier is None or later is None or not _same_process(earlier, later):
        return later or earlier
    return replace(
        later,
        client_errors=max(earlier.client_errors, later.client_errors),
        classes={
            name: _largest_of_class(
                earlier.classes.get(name, _NO_REQUESTS), later.classes.get(name, _NO_REQUESTS)
            )
            for name in earlier.classes.keys() | later.classes.keys()
        },
    )


def _largest_of_class(earlier: ClassCounters, later: ClassCounters) -> ClassCounters:
    return ClassCounters(
        good=max(earlier.good, later.good),
        total=max(earlier.total, later.total),
        ttft=earlier.ttft + _increase(earlier.ttft, later.ttft),
        tpot=earlier.tpot + _increase(earlier.tpot, later.tpot),
    )


def _same_process(earlier: RouterCounters, later: RouterCounters) -> bool:
    """True if the router has not restarted between both readings.

    A Prometheus server reports no epoch; a restart then shows in fewer arrivals.
    """
    return earlier.epoch == later.epoch and earlier.arrivals <= later.arrivals


def _counters_at_start(
    last: LastReading, uid: str, now: RouterCounters, interval_ns: int
) -> RouterCounters:
    """Return the counters of a router at the start of the interval."""
    earlier = last.routers.get(uid)
    if earlier is not None and _same_process(earlier, now):
        return earlier
    started = earlier is not None or (now.uptime_ns is not None and now.uptime_ns <= interval_ns)
    # If the router started before the interval, how much it counted within the interval is unknown,
    # so nothing is counted.
    return _ZERO if started else now


def _load_arrivals(counters: RouterCounters) -> int:
    """Return the arrivals without client errors, which cause hardly any load."""
    return counters.arrivals - counters.client_errors


def _class_counts(
    name: str, pairs: Iterable[tuple[RouterCounters, RouterCounters]]
) -> tuple[ClassWindow, ClassOutcomes]:
    """Return the counts of a class from each router's counters at both ends of the interval."""
    ttft, tpot = TargetCounts(), TargetCounts()
    good = total = 0
    for router_start, router_end in pairs:
        start = router_start.classes.get(name, _NO_REQUESTS)
        end = router_end.classes.get(name, _NO_REQUESTS)
        ttft += _increase(start.ttft, end.ttft)
        tpot += _increase(start.tpot, end.tpot)
        good += max(0, end.good - start.good)
        total += max(0, end.total - start.total)
    window = ClassWindow(name=name, ttft=ttft, tpot=tpot)
    return window, ClassOutcomes(name=name, good=good, total=total)


def _increase(start: TargetCounts, end: TargetCounts) -> TargetCounts:
    return TargetCounts(
        judged=max(0, end.judged - start.judged),
        missed=max(0, end.missed - start.missed),
        close=max(0, end.close - start.close),
    )


def _engine(last: LastReading | None, scrape: EngineScrape) -> EngineReading:
    name, uid, now = scrape.target.name, scrape.target.uid, scrape.counters
    if now is None:
        return EngineReading(name=name, signal=scrape.signal, foreign=scrape.target.foreign)
    earlier = _earlier_counters(last, uid, now)
    preempted = 0 if earlier is None else now.state.preemptions - earlier.state.preemptions
    return EngineReading(
        name=name,
        signal=scrape.signal,
        state=now.state,
        preemptions=None if "preemptions" in now.unknown else max(0, preempted),
        token_bounds=now.token_bounds,
        max_width=now.max_width,
        device=now.device,
        foreign=now.foreign,
    )


def _earlier_counters(
    last: LastReading | None, uid: str, now: EngineCounters
) -> EngineCounters | None:
    """Return the last counters of an engine; None if there are none or the engine has restarted."""
    earlier = None if last is None else last.engines.get(uid)
    return earlier if earlier is not None and earlier.epoch == now.epoch else None


def _finished(last: LastReading, engines: Iterable[EngineScrape]) -> LengthMix:
    """Return the lengths of the requests that finished since the last reading."""
    bins = (
        _new_of_server(earlier.lengths, now.lengths)
        if now.foreign
        else _new_requests(earlier.lengths, now.lengths)
        for scrape in engines
        if (now := scrape.counters) is not None
        and (earlier := _earlier_counters(last, scrape.target.uid, now)) is not None
    )
    return LengthMix.of(chain.from_iterable(bins))


def _new_of_server(start: Iterable[LengthBin], end: Iterable[LengthBin]) -> Iterator[LengthBin]:
    """Yield the requests that were added to the single bin of another server."""
    for earlier, later in zip(start, end, strict=False):
        requests = later.requests - earlier.requests
        input_tokens = later.input_tokens - earlier.input_tokens
        output_tokens = later.output_tokens - earlier.output_tokens
        # Fewer of anything: the server has restarted.
        if requests > 0 and input_tokens >= 0 and output_tokens >= 0:
            cached_tokens = max(0, later.cached_tokens - earlier.cached_tokens)
            yield LengthBin(
                requests=requests,
                input_tokens=input_tokens,
                cached_tokens=min(cached_tokens, input_tokens),
                output_tokens=output_tokens,
            )


def _new_requests(start: Iterable[LengthBin], end: Iterable[LengthBin]) -> Iterable[LengthBin]:
    """Yield the requests that were added to each bin of a histogram."""
    start_bins = {bin_.key: bin_ for bin_ in start}
    for end_bin in end:
        start_bin = start_bins.get(end_bin.key)
        if start_bin is None:
            yield end_bin
        elif end_bin.requests > start_bin.requests:
            input_tokens = max(0, end_bin.input_tokens - start_bin.input_tokens)
            cached_tokens = max(0, end_bin.cached_tokens - start_bin.cached_tokens)
            yield LengthBin(
                requests=end_bin.requests - start_bin.requests,
                input_tokens=input_tokens,
                cached_tokens=min(cached_tokens, input_tokens),
                output_tokens=max(0, end_bin.output_tokens - start_bin.output_tokens),
            )
