"""Cost of the operator while nothing changes: CPU, memory, and calls to the API server.

    python benchmarks/operator_idle.py                       # 1,000 services of four pods, 2 min
    python benchmarks/operator_idle.py --services 50 --seconds 30
    python benchmarks/operator_idle.py --pods both           # then again, without pod responses

A real etcd and kube-apiserver run with `goodput operator` as a separate process that has its own
credentials; the programs are those of `make e2e`. Pods do not run: this script writes the objects
of the Deployment controller and the kubelets, with engines and routers ready at addresses of this
machine. At these addresses one process responds for all pods with states recorded from a real
engine and router under constant load. Calls are counted in the API server's audit log.

Exits with 1 if the operator exceeds a limit, or if it queries pods less often than it should.
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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for benchmarks and tools

from benchmarks.stand_ins.bare_api_server import api_server, free_port, kubectl  # noqa: E402
from benchmarks.stand_ins.fake_pods import PATH_ASKED  # noqa: E402
from benchmarks.stand_ins.recorded_pods import record  # noqa: E402
from benchmarks.stand_ins.stand_in_nodes import PROFILE, Cluster, administrator, manifest  # noqa: E402
from tools.cluster import binaries  # noqa: E402

from goodput_operator.kube.objects import (  # noqa: E402
    ADMIN_PORT,
    CHILDREN,
    POD,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WRITES = {"create", "update", "patch", "delete"}
PARTS = {kind.plural for kind in CHILDREN} | {"secrets"}
INTERVAL_S = 10
QUIET_S = 20
STATUS_WINDOW_S = 300
"""Time for which a status still counts measurements of pods that no longer respond."""
ANSWERING, SILENT = "answering", "silent"
CASES = {ANSWERING: [ANSWERING], SILENT: [SILENT], "both": [ANSWERING, SILENT]}
LIMITS = {"cores": 1.0, "rss_mib": 1024.0, "requests_per_s": 20.0, "child_writes": 0}
MIN_QUERIES_SHARE = 0.9
"""Required share of the queries of pods, one per pod and interval, as fewer queries cost less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Measurements while nothing changed."""

    pods_are: str
    services: int
    pods: int
    responses_per_s: float
    objects: int
    seconds: float
    cores: float
    rss_mib: float
    requests_per_s: float
    child_writes: int
    by_verb: dict[str, int]


def calls(log: Path, since: int) -> tuple[list[tuple[str, str]], int]:
    """Return the operator's calls (verb, resource) after a byte offset, and the new offset."""
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
    """Create the pods of each Deployment as it appears, until no object changes any more."""
    done: set[str] = set()
    at, quiet_since = 0, time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S or len(done) < 2 * services:
        if process.status() == psutil.STATUS_ZOMBIE:
            sys.exit("the operator ended")
        new = [d for d in await cluster.deployments() if d["metadata"]["uid"] not in done]
        if new:
            await asyncio.gather(*map(cluster.run_pods, new))
            done.update(deployment["metadata"]["uid"] for deployment in new)
            quiet_since = time.monotonic()
        seen, at = calls(log, at)
        if any(verb in WRITES and resource in PARTS for verb, resource in seen):
            quiet_since = time.monotonic()
        print(f"\r{len(done)} Deployments of {2 * services} have pods", end="", file=sys.stderr)
        await asyncio.sleep(1)
    print(file=sys.stderr)


@contextmanager
def responding_pods(folder: Path) -> Iterator[None]:
    """Run a process that responds for all pods."""
    states = folder / "states.json"
    states.write_text(json.dumps(record(manifest(0), PROFILE)))
    script = ROOT / "benchmarks" / "stand_ins" / "fake_pods.py"
    command = [sys.executable, str(script), str(states), "--port", str(ADMIN_PORT)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    if not child.stdout.readline():
        sys.exit(f"no process can respond for the pods: port {ADMIN_PORT} is taken")
    try:
        yield
    finally:
        child.terminate()
        child.wait(timeout=60)


def count_state_requests(pods_are: str) -> int:
    """Return the number of state requests to the pods."""
    if pods_are == SILENT:
        return 0
    with urlopen(f"http://127.0.0.1:{ADMIN_PORT}{PATH_ASKED}") as response:
        count: int = json.load(response)["asked"]
    return count


async def prepare(admin: Path, services: int) -> None:
    async with administrator(admin) as cluster:
        await cluster.create_services(services)


def measure(options: argparse.Namespace, folder: Path) -> list[Result]:
    with ExitStack() as stack:
        pods = stack.enter_context(ExitStack())
        if ANSWERING in CASES[options.pods]:
            pods.enter_context(responding_pods(folder))
        admin, operator = stack.enter_context(api_server(folder))
        for plural in ("llmservices", "tracereplays"):
            made = subprocess.run(
                [sys.executable, "-m", "goodput_operator.render.crd", plural],
                capture_output=True,
                text=True,
                check=True,
            )
            kubectl(admin, "apply", "--server-side", "-f", "-", stdin=made.stdout)
            kubectl(admin, "wait", "--for=condition=Established", f"crd/{plural}.goodput.dev")
        (folder / "key").write_bytes(os.urandom(32))
        asyncio.run(prepare(admin, options.services))
        log_of_calls = folder / "audit.log"
        with running_operator(folder, operator) as (process, _):
            results = asyncio.run(_observe(admin, log_of_calls, process, options, pods.close))
        begun = time.monotonic()
        with running_operator(folder, operator) as (process, port):
            while count_reconciliations(port) < options.services:
                if process.status() == psutil.STATUS_ZOMBIE:
                    sys.exit("the operator ended")
                time.sleep(0.2)
            again = {
                "all_services_reconciled_after_s": round(time.monotonic() - begun, 1),
                "cpu_s": round(sum(process.cpu_times()[:2]), 1),
            }
            print(json.dumps({"started_again": again}), flush=True)
        return results


@contextmanager
def running_operator(folder: Path, kubeconfig: Path) -> Iterator[tuple[psutil.Process, int]]:
    """Run an operator; yield it and its probe port."""
    port = free_port()
    with (folder / "operator.log").open("ab") as log:
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "goodput_core", "operator"),
                *("--engine-image", "engine:1", "--router-image", "router:1"),
                *("--key-file", folder / "key", "--kubeconfig", kubeconfig),
                *("--probe-host", "127.0.0.1", "--probe-port", str(port)),
            ],
            stderr=log,
        )
    try:
        yield psutil.Process(child.pid), port
    finally:
        child.terminate()
        child.wait(timeout=60)


def count_reconciliations(port: int) -> float:
    """Return the number of reconciliations."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            lines = response.read().decode().splitlines()
    except URLError:  # not started yet
        return 0
    samples = (line for line in lines if line.startswith("goodput_operator_turns_total{"))
    return sum(float(line.rpartition(" ")[2]) for line in samples)


async def _observe(
    admin: Path,
    log: Path,
    process: psutil.Process,
    options: argparse.Namespace,
    silence: Callable[[], None],
) -> list[Result]:
    async with administrator(admin) as cluster:
        begun = time.monotonic()
        await settle(cluster, log, options.services, process)
        settled_s = time.monotonic() - begun - QUIET_S
        print(f"settled after {settled_s:.0f} s", file=sys.stderr)
        results: list[Result] = []
        for pods_are in CASES[options.pods]:
            if results:
                silence()
                await asyncio.sleep(STATUS_WINDOW_S)
            await asyncio.sleep(options.rest)
            result = await _watch(cluster, log, process, options, pods_are)
            print(json.dumps(asdict(result), indent=1), flush=True)
            results.append(result)
        return results


async def _watch(
    cluster: Cluster,
    log: Path,
    process: psutil.Process,
    options: argparse.Namespace,
    pods_are: str,
) -> Result:
    _, at = calls(log, 0)
    before = count_state_requests(pods_are)
    times, begun = process.cpu_times(), time.monotonic()
    rss = 0
    while (passed := time.monotonic() - begun) < options.seconds:
        rss = max(rss, process.memory_info().rss)
        await asyncio.sleep(min(1, options.seconds - passed))
    now = process.cpu_times()
    seconds = time.monotonic() - begun
    responses = count_state_requests(pods_are) - before
    seen, _ = calls(log, at)
    return Result(
        pods_are=pods_are,
        services=options.services,
        pods=await cluster.count((POD,)),
        responses_per_s=round(responses / seconds, 1),
        objects=await cluster.count(),
        seconds=round(seconds, 1),
        cores=round((now.user + now.system - times.user - times.system) / seconds, 3),
        rss_mib=round(rss / 2**20, 1),
        requests_per_s=round(len(seen) / seconds, 2),
        child_writes=sum(verb in WRITES and resource in PARTS for verb, resource in seen),
        by_verb=dict(Counter(f"{verb} {resource}" for verb, resource in seen).most_common()),
    )


def find_problems(result: Result) -> list[str]:
    """Return the limits that the operator exceeds, and queries of pods that it omitted."""
    seen = asdict(result)
    problems = [
        f"{name} {seen[name]} above {most}" for name, most in LIMITS.items() if seen[name] > most
    ]
    due = MIN_QUERIES_SHARE * result.pods / INTERVAL_S
    if result.pods_are == ANSWERING and result.responses_per_s < due:
        problems.append(f"responses_per_s {result.responses_per_s} below {due}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument(
        "--pods",
        choices=CASES,
        default=ANSWERING,
        help="whether pods respond; both for one after the other (%(default)s)",
    )
    parser.add_argument(
        "--rest",
        type=float,
        default=60,
        help="seconds before the measurement, for one-off work (%(default)s)",
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
        results = measure(options, folder)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    problems = [problem for result in results for problem in find_problems(result)]
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
