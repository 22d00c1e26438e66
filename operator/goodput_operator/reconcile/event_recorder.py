"""Events on a service: the same words within ten minutes are counted, not repeated.

Written by ourselves: Kopf's poster neither counts nor knows of the Lease.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.units import NS_PER_S
from goodput_operator.kube.client import Refusal
from goodput_operator.kube.objects import EVENT, MANAGER, format_time

if TYPE_CHECKING:
    from goodput_operator.kube.client import ApiResponse, Client
    from goodput_operator.kube.fence import Clock
    from goodput_operator.kube.objects import Object
    from goodput_operator.reconcile.actions import Emit

__all__ = ["Events"]

_SAME_NS: Final = 600 * NS_PER_S
_COUNT_NS: Final = 60 * NS_PER_S
"""A count is written this often at most: what repeats each second is one call a minute."""
_MOST_REMEMBERED: Final = 10_000
_MOST_MESSAGE: Final = 1024
"""The API server refuses longer ones."""


@dataclass(slots=True)
class _Said:
    name: str
    first_ns: int
    count: int
    written_ns: int


class Events:
    """Writes Events and remembers what was said.

    Args:
        client: the API server.
        clock: both times.
        instance: which operator says it.
    """

    def __init__(self, client: Client, *, clock: Clock, instance: str) -> None:
        self._client = client
        self._clock = clock
        self._instance = instance
        self._said: OrderedDict[tuple[str, bool, str, str], _Said] = OrderedDict()

    async def emit(self, service: Object, emit: Emit) -> Refusal | None:
        """Say it, or count it.

        Raises:
            LeaseLostError: another operator may write by now.
        """
        now_ns = self._clock.now_ns()
        key = (service["metadata"]["uid"], emit.warning, emit.reason, emit.message)
        said = self._said.get(key)
        if said is None or now_ns - said.first_ns >= _SAME_NS:
            return await self._say(service, emit, key, now_ns)
        said.count += 1
        if now_ns - said.written_ns < _COUNT_NS:
            return None
        said.written_ns = now_ns
        patch = {"count": said.count, "lastTimestamp": self._stamp()}
        answer = await self._client.merge(EVENT, service["metadata"]["namespace"], said.name, patch)
        return answer if isinstance(answer, Refusal) and not answer.not_found else None

    async def _say(
        self, service: Object, emit: Emit, key: tuple[str, bool, str, str], now_ns: int
    ) -> Refusal | None:
        metadata = service["metadata"]
        name = f"{metadata['name']}.{self._clock.unix_ns():x}.{len(self._said):x}"
        answer: ApiResponse = await self._client.create(
            EVENT, metadata["namespace"], self._body(service, emit, name)
        )
        if isinstance(answer, Refusal):
            return answer
        self._said[key] = _Said(name=name, first_ns=now_ns, count=1, written_ns=now_ns)
        self._said.move_to_end(key)
        while len(self._said) > _MOST_REMEMBERED:
            self._said.popitem(last=False)
        return None

    def _body(self, service: Object, emit: Emit, name: str) -> dict[str, Any]:
        metadata = service["metadata"]
        stamp = self._stamp()
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
            "message": emit.message[:_MOST_MESSAGE],
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._instance,
        }

    def _stamp(self) -> str:
        return format_time(self._clock.unix_ns() // NS_PER_S)
