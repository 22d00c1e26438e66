"""The cases of one run: a simulated service, a window, and the longest outage of the service.

The cases were chosen before the code of the interval was read. The interval was not tried on the
cases with `late=True` until it was final.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.simulated.processes import (
    Arrivals,
    Constant,
    CorrelatedLatency,
    Lengths,
    LoadBursts,
    Outages,
    PartOfWindow,
    Process,
    Ramp,
    Service,
)
from benchmarks.simulated.queues import Bursts, Queue
from benchmarks.simulated.sessions import CausalSessions

__all__ = ["CASES", "Case"]

MINUTE: Final = 60
HOUR: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A service and a window.

    Args:
        name: name of the row.
        process: the service and its load.
        seconds: length of the window.
        outage_s: longest period over which misses depend on each other, rounded up: the longest
            outage; three times the mean if lengths are exponential; three correlation times of a
            latency; for a queue, the lag at which the autocorrelation of misses falls below 5 %.
            0 if requests miss independently, None if the length has no useful bound.
        late: True if the interval was not tried on this case until it was final.
    """

    name: str
    process: Process
    seconds: int
    outage_s: int | None
    late: bool = False


def _fixed(mean_s: float) -> Lengths:
    return Lengths(kind="fixed", mean_s=mean_s)


def _uniform(mean_s: float) -> Lengths:
    return Lengths(kind="uniform", mean_s=mean_s)


def _exponential(mean_s: float) -> Lengths:
    return Lengths(kind="exponential", mean_s=mean_s)


def _poisson(per_s: float, miss: float) -> Service:
    return Service(arrivals=Arrivals(per_s=per_s), chance=Constant(miss=miss))


def _outages(per_s: float, miss: float, lengths: Lengths) -> Service:
    return Service(arrivals=Arrivals(per_s=per_s), chance=Outages(miss=miss, lengths=lengths))


def _batches(per_s: float, batch: int, miss: float, lengths: Lengths) -> Service:
    return Service(
        arrivals=Arrivals(per_s=per_s, batch=batch, regular=True),
        chance=Outages(miss=miss, lengths=lengths),
    )


def _latency(per_s: float, miss: float, memory_s: float, common: float) -> Service:
    return Service(
        arrivals=Arrivals(per_s=per_s),
        chance=CorrelatedLatency(miss=miss, memory_s=memory_s, common=common),
    )


def _case(
    name: str, seconds: int, outage_s: int | None, process: Process, *, late: bool = False
) -> Case:
    return Case(name=name, process=process, seconds=seconds, outage_s=outage_s, late=late)


_INDEPENDENT: Final = (
    _case("independent, 5/s, 99 %", 300, 0, _poisson(5, 0.01)),
    _case("independent, 50/s, 99 %", 300, 0, _poisson(50, 0.01)),
    _case("independent, 5/s, 90 %, 1 min", 60, 0, _poisson(5, 0.1)),
    _case("independent, 10/s, 99.9 %, 1 h", HOUR, 0, _poisson(10, 0.001), late=True),
    _case(
        "independent, regular 2/s, 95 %, 15 min",
        900,
        0,
        Service(arrivals=Arrivals(per_s=2, regular=True), chance=Constant(miss=0.05)),
    ),
    _case("10 requests, 80 %, 1 min", 60, 0, _poisson(1 / 6, 0.2)),
    _case("10 requests, 90 %, 1 h", HOUR, 0, _poisson(1 / 360, 0.1), late=True),
    _case("20 requests, 90 %, 1 min", 60, 0, _poisson(1 / 3, 0.1)),
    _case("30 requests, 90 %", 300, 0, _poisson(0.1, 0.1)),
    _case("50 requests, 95 %", 300, 0, _poisson(1 / 6, 0.05)),
    _case("100 requests, 95 %, 15 min", 900, 0, _poisson(1 / 9, 0.05)),
    _case("300 requests, 98 %", 300, 0, _poisson(1, 0.02), late=True),
    _case("300 requests, 99 %, 1 h", HOUR, 0, _poisson(1 / 12, 0.01)),
    _case(
        "misses 0.2 %, then 1.8 %",
        300,
        0,
        Service(arrivals=Arrivals(per_s=20), chance=Ramp(first=0.002, last=0.018, sudden=True)),
    ),
    _case(
        "misses 15 %, then 5 %, 15 min",
        900,
        0,
        Service(arrivals=Arrivals(per_s=5), chance=Ramp(first=0.15, last=0.05, sudden=True)),
        late=True,
    ),
    _case(
        "misses rise from 0 to 2 %",
        300,
        0,
        Service(arrivals=Arrivals(per_s=50), chance=Ramp(first=0.0, last=0.02, sudden=False)),
    ),
    _case(
        "20 requests at once, 10/s, 95 %, 15 min",
        900,
        1,
        Service(arrivals=Arrivals(per_s=10, batch=20), chance=Constant(miss=0.05)),
    ),
    _case(
        "5 requests at once, 10/s, 99 %, 1 h",
        HOUR,
        1,
        Service(arrivals=Arrivals(per_s=10, batch=5), chance=Constant(miss=0.01)),
        late=True,
    ),
)

_FULL_OUTAGES: Final = (
    _case("outages of 3 s, 20/s, 90 %, 1 min", 60, 3, _outages(20, 0.1, _fixed(3))),
    _case(
        "outages of 3 s, 20/s, 90 %, one minute of an hour",
        HOUR,
        3,
        PartOfWindow(process=_outages(20, 0.1, _fixed(3)), busy_s=60),
        late=True,
    ),
    _case("outages of 1.5 to 4.5 s, 5/s, 90 %", 300, 5, _outages(5, 0.1, _uniform(3))),
    _case("outages of 3 s, 5/s, 99 %, 15 min", 900, 3, _outages(5, 0.01, _fixed(3))),
    _case("outages of 3 s, 20/s, 95 %, 15 min", 900, 3, _outages(20, 0.05, _fixed(3)), late=True),
    _case("outages of 3 s, 5/s, 99 %, 1 h", HOUR, 3, _outages(5, 0.01, _fixed(3))),
    _case("outages around 3 s, 5/s, 99.5 %, 1 h", HOUR, 9, _outages(5, 0.005, _exponential(3))),
    _case("outages of 3 s, 50/s, 99.9 %, 1 h", HOUR, 3, _outages(50, 0.001, _fixed(3))),
    _case("outages of 1 s, 50/s, 99.9 %, 1 h", HOUR, 1, _outages(50, 0.001, _fixed(1)), late=True),
    _case("outages of 5 to 15 s, 5/s, 90 %, 15 min", 900, 15, _outages(5, 0.1, _uniform(10))),
    _case("outages of 10 s, 50/s, 99 %, 1 h", HOUR, 10, _outages(50, 0.01, _fixed(10))),
    _case(
        "outages around 10 s, 2/s, 95 %, 1 h",
        HOUR,
        30,
        _outages(2, 0.05, _exponential(10)),
        late=True,
    ),
    _case("outages of 30 s, 5/s, 95 %, 1 h", HOUR, 30, _outages(5, 0.05, _fixed(30))),
    _case("outages around 30 s, 5/s, 90 %, 1 h", HOUR, 90, _outages(5, 0.1, _exponential(30))),
    _case("outages of 60 s, 5/s, 90 %, 1 h", HOUR, 60, _outages(5, 0.1, _fixed(60))),
    _case(
        "outages of 30 to 90 s, 20/s, 95 %, 1 h",
        HOUR,
        90,
        _outages(20, 0.05, _uniform(60)),
        late=True,
    ),
    _case("outages of 10 s, 20/s, 90 %, 1 min", 60, 10, _outages(20, 0.1, _fixed(10))),
    _case("30 requests, outages of 3 s, 90 %", 300, 3, _outages(0.1, 0.1, _fixed(3))),
    _case(
        "100 requests, outages of 10 s, 90 %, 15 min",
        900,
        10,
        _outages(1 / 9, 0.1, _fixed(10)),
        late=True,
    ),
    _case("300 requests, outages of 30 s, 95 %, 1 h", HOUR, 30, _outages(1 / 12, 0.05, _fixed(30))),
    _case(
        "300 requests at once each minute, outages of 3 s, 99 %, 15 min",
        900,
        3,
        _batches(5, 300, 0.01, _fixed(3)),
    ),
    _case(
        "60 requests at once each minute, outages of 10 s, 90 %, 1 h",
        HOUR,
        10,
        _batches(1, 60, 0.1, _fixed(10)),
        late=True,
    ),
    _case(
        "30 requests at once each 10 s, outages of 3 s, 98 %, 1 h",
        HOUR,
        3,
        _batches(3, 30, 0.02, _fixed(3)),
        late=True,
    ),
)

_OTHER_OUTAGES: Final = (
    _case(
        "a quarter misses for 30 s, 20/s, 99 %, 1 h",
        HOUR,
        30,
        Service(
            arrivals=Arrivals(per_s=20), chance=Outages(miss=0.01, lengths=_fixed(30), lost=0.25)
        ),
    ),
    _case(
        "80 % miss for 5 to 15 s, else 0.1 %, 10/s, 99 %, 1 h",
        HOUR,
        15,
        Service(
            arrivals=Arrivals(per_s=10),
            chance=Outages(miss=0.01, lengths=_uniform(10), lost=0.8, base=0.001),
        ),
    ),
    _case(
        "half misses for 3 s, else 0.2 %, 50/s, 99 %, 15 min",
        900,
        3,
        Service(
            arrivals=Arrivals(per_s=50),
            chance=Outages(miss=0.01, lengths=_fixed(3), lost=0.5, base=0.002),
        ),
        late=True,
    ),
    _case(
        "3 s every minute, 5/s, 95 %, 15 min",
        900,
        3,
        Service(
            arrivals=Arrivals(per_s=5), chance=Outages(miss=0.05, lengths=_fixed(3), gaps="fixed")
        ),
    ),
    _case(
        "storms of outages of 3 s, 5/s, 98 %, 1 h",
        HOUR,
        None,
        Service(
            arrivals=Arrivals(per_s=5), chance=Outages(miss=0.02, lengths=_fixed(3), gaps="pareto")
        ),
    ),
    _case(
        "outages of 10 s, load 1 to 19/s, 95 %, 1 h",
        HOUR,
        10,
        Service(
            arrivals=Arrivals(per_s=10, swing=0.9), chance=Outages(miss=0.05, lengths=_fixed(10))
        ),
    ),
    _case(
        "outages of 3 s, load 1 to 19/s, 98 %, 15 min",
        900,
        3,
        Service(
            arrivals=Arrivals(per_s=10, swing=0.9), chance=Outages(miss=0.02, lengths=_fixed(3))
        ),
        late=True,
    ),
    _case(
        "Pareto outages, at least 2 s, 5/s, 95 %, 1 h",
        HOUR,
        None,
        _outages(5, 0.05, Lengths(kind="pareto", mean_s=2, exponent=1.5)),
    ),
    _case(
        "Pareto outages, 2 to 60 s, 5/s, 95 %, 1 h",
        HOUR,
        60,
        _outages(5, 0.05, Lengths(kind="pareto", mean_s=2, exponent=1.5, longest_s=60)),
    ),
    _case(
        "Pareto outages, 1 to 30 s, 20/s, 90 %, 15 min",
        900,
        30,
        _outages(20, 0.1, Lengths(kind="pareto", mean_s=1, exponent=1.1, longest_s=30)),
        late=True,
    ),
    _case(
        "bursts of 3 s, 25/s, 30 % miss, else 5/s, 15 min",
        900,
        3,
        LoadBursts(per_s=5, burst_per_s=25, every_s=60, lengths=_fixed(3), base=0.002, lost=0.3),
    ),
    _case(
        "bursts around 10 s, 40/s, 60 % miss, else 2/s, 1 h",
        HOUR,
        30,
        LoadBursts(
            per_s=2, burst_per_s=40, every_s=300, lengths=_exponential(10), base=0.0, lost=0.6
        ),
        late=True,
    ),
)

_LATENCIES: Final = (
    _case("latency, memory 2 s, half common, 5/s, 99 %", 300, 6, _latency(5, 0.01, 2, 0.5)),
    _case("latency, memory 5 s, 80 % common, 50/s, 90 %, 1 min", 60, 15, _latency(50, 0.1, 5, 0.8)),
    _case(
        "latency, memory 10 s, 90 % common, 20/s, 95 %, 15 min",
        900,
        30,
        _latency(20, 0.05, 10, 0.9),
    ),
    _case(
        "latency, memory 10 s, half common, 5/s, 99.9 %, 1 h",
        HOUR,
        30,
        _latency(5, 0.001, 10, 0.5),
        late=True,
    ),
    _case(
        "latency, memory 20 s, 60 % common, 20/s, 95 %",
        300,
        60,
        _latency(20, 0.05, 20, 0.6),
        late=True,
    ),
    _case(
        "latency, memory 30 s, 95 % common, 10/s, 99 %, 1 h", HOUR, 90, _latency(10, 0.01, 30, 0.95)
    ),
    _case(
        "latency, memory 60 s, 70 % common, 5/s, 90 %, 15 min", 900, 180, _latency(5, 0.1, 60, 0.7)
    ),
    _case(
        "latency, memory 60 s, 70 % common, 5/s, 95 %, 1 h",
        HOUR,
        180,
        _latency(5, 0.05, 60, 0.7),
        late=True,
    ),
)

_QUEUES: Final = (
    _case(
        "M/M/1, 70 % busy, 7/s, 95 %, 15 min",
        900,
        8,
        Queue.erlang(servers=1, service_s=0.1, busy=0.7, miss=0.05),
    ),
    _case(
        "M/M/1, 90 % busy, 9/s, 90 %",
        300,
        60,
        Queue.erlang(servers=1, service_s=0.1, busy=0.9, miss=0.1),
    ),
    _case(
        "M/M/2, 90 % busy, 9/s, 90 %",
        300,
        60,
        Queue.erlang(servers=2, service_s=0.2, busy=0.9, miss=0.1),
        late=True,
    ),
    _case(
        "M/M/8, 85 % busy, 6.8/s, 99 %, 1 h",
        HOUR,
        40,
        Queue.erlang(servers=8, service_s=1.0, busy=0.85, miss=0.01),
        late=True,
    ),
    _case(
        "M/G/4, long services, 80 % busy, 8/s, 95 %, 15 min",
        900,
        60,
        Queue(
            servers=4,
            service_s=0.4,
            busy=0.8,
            limit_s=3.0,
            service="lognormal",
            miss=0.0506,
            miss_error=0.0004,
        ),
    ),
    _case(
        "M/D/2, 90 % busy, 9/s, 99 %, 1 h",
        HOUR,
        35,
        Queue(
            servers=2,
            service_s=0.2,
            busy=0.9,
            limit_s=2.2,
            service="fixed",
            miss=0.0095,
            miss_error=0.0001,
        ),
    ),
    _case(
        "MMPP/M/2, bursts of 5 s at 130 %, 95 %, 1 h",
        HOUR,
        35,
        Queue(
            servers=2,
            service_s=0.2,
            busy=0.6,
            limit_s=2.9,
            bursts=Bursts(busy=1.3, every_s=60, mean_s=5),
            miss=0.0504,
            miss_error=0.0003,
        ),
    ),
    _case(
        "MMPP/G/4, bursts of 4 s at 200 %, 95 %, 1 h",
        HOUR,
        45,
        Queue(
            servers=4,
            service_s=0.4,
            busy=0.5,
            limit_s=5.4,
            service="lognormal",
            bursts=Bursts(busy=2.0, every_s=120, mean_s=4),
            miss=0.0526,
            miss_error=0.0004,
        ),
        late=True,
    ),
)

_SESSIONS: Final = (
    _case(
        "causal sessions, outages of 10 s, 5/s, 95 %, 1 h",
        HOUR,
        10,
        CausalSessions(per_s=5, requests=8, think_s=10, outage_s=10, miss=0.05),
        late=True,
    ),
    _case(
        "causal sessions, outages of 30 s, 2/s, 90 %, 1 h",
        HOUR,
        30,
        CausalSessions(per_s=2, requests=5, think_s=40, outage_s=30, miss=0.1),
        late=True,
    ),
    _case(
        "causal sessions, outages of 3 s, 20/s, 99 %, 15 min",
        900,
        3,
        CausalSessions(per_s=20, requests=20, think_s=5, outage_s=3, miss=0.01),
        late=True,
    ),
)

CASES: Final = (
    *_INDEPENDENT,
    *_FULL_OUTAGES,
    *_OTHER_OUTAGES,
    *_LATENCIES,
    *_QUEUES,
    *_SESSIONS,
)
