"""Writes Events on services, and counts repetitions instead of writing them again.

Kopf's own poster neither counts repeated Events nor respects the Lease.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.units import NS_PER_S
from goodput_operator.kube.client import FailedCall
from goodput_operator.kube.objects import EVENT, MANAGER, MAX_EVENT_MESSAGE, format_time

if TYPE_CHECKING:
    from goodput_operator.kube.client import ApiResponse, Client
    from goodput_operator.kube.fence import ClockSource
    from goodput_operator.kube.objects import Object
    from goodput_operator.reconcile.actions import Emit

__all__ = ["EventRecorder"]

_SAME_EVENT_NS: Final = 600 * NS_PER_S
"""Time after an Event within which a repetition of its message increments its count."""
_COUNT_NS: Final = 60 * NS_PER_S
"""Minimum time between two writes of a count."""
_MAX_EVENTS: Final = 10_000


@dataclass(slots=True)
class _RecordedEvent:
    """An Event whose repetitions are counted.

    Attributes:
        name: name of the Event object.
        first_ns: time of its creation.
        count: number of emissions.
        written_ns: time at which the count was last written.
    """

    name: str
    first_ns: int
    count: int
    written_ns: int


class EventRecorder:
    """Writes Events on services; repetitions of a message within ten minutes are counted.

    Args:
        client: client of the API server.
        clock: source of monotonic and calendar time.
        instance: identity of this operator, the reporting instance of Events.
    """

    def __init__(self, client: Client, *, clock: ClockSource, instance: str) -> None:
        self._client = client
        self._clock = clock
        self._instance = instance
        self._recorded: OrderedDict[tuple[str, Emit], _RecordedEvent] = OrderedDict()

    async def emit(self, service: Object, emit: Emit) -> FailedCall | None:
        """Write an Event, or count a repetition.

        Returns:
            The failed call; None on success.

        Raises:
            LeaseLostError: the Lease is no longer held.
        """
        now_ns = self._clock.now_ns()
        key = (service["metadata"]["uid"], emit)
        recorded = self._recorded.get(key)
        if recorded is None or now_ns - recorded.first_ns >= _SAME_EVENT_NS:
            return await self._create(service, emit, now_ns)
        recorded.count += 1
        if now_ns - recorded.written_ns < _COUNT_NS:
            return None
        recorded.written_ns = now_ns
        patch = {"count": recorded.count, "lastTimestamp": self._timestamp()}
        namespace = service["metadata"]["namespace"]
        response = await self._client.merge(EVENT, namespace, recorded.name, patch)
        return response if isinstance(response, FailedCall) and not response.not_found else None

    async def _create(self, service: Object, emit: Emit, now_ns: int) -> FailedCall | None:
        metadata = service["metadata"]
        name = f"{metadata['name']}.{self._clock.unix_ns():x}.{len(self._recorded):x}"
        response: ApiResponse = await self._client.create(
            EVENT, metadata["namespace"], self._body(service, emit, name)
        )
        if isinstance(response, FailedCall):
            return response
        key = (metadata["uid"], emit)
        self._recorded[key] = _RecordedEvent(name=name, first_ns=now_ns, count=1, written_ns=now_ns)
        self._recorded.move_to_end(key)
        while len(self._recorded) > _MAX_EVENTS:
            self._recorded.popitem(last=False)
        return None

    def _body(self, service: Object, emit: Emit, name: str) -> dict[str, Any]:
        metadata = service["metadata"]
        timestamp = self._timestamp()
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": service["apiVersion"],
                "kind": service["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata.get("resourceVersion"),
            },
            "type": "Warning" if emit.warning else "Normal",
            "reason": emit.reason,
            "message": emit.message[:MAX_EVENT_MESSAGE],
            "firstTimestamp": timestamp,
            "lastTimestamp": timestamp,
            "count": 1,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._instance,
        }

    def _timestamp(self) -> str:
        return format_time(self._clock.unix_ns() // NS_PER_S)
