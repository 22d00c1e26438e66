"""Measures of services over pods, which are scraped at the end of each interval.

This module owns the last reading of each service and makes no decisions. A service whose spec
cannot be decoded is not measured.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from goodput_core.contract import OBJECT_LABEL_ROLE, ROLE_ENGINE, ROLE_ROUTER
from goodput_core.control import Signal
from goodput_core.errors import SpecError
from goodput_core.spec.codec import decode
from goodput_core.spec.llmservice import LLMServiceSpec
from goodput_core.units import NS_PER_S
from goodput_operator.control.measures import LastReading, Measures, measure_interval
from goodput_operator.control.prometheus import failed_scrapes, scrape_prometheus
from goodput_operator.control.readings import RouterScrape, ScrapeTarget, ServiceReading
from goodput_operator.control.window import ServiceWindow
from goodput_operator.kube.objects import Object, admin_url, has_ended, is_ready

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from goodput_operator.control.admin_ports import Scraper
    from goodput_operator.kube.objects import Object

__all__ = ["PodMeasures", "engine_sources", "router_sources"]


@dataclass(slots=True)
class _MeasuredService:
    """State of one service.

    Args:
        generation: generation of the spec that contains the interval.
        interval_ns: the configured interval.
        scraped_ns: time of the last scrape; None before the first one.
        server: URL of the Prometheus server that is scraped instead of the routers; None if the
            routers are scraped.
        last: the last complete reading.
        window: judged requests of the last hour by second.
    """

    generation: int | None
    interval_ns: int
    scraped_ns: int | None = None
    server: str | None = None
    last: LastReading | None = None
    window: ServiceWindow = field(default_factory=ServiceWindow)

    def is_over(self, now_ns: int) -> bool:
        """True if an interval has passed since the last scrape."""
        return self.scraped_ns is None or now_ns - self.scraped_ns >= self.interval_ns


class PodMeasures:
    """Measures services once per interval.

    Args:
        scraper: scrapes the pods.
        prometheus_urls: allowed Prometheus servers.
    """

    def __init__(self, scraper: Scraper, *, prometheus_urls: Container[str]) -> None:
        self._scraper = scraper
        self._prometheus_urls = prometheus_urls
        self._services: dict[str, _MeasuredService] = {}

    async def measure(
        self, service: Object, pods: Sequence[Object], now_ns: int
    ) -> Measures | None:
        """Measure the interval that has just ended; None if none has ended or the spec is unusable.

        Args:
            service: the stored LLMService.
            pods: pods of its routers and engines.
            now_ns: time on a monotonic clock.
        """
        metadata = service["metadata"]
        uid, generation = str(metadata["uid"]), metadata.get("generation")
        known = self._services.get(uid)
        if known is not None and known.generation == generation and not known.is_over(now_ns):
            return None
        spec = _spec(service)
        if spec is None or spec.suspend:
            if known is not None:
                known.window = ServiceWindow()
            return None
        interval_ns = spec.control.interval_seconds * NS_PER_S
        if known is None:
            known = self._services[uid] = _MeasuredService(
                generation=generation, interval_ns=interval_ns
            )
        known.generation, known.interval_ns = generation, interval_ns
        if not known.is_over(now_ns):
            return None
        known.scraped_ns = now_ns
        server = spec.control.prometheus
        url = None if server is None else server.url
        if url != known.server:
            # The new source has another clock, so earlier readings are not comparable.
            known.server, known.last, known.window = url, None, ServiceWindow()
        (at_ns, routers), engines = await asyncio.gather(
            self._routers(service, pods, url, now_ns, known.window.since()),
            self._scraper.engines(engine_sources(pods)),
        )
        classes = tuple(spec.slo.by_name())
        known.last, measures = measure_interval(
            known.last,
            ServiceReading(at_ns=at_ns, routers=routers, engines=engines),
            classes=classes,
            interval_ns=interval_ns,
        )
        if url is None:
            known.window.add(routers, at_ns)
            ready = [one.counters for one in routers if one.source.ready]
            complete = bool(ready) and all(c is not None and c.seconds is not None for c in ready)
        else:
            # A Prometheus server has no per-second counts.
            complete = measures.traffic.signal is Signal.FRESH
            if complete:
                known.window.add_interval(measures.attained, measures.interval_ns, at_ns)
        return replace(measures, seconds=known.window.counts(classes) if complete else None)

    async def _routers(
        self,
        service: Object,
        pods: Sequence[Object],
        server: str | None,
        now_ns: int,
        since: Mapping[str, int],
    ) -> tuple[int, tuple[RouterScrape, ...]]:
        sources = router_sources(pods)
        if server is None:
            return now_ns, await self._scraper.routers(sources, since)
        if server not in self._prometheus_urls:
            return now_ns, failed_scrapes(sources, f"the operator may not scrape {server}")
        metadata = service["metadata"]
        return await scrape_prometheus(
            self._scraper.session,
            server,
            llmservice=str(metadata["name"]),
            namespace=str(metadata.get("namespace", "default")),
            sources=sources,
        )

    def forget(self, uid: str) -> None:
        """Remove the state of a deleted service."""
        self._services.pop(uid, None)


def _spec(service: Object) -> LLMServiceSpec | None:
    try:
        return decode(LLMServiceSpec, service.get("spec"), "spec")
    except SpecError:
        return None


def router_sources(pods: Iterable[Object]) -> tuple[ScrapeTarget, ...]:
    """Return the routers that have an address; ready routers must respond."""
    return _sources(pods, ROLE_ROUTER)


def engine_sources(pods: Iterable[Object]) -> tuple[ScrapeTarget, ...]:
    """Return the engines that have an address."""
    return _sources(pods, ROLE_ENGINE)


def _sources(pods: Iterable[Object], role: str) -> tuple[ScrapeTarget, ...]:
    found = (
        _source(pod)
        for pod in pods
        if (pod["metadata"].get("labels") or {}).get(OBJECT_LABEL_ROLE) == role
    )
    return tuple(source for source in found if source is not None)


def _source(pod: Object) -> ScrapeTarget | None:
    metadata, url = pod["metadata"], admin_url(pod)
    if url is None or has_ended(pod):
        return None
    return ScrapeTarget(
        name=str(metadata["name"]), uid=str(metadata["uid"]), url=url, ready=is_ready(pod)
    )
