"""Measures of many services: when one's interval is over, its pods are asked.

The mutable owner of what the next reading is held against. It decides nothing; a service whose
spec cannot be read is not measured.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.errors import SpecError
from goodput_core.spec.codec import decode
from goodput_core.spec.llmservice import LLMServiceSpec
from goodput_core.units import NS_PER_S
from goodput_operator.measure.differencing import Baseline, measured
from goodput_operator.measure.pods import engine_sources, router_sources
from goodput_operator.measure.prometheus import ask_prometheus, unasked
from goodput_operator.measure.readings import Reading, RouterScrape

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from goodput_operator.control.measures import Measures
    from goodput_operator.kube.objects import Object
    from goodput_operator.measure.gathering import Gatherer

__all__ = ["ServiceMeasures"]


@dataclass(slots=True)
class _Kept:
    """Of one service.

    Args:
        generation: of the spec that says how long an interval is; while it stays, so does that.
        interval_ns: that long.
        asked_ns: when its pods were last asked; None: not yet.
        server: the Prometheus server that was asked in place of its routers.
        baseline: what the next reading is held against.
    """

    generation: int | None
    interval_ns: int
    asked_ns: int | None = None
    server: str | None = None
    baseline: Baseline | None = None

    def is_over(self, now_ns: int) -> bool:
        """Whether an interval has passed since its pods were last asked."""
        return self.asked_ns is None or now_ns - self.asked_ns >= self.interval_ns


class ServiceMeasures:
    """Gathers what the control laws look at, once per interval and service.

    Args:
        gatherer: asks the pods.
        prometheus_urls: of the servers that may be asked in place of routers; of others nothing
            is known.
    """

    def __init__(self, gatherer: Gatherer, *, prometheus_urls: Container[str]) -> None:
        self._gatherer = gatherer
        self._prometheus_urls = prometheus_urls
        self._kept: dict[str, _Kept] = {}

    async def measure(
        self, service: Object, pods: Sequence[Object], now_ns: int
    ) -> Measures | None:
        """The interval that has just ended; None: it is not over, or there is nothing to measure.

        Args:
            service: the LLMService as it is stored.
            pods: of its routers and engines.
            now_ns: on a clock that never goes back.
        """
        metadata = service["metadata"]
        uid, generation = str(metadata["uid"]), metadata.get("generation")
        kept = self._kept.get(uid)
        if kept is not None and kept.generation == generation and not kept.is_over(now_ns):
            return None
        spec = _spec(service)
        if spec is None or spec.suspend:
            return None
        interval_ns = spec.control.interval_seconds * NS_PER_S
        if kept is None:
            kept = self._kept[uid] = _Kept(generation=generation, interval_ns=interval_ns)
        kept.generation, kept.interval_ns = generation, interval_ns
        if not kept.is_over(now_ns):
            return None
        kept.asked_ns = now_ns
        server = spec.control.prometheus
        asked = None if server is None else server.url
        if asked != kept.server:
            # Its clock is another one: nothing of before can be compared.
            kept.server, kept.baseline = asked, None
        (at_ns, routers), engines = await asyncio.gather(
            self._routers(service, pods, asked, now_ns),
            self._gatherer.engines(engine_sources(pods)),
        )
        kept.baseline, measures = measured(
            kept.baseline,
            Reading(at_ns=at_ns, routers=routers, engines=engines),
            classes=tuple(spec.slo.by_name()),
            interval_ns=interval_ns,
        )
        return measures

    async def _routers(
        self, service: Object, pods: Sequence[Object], server: str | None, now_ns: int
    ) -> tuple[int, tuple[RouterScrape, ...]]:
        sources = router_sources(pods)
        if server is None:
            return now_ns, await self._gatherer.routers(sources)
        if server not in self._prometheus_urls:
            return now_ns, unasked(sources, f"the operator may not ask {server}")
        metadata = service["metadata"]
        return await ask_prometheus(
            self._gatherer.session,
            server,
            llmservice=str(metadata["name"]),
            namespace=str(metadata.get("namespace", "default")),
            sources=sources,
        )

    def forget(self, uid: str) -> None:
        """A service is gone."""
        self._kept.pop(uid, None)


def _spec(service: Object) -> LLMServiceSpec | None:
    try:
        return decode(LLMServiceSpec, service.get("spec"), "spec")
    except SpecError:
        return None
