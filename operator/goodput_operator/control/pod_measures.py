"""Measures services by scraping their pods at the end of each interval.

This module owns the last reading of each service, and makes no decisions. A service whose spec
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
from goodput_operator.control.prometheus import failed_scrapes, query_prometheus
from goodput_operator.control.readings import RouterScrape, ScrapeTarget, ServiceReading
from goodput_operator.control.window import ServiceWindow
from goodput_operator.kube.objects import (
    admin_url,
    has_ended,
    is_foreign,
    is_ready,
    metrics_url,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from goodput_operator.control.admin_ports import Scraper
    from goodput_operator.kube.objects import Object

__all__ = ["PodMeasures", "engine_targets", "router_targets"]


@dataclass(slots=True)
class _MeasuredService:
    """State of the measurements of one service.

    Args:
        generation: generation of the spec that `interval_ns` was read from; None before the first
            measurement.
        interval_ns: the configured interval.
        scraped_ns: time of the last scrape; None before the first one.
        server: URL of the Prometheus server that is queried instead of the routers; None if the
            routers are scraped.
        last: the last complete reading.
        window: judged requests of the last hour by second.
    """

    generation: int | None = None
    interval_ns: int = 0
    scraped_ns: int | None = None
    server: str | None = None
    last: LastReading | None = None
    window: ServiceWindow = field(default_factory=ServiceWindow)

    def is_over(self, now_ns: int) -> bool:
        """True if the interval since the last scrape is over."""
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
        state = self._services.setdefault(uid, _MeasuredService())
        if state.generation == generation and not state.is_over(now_ns):
            return None
        spec = _spec(service)
        if spec is None or spec.suspend:
            state.window = ServiceWindow()
            return None
        state.generation = generation
        state.interval_ns = spec.control.interval_seconds * NS_PER_S
        if not state.is_over(now_ns):
            return None
        state.scraped_ns = now_ns
        server = spec.control.prometheus
        url = None if server is None else server.url
        if url != state.server:
            # The new source has another clock, so earlier readings cannot be compared with it.
            state.server, state.last, state.window = url, None, ServiceWindow()
        (at_ns, routers), engines = await asyncio.gather(
            self._routers(service, pods, url, now_ns, state.window.since()),
            self._scraper.engines(engine_targets(pods)),
        )
        classes = tuple(spec.slo.by_name())
        state.last, measures = measure_interval(
            state.last,
            ServiceReading(at_ns=at_ns, routers=routers, engines=engines),
            classes=classes,
            interval_ns=state.interval_ns,
        )
        if url is None:
            state.window.add(routers, at_ns)
            ready = [router.counters for router in routers if router.target.ready]
            complete = bool(ready) and all(c is not None and c.seconds is not None for c in ready)
        else:
            # A Prometheus server has no per-second counts.
            complete = measures.traffic.signal is Signal.FRESH
            if complete:
                state.window.add_interval(measures.outcomes, measures.interval_ns, at_ns)
        return replace(measures, seconds=state.window.counts(classes) if complete else None)

    async def _routers(
        self,
        service: Object,
        pods: Sequence[Object],
        server: str | None,
        now_ns: int,
        since: Mapping[str, int],
    ) -> tuple[int, tuple[RouterScrape, ...]]:
        targets = router_targets(pods)
        if server is None:
            return now_ns, await self._scraper.routers(targets, since)
        if server not in self._prometheus_urls:
            return now_ns, failed_scrapes(targets, f"the operator is not allowed to query {server}")
        metadata = service["metadata"]
        return await query_prometheus(
            self._scraper.session,
            server,
            llmservice=str(metadata["name"]),
            namespace=str(metadata.get("namespace", "default")),
            targets=targets,
        )

    def forget(self, uid: str) -> None:
        """Remove the state of a deleted service."""
        self._services.pop(uid, None)


def _spec(service: Object) -> LLMServiceSpec | None:
    try:
        return decode(LLMServiceSpec, service.get("spec"), "spec")
    except SpecError:
        return None


def router_targets(pods: Iterable[Object]) -> tuple[ScrapeTarget, ...]:
    """Return the routers that have an address; only ready routers must respond."""
    return _targets(pods, ROLE_ROUTER)


def engine_targets(pods: Iterable[Object]) -> tuple[ScrapeTarget, ...]:
    """Return the engines that have an address."""
    return _targets(pods, ROLE_ENGINE)


def _targets(pods: Iterable[Object], role: str) -> tuple[ScrapeTarget, ...]:
    of_role = (
        pod
        for pod in pods
        if (pod["metadata"].get("labels") or {}).get(OBJECT_LABEL_ROLE) == role
        and not has_ended(pod)
    )
    return tuple(target for pod in of_role if (target := _target(pod, role)) is not None)


def _target(pod: Object, role: str) -> ScrapeTarget | None:
    """Return the target of a pod; None if the pod has no address yet."""
    foreign = role == ROLE_ENGINE and is_foreign(pod)
    url = metrics_url(pod) if foreign else admin_url(pod)
    if url is None:
        return None
    return ScrapeTarget(
        name=str(pod["metadata"]["name"]),
        uid=str(pod["metadata"]["uid"]),
        url=url,
        ready=is_ready(pod),
        foreign=foreign,
    )
