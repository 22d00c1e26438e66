"""Two cumulative readings to one interval's measures: pure.

Counters begin anew when a process starts, processes come and go, and one that is silent now may
answer later with all that it has counted meanwhile. So a reading of the routers is used as a
whole or not at all: while one that should answer does not, nothing is counted, and the next
whole reading covers the longer interval. Engines are taken one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from goodput_core.contract import ROLE_ENGINE, ROLE_ROUTER
from goodput_core.control import ClassWindow, PromiseCounts, Signal, Traffic
from goodput_core.histogram import LengthBin, LengthMix
from goodput_operator.control.measures import Attained, EngineReading, Measures, Silence
from goodput_operator.measure.readings import ClassCounters, EngineCounters, RouterCounters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from goodput_operator.measure.readings import EngineScrape, Reading, RouterScrape

__all__ = ["Baseline", "measured"]

_NOTHING: Final = ClassCounters()
_AT_START: Final = RouterCounters(
    epoch="", uptime_ns=None, arrivals=0, client_errors=0, in_flight=0, classes={}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The last whole reading, which the next is held against.

    Args:
        at_ns: of that reading.
        routers, engines: the latest counters of each process, by uid.
    """

    at_ns: int
    routers: Mapping[str, RouterCounters]
    engines: Mapping[str, EngineCounters]


def measured(
    baseline: Baseline | None, reading: Reading, *, classes: Sequence[str], interval_ns: int
) -> tuple[Baseline | None, Measures]:
    """What happened since the baseline.

    Args:
        baseline: as returned with the last reading; None: there is none yet.
        reading: the new one.
        classes: the manifest's; others are not counted.
        interval_ns: how long an interval should be, where no baseline tells how long it was.

    Returns:
        The baseline of the next interval, and the measures of this one.
    """
    signal = _signal(baseline, reading)
    engines = tuple(_engine(baseline, scrape) for scrape in reading.engines)
    silent = (*_silent(ROLE_ROUTER, reading.routers), *_silent(ROLE_ENGINE, reading.engines))
    if baseline is None or signal is not Signal.FRESH:
        if baseline is None and signal is Signal.FRESH:
            baseline, signal = _advanced(None, reading), Signal.MISSING
        return baseline, Measures(
            interval_ns=interval_ns,
            traffic=Traffic(signal=signal),
            attained=tuple(Attained(name=name, good=0, total=0) for name in classes),
            engines=engines,
            silent=silent,
        )
    interval_ns = reading.at_ns - baseline.at_ns
    grown = [
        (scrape.counters, _before(baseline, scrape.source.uid, scrape.counters, interval_ns))
        for scrape in reading.routers
        if scrape.counters is not None
    ]
    windows = [_class(name, grown) for name in classes]
    return _advanced(baseline, reading), Measures(
        interval_ns=interval_ns,
        traffic=Traffic(
            signal=Signal.FRESH,
            arrivals=max(0, sum(_came(now) - _came(was) for now, was in grown)),
            in_flight=sum(now.in_flight for now, _ in grown),
            finished=_finished(baseline, reading.engines),
        ),
        classes=tuple(window for window, _ in windows if window.ttft.judged or window.tpot.judged),
        attained=tuple(attained for _, attained in windows),
        engines=engines,
        silent=silent,
    )


def _signal(baseline: Baseline | None, reading: Reading) -> Signal:
    asked = [scrape for scrape in reading.routers if scrape.source.ready]
    if any(scrape.signal is Signal.FAILED for scrape in asked):
        return Signal.FAILED
    if not asked or any(scrape.signal is Signal.MISSING for scrape in asked):
        return Signal.MISSING
    if baseline is not None and reading.at_ns <= baseline.at_ns:
        return Signal.MISSING  # the same numbers once more
    return Signal.FRESH


def _silent(role: str, scrapes: Iterable[RouterScrape | EngineScrape]) -> Iterator[Silence]:
    for scrape in scrapes:
        source = scrape.source
        if source.ready and scrape.signal is not Signal.FRESH:
            detail = scrape.detail
            yield Silence(role=role, pod=source.name, signal=scrape.signal, detail=detail)


def _advanced(baseline: Baseline | None, reading: Reading) -> Baseline:
    """The newest counters of every process that is still there."""
    routers = {} if baseline is None else baseline.routers
    engines = {} if baseline is None else baseline.engines
    return Baseline(
        at_ns=reading.at_ns,
        routers={
            scrape.source.uid: counters
            for scrape in reading.routers
            if (counters := _most(routers.get(scrape.source.uid), scrape.counters)) is not None
        },
        engines={
            scrape.source.uid: told
            for scrape in reading.engines
            if (told := scrape.counters or engines.get(scrape.source.uid)) is not None
        },
    )


def _most(was: RouterCounters | None, now: RouterCounters | None) -> RouterCounters | None:
    """All that is known of a router by now.

    A server that takes in its series one by one may lack some for a moment: within one start no
    count falls, so what was known before still holds.
    """
    if was is None or now is None or not _same_run(was, now):
        return now or was
    return replace(
        now,
        client_errors=max(was.client_errors, now.client_errors),
        classes={
            name: _most_of_class(was.classes.get(name, _NOTHING), now.classes.get(name, _NOTHING))
            for name in was.classes.keys() | now.classes.keys()
        },
    )


def _most_of_class(was: ClassCounters, now: ClassCounters) -> ClassCounters:
    return ClassCounters(
        good=max(was.good, now.good),
        total=max(was.total, now.total),
        ttft=was.ttft + _since(now.ttft, was.ttft),
        tpot=was.tpot + _since(now.tpot, was.tpot),
    )


def _same_run(was: RouterCounters, now: RouterCounters) -> bool:
    """Whether a router has not started again in between."""
    return was.epoch == now.epoch and was.arrivals <= now.arrivals


def _before(baseline: Baseline, uid: str, now: RouterCounters, interval_ns: int) -> RouterCounters:
    """What a router had counted when the interval began."""
    was = baseline.routers.get(uid)
    if was is not None and _same_run(was, now):
        return was
    began_since = was is not None or (now.uptime_ns is not None and now.uptime_ns <= interval_ns)
    if began_since:
        return _AT_START
    return now  # how much of its count is of this interval nobody knows


def _came(counters: RouterCounters) -> int:
    """Requests that are demand: what is the client's own fault costs next to nothing."""
    return counters.arrivals - counters.client_errors


def _class(
    name: str, grown: Iterable[tuple[RouterCounters, RouterCounters]]
) -> tuple[ClassWindow, Attained]:
    ttft, tpot = PromiseCounts(), PromiseCounts()
    good = total = 0
    for now, was in grown:
        after = now.classes.get(name, _NOTHING)
        before = was.classes.get(name, _NOTHING)
        ttft += _since(after.ttft, before.ttft)
        tpot += _since(after.tpot, before.tpot)
        good += max(0, after.good - before.good)
        total += max(0, after.total - before.total)
    window = ClassWindow(name=name, ttft=ttft, tpot=tpot)
    return window, Attained(name=name, good=good, total=total)


def _since(after: PromiseCounts, before: PromiseCounts) -> PromiseCounts:
    return PromiseCounts(
        judged=max(0, after.judged - before.judged),
        missed=max(0, after.missed - before.missed),
        close=max(0, after.close - before.close),
    )


def _engine(baseline: Baseline | None, scrape: EngineScrape) -> EngineReading:
    pod, uid, now = scrape.source.name, scrape.source.uid, scrape.counters
    if now is None:
        return EngineReading(pod=pod, signal=scrape.signal)
    was = _same_start(baseline, uid, now)
    return EngineReading(
        pod=pod,
        signal=scrape.signal,
        limits_revision=now.limits_revision,
        paced=now.paced,
        running=now.running,
        waiting=now.waiting,
        kv_used_blocks=now.kv_used_blocks,
        kv_total_blocks=now.kv_total_blocks,
        preemptions=0 if was is None else max(0, now.preemptions - was.preemptions),
        token_budget=now.token_budget,
        max_num_seqs=now.max_num_seqs,
        safety_percent=now.safety_percent,
        token_bounds=now.token_bounds,
        most_seqs=now.most_seqs,
        settled=now.settled,
        device=now.device,
    )


def _same_start(baseline: Baseline | None, uid: str, now: EngineCounters) -> EngineCounters | None:
    """What the same start of an engine had counted; None: it is not known."""
    was = None if baseline is None else baseline.engines.get(uid)
    return was if was is not None and was.epoch == now.epoch else None


def _finished(baseline: Baseline, engines: Iterable[EngineScrape]) -> LengthMix:
    """Lengths of what was answered since the baseline; an engine not known then adds none."""
    bins = (
        _bins_since(now.answered, was.answered)
        for scrape in engines
        if (now := scrape.counters) is not None
        and (was := _same_start(baseline, scrape.source.uid, now)) is not None
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
