"""Takes the snapshot of one reconciliation from the cache, the API server and the pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from goodput_core.contract import (
    OBJECT_LABEL_ROLE,
    ROLE_BASELINE,
    ROLE_CANDIDATE,
    ROLE_REPLAY,
)
from goodput_core.units import NS_PER_S
from goodput_operator.kube.cache import trim
from goodput_operator.kube.client import FailedCall
from goodput_operator.kube.objects import KINDS, NODE, Object, admin_url, controlled_by
from goodput_operator.reconcile.actions import Emit
from goodput_operator.reconcile.snapshot import ImagePin, Memory, Snapshot
from goodput_operator.registry import UnresolvedTagError
from goodput_operator.render.image_names import parse_tag_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from goodput_core.replay_job import ABState
    from goodput_operator.control.measures import Measures
    from goodput_operator.kube.cache import Cache, Key
    from goodput_operator.kube.client import Client
    from goodput_operator.kube.fence import ClockSource
    from goodput_operator.render.image_names import TagName

__all__ = ["Collector", "Observer", "ServiceRecord"]

_TEMPORARY_NS: Final = 10 * NS_PER_S
_LASTING_NS: Final = 60 * NS_PER_S
"""Pause before a registry is asked again, after a problem that can pass and after another one."""


@dataclass(slots=True)
class ServiceRecord:
    """State of one service in this process, changed only by its reconciliations.

    A restarted operator begins with an empty record.

    Args:
        uid: uid of the LLMService; a later service of the same name gets a new record.
        memory: memory of the last decision.
        failures: messages of the last reconciliation's rejected actions by kind and name.
        delayed: messages of the last reconciliation's temporarily failed actions, by kind and name.
        foreign: objects that have one of our names but that the service does not control, as last
            read.
        written: the service as the API server returned it after our last status write; None once
            the cache has this version.
        rollout: Events of gates and rollouts of the last decision, which are logged once.
        undeclared: optional fields of the status that the API server has rejected.
        tagged_image: image whose digest the last decision asked for; empty if it asked for none.
        pin: the registry's answer; None if no registry was asked.
    """

    uid: str
    memory: Memory = field(default_factory=Memory)
    failures: Mapping[tuple[str, str], str] = field(default_factory=dict)
    delayed: Mapping[tuple[str, str], str] = field(default_factory=dict)
    foreign: dict[tuple[str, str], Object] = field(default_factory=dict)
    written: Object | None = None
    rollout: tuple[Emit, ...] = ()
    undeclared: frozenset[str] = frozenset()
    tagged_image: str = ""
    pin: ImagePin | None = None


class Collector(Protocol):
    """Collects measurements from routers and engines."""

    async def measure(
        self, service: Object, pods: Sequence[Object], now_ns: int
    ) -> Measures | None:
        """Return the measurements of the control interval that just ended; None if none ended."""
        ...

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted service."""
        ...


class Observer:
    """Takes snapshots.

    Args:
        cache: cache of the watched objects.
        client: client of the API server, for objects that are not watched.
        measure: collector of measurements.
        read_gate: reads the progress of a gate from the URL of its pod's admin port; None without
            a valid response.
        resolve_tag: returns the digest of an image, or raises an UnresolvedTagError.
        clock: source of monotonic and calendar time.
    """

    def __init__(
        self,
        *,
        cache: Cache,
        client: Client,
        measure: Collector,
        read_gate: Callable[[str], Awaitable[ABState | None]],
        resolve_tag: Callable[[TagName], Awaitable[str]],
        clock: ClockSource,
    ) -> None:
        self._cache = cache
        self._client = client
        self._measure = measure
        self._read_gate = read_gate
        self._resolve_tag = resolve_tag
        self._clock = clock

    async def observe(self, key: Key, service: Object, record: ServiceRecord) -> Snapshot:
        """Return the current state of a service and its objects.

        Args:
            key: key of the service.
            service: the cached LLMService.
            record: record of the service; deleted foreign objects are removed from it.
        """
        children = self._cache.children(key)
        pods = self._cache.pods(key)
        cached = {(child["kind"], child["metadata"]["name"]) for child in children}
        await self._read_foreign(key, record)
        foreign = [body for name, body in record.foreign.items() if name not in cached]
        pin = await self._pin(record)
        measures = await self._measure.measure(service, pods, self._clock.now_ns())
        return Snapshot(
            now_ns=self._clock.now_ns(),
            unix_s=self._clock.unix_ns() // NS_PER_S,
            service=_with_written_status(service, record),
            objects=(*children, *foreign),
            pods=pods,
            measures=measures,
            memory=record.memory,
            failures=record.failures,
            delayed=record.delayed,
            undeclared=record.undeclared,
            gate_state=await self._gate_state(pods),
            nodes=await self._nodes(pods),
            pin=pin,
        )

    async def _gate_state(self, pods: Sequence[Object]) -> ABState | None:
        """Read the progress of a gate; None if no pod of one runs."""
        for pod in pods:
            running = (pod.get("status") or {}).get("phase") == "Running"
            url = admin_url(pod)
            if _role(pod) == ROLE_REPLAY and running and url is not None:
                return await self._read_gate(url)
        return None

    async def _nodes(self, pods: Sequence[Object]) -> tuple[Object, ...]:
        """Read the nodes of a gate's engines if these run on several, as far as that is allowed."""
        engines = [pod for pod in pods if _role(pod) in {ROLE_BASELINE, ROLE_CANDIDATE}]
        found = {(pod.get("spec") or {}).get("nodeName") for pod in engines}
        names = sorted(name for name in found if name)
        if len(names) < 2:
            return ()
        responses = [await self._client.read(NODE, "", name) for name in names]
        return tuple(one for one in responses if not isinstance(one, FailedCall))

    async def _pin(self, record: ServiceRecord) -> ImagePin | None:
        """Resolve the tag that the last decision asked for, once or after a pause; keep it."""
        pin, image, now_ns = record.pin, record.tagged_image, self._clock.now_ns()
        if pin is None or pin.image != image:
            pin = ImagePin(image=image)
        name = None if pin.pinned or now_ns < pin.retry_at_ns else parse_tag_name(image)
        if name is not None:
            try:
                pin = ImagePin(image=image, pinned=name.at(await self._resolve_tag(name)))
            except UnresolvedTagError as error:
                pause_ns = _TEMPORARY_NS if error.temporary else _LASTING_NS
                pin = ImagePin(
                    image=image,
                    problem=str(error),
                    temporary=error.temporary,
                    retry_at_ns=self._clock.now_ns() + pause_ns,
                )
        record.pin = pin if image else None
        return record.pin

    async def _read_foreign(self, key: Key, record: ServiceRecord) -> None:
        """Read the recorded foreign objects again, because they are not watched."""
        for kind, name in list(record.foreign):
            response = await self._client.read(KINDS[kind], key[0], name)
            if isinstance(response, FailedCall):
                if response.not_found:
                    del record.foreign[kind, name]
            elif controlled_by(response, record.uid):
                del record.foreign[kind, name]
            else:
                record.foreign[kind, name] = trim(response)


def _role(pod: Object) -> str | None:
    role: str | None = (pod["metadata"].get("labels") or {}).get(OBJECT_LABEL_ROLE)
    return role


def _with_written_status(service: Object, record: ServiceRecord) -> Object:
    """Return the service with the status that we wrote, until the watch delivers it."""
    written = record.written
    if written is None:
        return service
    cached = int(service["metadata"]["resourceVersion"])
    if cached >= int(written["metadata"]["resourceVersion"]):
        record.written = None
        return service
    return {**service, "status": written.get("status") or {}}
