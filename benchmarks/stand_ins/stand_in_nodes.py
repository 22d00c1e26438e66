"""Writes the objects of controllers and kubelets, for a benchmark without nodes.

Every pod is ready immediately, at an address of this machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.stand_ins.fake_pods import ADDRESSES
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from goodput_core.contract import OBJECT_LABEL_LLMSERVICE, OBJECT_LABEL_ROLE
from goodput_core.units import NS_PER_S
from goodput_operator.kube.client import Client, FailedCall
from goodput_operator.kube.fence import Fence, SystemClock
from goodput_operator.kube.objects import CHILDREN, LLMSERVICE, POD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["PROFILE", "Cluster", "administrator", "manifest"]

NAMESPACE = "default"
PROFILE = "llama-3-8b-h100"
ENGINE_PODS = 4
AT_ONCE = 16
DEPLOYMENT = next(kind for kind in CHILDREN if kind.name == "Deployment")


def manifest(number: int) -> dict[str, Any]:
    return {
        "apiVersion": LLMSERVICE.api_version,
        "kind": LLMSERVICE.name,
        "metadata": {"name": f"chat-{number:04}", "namespace": NAMESPACE},
        "spec": {
            "model": {"source": f"emulated://{PROFILE}"},
            "minReplicas": ENGINE_PODS,
            "maxReplicas": 2 * ENGINE_PODS,
            "slo": {
                "classes": [{"name": "chat", "ttftMs": 500, "tpotMs": 50, "objective": "99%"}],
                "default": "chat",
            },
        },
    }


class Cluster:
    """Client with administrator rights that writes the objects of controllers and kubelets."""

    def __init__(self, api: ApiClient) -> None:
        clock = SystemClock()
        fence = Fence(clock)
        fence.extend(clock.now_ns() + 10**6 * NS_PER_S)
        self._api = api
        self._client = Client(api, fence=fence, timeout_ns=30 * NS_PER_S, count=lambda *_: None)
        self._free = asyncio.Semaphore(AT_ONCE)
        self._addresses: Counter[str] = Counter()

    async def create_services(self, count: int) -> None:
        await asyncio.gather(*(self._create(LLMSERVICE, manifest(n)) for n in range(count)))

    async def count(self, plurals: tuple[Any, ...] = CHILDREN) -> int:
        return sum([len(await self._list(kind)) for kind in plurals])

    async def deployments(self) -> list[dict[str, Any]]:
        return await self._list(DEPLOYMENT)

    async def run_pods(self, deployment: dict[str, Any]) -> None:
        """Create ready pods for a Deployment, and set its status."""
        name, spec = deployment["metadata"]["name"], deployment["spec"]
        replicas = spec.get("replicas", 1)
        template = spec["template"]
        for number in range(replicas):
            metadata = {
                **template["metadata"],
                "name": f"{name}-{number}",
                "namespace": NAMESPACE,
            }
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
            await self._create(POD, pod | {"spec": template["spec"]})
            role = template["metadata"]["labels"][OBJECT_LABEL_ROLE]
            await self._status(POD, f"{name}-{number}", self._running(role, template["spec"]))
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            **dict.fromkeys(counts, replicas),
            "conditions": [
                {"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"}
            ],
        }
        await self._status(DEPLOYMENT, name, status)

    def _running(self, role: str, spec: dict[str, Any]) -> dict[str, Any]:
        self._addresses[role] += 1
        high, low = divmod(self._addresses[role], 250)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {
            "phase": "Running",
            "podIP": f"{ADDRESSES[role]}.{high}.{low + 1}",
            "startTime": stamp,
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": stamp}
                for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            ],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": True,
                    "restartCount": 0,
                    "state": {"running": {"startedAt": stamp}},
                }
                for container in spec["containers"]
            ],
        }

    async def _create(self, kind: Any, body: dict[str, Any]) -> None:
        async with self._free:
            _check(await self._client.create(kind, NAMESPACE, body))

    async def _status(self, kind: Any, name: str, status: dict[str, Any]) -> None:
        async with self._free:
            path = f"{name}/status"
            _check(await self._client.merge(kind, NAMESPACE, path, {"status": status}))

    async def _list(self, kind: Any) -> list[dict[str, Any]]:
        selector = "" if kind is LLMSERVICE else f"?labelSelector={OBJECT_LABEL_LLMSERVICE}"
        call: Any = await self._api.param_serialize(
            "GET", kind.path(NAMESPACE) + selector, auth_settings=["BearerToken"]
        )
        response = await self._api.call_api(*call)
        items: list[dict[str, Any]] = json.loads(await response.read())["items"]
        return items


def _check(result: Any) -> None:
    if isinstance(result, FailedCall):
        sys.exit(f"the API server rejected a call: {result.message}")


@asynccontextmanager
async def administrator(kubeconfig: Path) -> AsyncIterator[Cluster]:
    configuration = Configuration()
    await config.load_kube_config(str(kubeconfig), client_configuration=configuration)
    async with ApiClient(configuration) as api:
        yield Cluster(api)
