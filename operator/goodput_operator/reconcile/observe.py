"""From what is known of the cluster to one frozen snapshot of one service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from goodput_core.units import NS_PER_S
from goodput_operator.kube.cache import trim
from goodput_operator.kube.client import Refusal
from goodput_operator.kube.objects import KINDS, controlled_by
from goodput_operator.reconcile.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_operator.control.measures import Measures
    from goodput_operator.kube.cache import Cache, Key
    from goodput_operator.kube.client import Client
    from goodput_operator.kube.fence import Clock
    from goodput_operator.kube.objects import Object
    from goodput_operator.reconcile.record import Record

__all__ = ["Measure", "Observer"]


class Measure(Protocol):
    """Whoever gathers numbers from routers and engines."""

    async def measure(
        self, service: Object, pods: Sequence[Object], now_ns: int
    ) -> Measures | None:
        """The interval that has just ended; None: it is not over."""
        ...

    def forget(self, uid: str) -> None:
        """A service is gone."""
        ...


class Observer:
    """Makes snapshots.

    Args:
        cache: the watched objects.
        client: for the few that are not watched.
        measure: for the numbers.
        clock: both times.
    """

    def __init__(self, *, cache: Cache, client: Client, measure: Measure, clock: Clock) -> None:
        self._cache = cache
        self._client = client
        self._measure = measure
        self._clock = clock

    async def observe(self, key: Key, service: Object, record: Record) -> Snapshot:
        """One service and all that stands around it, now.

        Args:
            key: of the service.
            service: as the cache has it.
            record: of the service; objects of others that are gone leave it.
        """
        children = self._cache.children(key)
        pods = self._cache.pods(key)
        known = {(child["kind"], child["metadata"]["name"]) for child in children}
        foreign = [
            body
            for (kind, name), body in (await self._foreign(key, record)).items()
            if (kind, name) not in known
        ]
        measures = await self._measure.measure(service, pods, self._clock.now_ns())
        return Snapshot(
            now_ns=self._clock.now_ns(),
            unix_s=self._clock.unix_ns() // NS_PER_S,
            service=_newest(service, record),
            objects=(*children, *foreign),
            pods=pods,
            measures=measures,
            memory=record.memory,
            failures=record.failures,
            delayed=record.delayed,
        )

    async def _foreign(self, key: Key, record: Record) -> dict[tuple[str, str], Object]:
        """Objects of others in our places: looked at again, for they are not watched."""
        for (kind, name), _ in list(record.foreign.items()):
            answer = await self._client.read(KINDS[kind], key[0], name)
            if isinstance(answer, Refusal):
                if answer.not_found:
                    del record.foreign[kind, name]
            elif controlled_by(answer, record.uid):
                del record.foreign[kind, name]
            else:
                record.foreign[kind, name] = trim(answer)
        return record.foreign


def _newest(service: Object, record: Record) -> Object:
    """The service with the status that we wrote, where the watch has not brought it yet."""
    written = record.written
    if written is None:
        return service
    seen = int(service["metadata"]["resourceVersion"])
    if seen >= int(written["metadata"]["resourceVersion"]):
        record.written = None
        return service
    return {**service, "status": written.get("status") or {}}
