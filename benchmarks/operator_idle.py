"""What the operator costs while nothing changes: CPU, memory, and calls to the API server.

    python benchmarks/operator_idle.py                       # 1,000 services of four pods, 2 min
    python benchmarks/operator_idle.py --services 50 --seconds 30

A real etcd and kube-apiserver, and `goodput operator` as a process of its own with credentials of
its own; the programs are those of `make e2e`. Nothing runs the pods: this script stands in for
the Deployment controller and the kubelets and writes what they would, engines and routers ready
at addresses of this machine where nobody listens. The API server's audit log says who called.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the cluster's programs are found by the tests' own module

from benchmarks.bare_api_server import api_server, kubectl  # noqa: E402
from kubernetes.aio import config  # noqa: E402
from kubernetes.aio.client import ApiClient, Configuration  # noqa: E402
from tests.e2e.cluster import binaries  # noqa: E402

from goodput_core.contract import OBJECT_LABEL_LLMSERVICE  # noqa: E402
from goodput_core.units import NS_PER_S  # noqa: E402
from goodput_operator.cluster.api.answers import Refusal  # noqa: E402
from goodput_operator.cluster.api.client import Client  # noqa: E402
from goodput_operator.cluster.api.fence import Fence  # noqa: E402
from goodput_operator.cluster.api.kinds import CHILDREN, LLMSERVICE, POD  # noqa: E402
from goodput_operator.cluster.clock import SystemClock  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAMESPACE = "default"
WRITES = {"create", "update", "patch", "delete"}
DEPLOYMENT = next(kind for kind in CHILDREN if kind.name == "Deployment")
PODS_OF_ENGINES = 4
AT_ONCE = 16
PARTS = {kind.plural for kind in CHILDREN} | {"secrets"}
QUIET_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was seen while nothing changed."""

    services: int
    pods: int
    objects: int
    settled_s: float
    seconds: float
    cores: float
    rss_mib: float
    requests_per_s: float
    child_writes: int
    by_verb: dict[str, int]


def manifest(number: int) -> dict[str, Any]:
    return {
        "apiVersion": LLMSERVICE.api_version,
        "kind": LLMSERVICE.name,
        "metadata": {"name": f"chat-{number:04}", "namespace": NAMESPACE},
        "spec": {
            "model": {"source": "emulated://unit"},
            "minReplicas": PODS_OF_ENGINES,
            "maxReplicas": 2 * PODS_OF_ENGINES,
            "slo": {
                "classes": [{"name": "chat", "ttftMs": 500, "tpotMs": 50, "objective": "99%"}],
                "default": "chat",
            },
        },
    }


class Cluster:
    """What the administrator sees, and what controllers and kubelets would write."""

    def __init__(self, api: ApiClient) -> None:
        clock = SystemClock()
        fence = Fence(clock)
        fence.extend(clock.now_ns() + 10**6 * NS_PER_S)
        self._api = api
        self._client = Client(api, fence=fence, timeout_ns=30 * NS_PER_S, count=lambda *_: None)
        self._free = asyncio.Semaphore(AT_ONCE)
        self._addresses = 0

    async def create_services(self, count: int) -> None:
        await asyncio.gather(*(self._create(LLMSERVICE, manifest(n)) for n in range(count)))

    async def count(self, plurals: tuple[Any, ...] = CHILDREN) -> int:
        return sum([len(await self._list(kind)) for kind in plurals])

    async def deployments(self) -> list[dict[str, Any]]:
        return await self._list(DEPLOYMENT)

    async def run_pods(self, deployment: dict[str, Any]) -> None:
        """Pods for a Deployment, all of them ready, and the Deployment's status."""
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
            await self._status(POD, f"{name}-{number}", self._running(template["spec"]))
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            **dict.fromkeys(counts, replicas),
            "conditions": [
                {"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"}
            ],
        }
        await self._status(DEPLOYMENT, name, status)

    def _running(self, spec: dict[str, Any]) -> dict[str, Any]:
        self._addresses += 1
        high, low = divmod(self._addresses, 250)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {
            "phase": "Running",
            "podIP": f"127.1.{high}.{low + 1}",
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
            _done(await self._client.create(kind, NAMESPACE, body))

    async def _status(self, kind: Any, name: str, status: dict[str, Any]) -> None:
        async with self._free:
            path = f"{name}/status"
            _done(await self._client.merge(kind, NAMESPACE, path, {"status": status}))

    async def _list(self, kind: Any) -> list[dict[str, Any]]:
        selector = "" if kind is LLMSERVICE else f"?labelSelector={OBJECT_LABEL_LLMSERVICE}"
        call: Any = await self._api.param_serialize(
            "GET", kind.path(NAMESPACE) + selector, auth_settings=["BearerToken"]
        )
        response = await self._api.call_api(*call)
        items: list[dict[str, Any]] = json.loads(await response.read())["items"]
        return items


def _done(answer: Any) -> None:
    if isinstance(answer, Refusal):
        sys.exit(f"the API server refused: {answer.message}")


def calls(log: Path, since: int) -> tuple[list[tuple[str, str]], int]:
    """What the operator called (verb, resource) after that many bytes, and how many there are."""
    with log.open("rb") as file:
        file.seek(since)
        content = file.read()
    content = content[: content.rfind(b"\n") + 1]
    found = []
    for line in content.splitlines():
        entry = json.loads(line)
        found.append((entry["verb"], entry.get("objectRef", {}).get("resource", "")))
    return found, since + len(content)


async def settle(cluster: Cluster, log: Path, services: int, process: psutil.Process) -> None:
    """Run the pods of each Deployment as it appears, until nobody has written for a while."""
    done: set[str] = set()
    at, quiet_since = 0, time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S or len(done) < 2 * services:
        if not process.is_running():
            sys.exit("the operator ended")
        new = [d for d in await cluster.deployments() if d["metadata"]["uid"] not in done]
        if new:
            await asyncio.gather(*map(cluster.run_pods, new))
            done.update(deployment["metadata"]["uid"] for deployment in new)
            quiet_since = time.monotonic()
        seen, at = calls(log, at)
        if any(verb in WRITES and resource in PARTS for verb, resource in seen):
            quiet_since = time.monotonic()
        print(f"\r{len(done)} Deployments of {2 * services} run", end="", file=sys.stderr)
        await asyncio.sleep(1)
    print(file=sys.stderr)


@asynccontextmanager
async def administrator(kubeconfig: Path) -> AsyncIterator[Cluster]:
    configuration = Configuration()
    await config.load_kube_config(str(kubeconfig), client_configuration=configuration)
    async with ApiClient(configuration) as api:
        yield Cluster(api)


async def prepare(admin: Path, services: int) -> None:
    async with administrator(admin) as cluster:
        await cluster.create_services(services)


def measure(options: argparse.Namespace, folder: Path) -> Result:
    with api_server(folder) as (admin, operator):
        made = subprocess.run(
            [sys.executable, "-m", "goodput_operator.crd"],
            capture_output=True,
            text=True,
            check=True,
        )
        kubectl(admin, "apply", "--server-side", "-f", "-", stdin=made.stdout)
        established = ("--for=condition=Established", "crd/llmservices.goodput.dev")
        kubectl(admin, "wait", *established)
        (folder / "key").write_bytes(os.urandom(32))
        asyncio.run(prepare(admin, options.services))
        with (folder / "operator.log").open("wb") as log:
            child = subprocess.Popen(
                [
                    *(sys.executable, "-m", "goodput_core", "operator"),
                    *("--engine-image", "engine:1", "--router-image", "router:1"),
                    *("--key-file", folder / "key", "--kubeconfig", operator),
                    *("--probe-port", "0"),
                ],
                stderr=log,
            )
        try:
            process = psutil.Process(child.pid)
            return asyncio.run(_observe(admin, folder / "audit.log", process, options))
        finally:
            child.terminate()
            child.wait(timeout=60)


async def _observe(
    admin: Path, log: Path, process: psutil.Process, options: argparse.Namespace
) -> Result:
    async with administrator(admin) as cluster:
        begun = time.monotonic()
        await settle(cluster, log, options.services, process)
        settled_s = time.monotonic() - begun - QUIET_S
        await asyncio.sleep(options.rest)
        return await _watch(cluster, log, process, options, settled_s)


async def _watch(
    cluster: Cluster,
    log: Path,
    process: psutil.Process,
    options: argparse.Namespace,
    settled_s: float,
) -> Result:
    _, at = calls(log, 0)
    times, begun = process.cpu_times(), time.monotonic()
    rss = 0
    while (passed := time.monotonic() - begun) < options.seconds:
        rss = max(rss, process.memory_info().rss)
        await asyncio.sleep(min(1, options.seconds - passed))
    now = process.cpu_times()
    seconds = time.monotonic() - begun
    seen, _ = calls(log, at)
    return Result(
        services=options.services,
        pods=await cluster.count((POD,)),
        objects=await cluster.count(),
        settled_s=round(settled_s, 1),
        seconds=round(seconds, 1),
        cores=round((now.user + now.system - times.user - times.system) / seconds, 3),
        rss_mib=round(rss / 2**20, 1),
        requests_per_s=round(len(seen) / seconds, 2),
        child_writes=sum(verb in WRITES and resource in PARTS for verb, resource in seen),
        by_verb=dict(Counter(f"{verb} {resource}" for verb, resource in seen).most_common()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument(
        "--rest", type=float, default=60, help="seconds before, for what is told once (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="20 services, 20 s, no rest")
    parser.add_argument("--keep", type=Path, help="keep logs in this empty folder")
    options = parser.parse_args()
    if options.quick:
        options.services, options.seconds, options.rest = 20, 20, 0
    if not binaries.is_built():
        print("not run: the cluster's programs are not built yet; `make e2e` builds them")
        return 0 if options.quick else 1
    folder = Path(tempfile.mkdtemp(prefix="operator-idle-")) if not options.keep else options.keep
    try:
        result = measure(options, folder)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(asdict(result), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
