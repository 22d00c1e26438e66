"""What one reading of a service's routers and engines brought, frozen: counters since a start.

Nothing here knows whether it came from the processes themselves or from a Prometheus server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from goodput_core.control import DeviceCapacity, PromiseCounts, Signal
from goodput_core.histogram import LengthBin

__all__ = [
    "ClassCounters",
    "EngineCounters",
    "EngineScrape",
    "Reading",
    "RouterCounters",
    "RouterScrape",
    "Source",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One process that can be asked.

    Args:
        name: of its pod or process.
        uid: tells it from its successor of the same name.
        url: of its admin port.
        ready: whether it must answer: that one which starts or ends is silent says nothing.
    """

    name: str
    uid: str
    url: str
    ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCounters:
    """One class at one router, since its start.

    Args:
        good: requests that attained.
        total: requests in the denominator: attained, missed, shed, error and timeout.
        ttft, tpot: how the two promises fared.
    """

    good: int = 0
    total: int = 0
    ttft: PromiseCounts = field(default_factory=PromiseCounts)
    tpot: PromiseCounts = field(default_factory=PromiseCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCounters:
    """One router, since its start.

    Args:
        epoch: changes with each start; empty: not told.
        uptime_ns: since its start; None: not told.
        arrivals: requests that came.
        client_errors: of these, over and refused for the client's own fault.
        in_flight: requests that have no outcome yet.
        classes: by name.
    """

    epoch: str
    uptime_ns: int | None
    arrivals: int
    client_errors: int
    in_flight: int
    classes: Mapping[str, ClassCounters]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """One engine, since its start.

    Args:
        epoch: changes with each start.
        preemptions: requests sent back to wait.
        answered: lengths of what it answered, summed in bins; each key once.
        limits_revision, paced, running, waiting, kv_used_blocks, kv_total_blocks, token_budget,
            max_num_seqs, safety_percent, token_bounds, most_seqs, settled, device: as in
            `EngineReading`.
    """

    epoch: str
    preemptions: int
    answered: tuple[LengthBin, ...]
    limits_revision: int
    paced: bool
    running: int
    waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    token_budget: int
    max_num_seqs: int | None
    safety_percent: int | None
    token_bounds: tuple[int, int] | None
    most_seqs: int | None
    settled: bool
    device: DeviceCapacity | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterScrape:
    """What became of asking one router.

    Args:
        source: it.
        signal: FRESH with counters; MISSING: it answered without them; FAILED: it did not.
        counters: None unless FRESH.
        detail: what went wrong, for people.
    """

    source: Source
    signal: Signal
    counters: RouterCounters | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineScrape:
    """What became of asking one engine; as `RouterScrape`."""

    source: Source
    signal: Signal
    counters: EngineCounters | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All of a service at one instant.

    Args:
        at_ns: when the counters stood so, on one clock for all readings of the service.
        routers, engines: one scrape each.
    """

    at_ns: int
    routers: tuple[RouterScrape, ...] = ()
    engines: tuple[EngineScrape, ...] = ()
