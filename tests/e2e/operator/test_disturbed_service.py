"""Requests while a service loses a process, a pod or a node, or gets a new revision.

Every request ends with a response or an error in the API's form. Planned disruptions (a drained
node, a new revision) cost no request.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tools.cluster.handle import wait_for
from tools.e2e.clients import replay_load
from tools.e2e.installation import ChartRelease, conditions_of

from goodput_core.contract import HEADER_REPLICA, PATH_CONTROL_STATE
from goodput_replay.runs.record_rows import read_judged

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_cluster")

REPLICAS = 2
STREAMS = 6
TOKENS_OF_TEN_S = 1000
"""The emulated device generates about 100 tokens per second and request."""
SESSION = "X-Session"
SESSIONS = tuple(f"user-{number}" for number in range(8))
COMPONENTS = ("engine", "router")
ReadyPods = Mapping[str, frozenset[str]]
"""Names of the ready pods that are not being deleted, by component."""


@pytest.fixture(scope="module")
def chat(installation: ChartRelease) -> Iterator[ChartRelease]:
    """Two engines and two routers, first all on one node."""
    installation.kubectl("cordon", "node-2")
    try:
        affinity = {"header": SESSION}
        router = {"policy": "least-loaded", "replicas": REPLICAS, "sessionAffinity": affinity}
        installation.apply("chat", replicas=REPLICAS, router=router)
        installation.wait_settled("chat")
    finally:
        installation.kubectl("uncordon", "node-2")
    yield installation
    installation.kubectl("delete", "llmservice", "chat")


@pytest.mark.slow
def test_a_node_that_is_drained_under_load_costs_no_request(
    chat: ChartRelease, tmp_path: Path
) -> None:
    before = {component: chat.pods("chat", component) for component in COMPONENTS}
    replay = chat.start_replay("chat", tmp_path / "run")
    try:
        [router, _] = before["router"]
        wait_for(
            lambda: '"attained":' in chat.read_admin(router, PATH_CONTROL_STATE),
            "completed requests",
        )
        # Longer than the delay before a router drains, which still admits requests.
        streams = chat.start_streams("chat", STREAMS, 2 * TOKENS_OF_TEN_S)
        words = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=180s")
        chat.kubectl("drain", "node-1", *words, timeout_s=190)
        chat.wait_settled("chat")
        assert replay.poll() is None, "the replay lasted longer than the drain"
    finally:
        chat.kubectl("uncordon", "node-1")
        replay.send_signal(signal.SIGINT)
        output, _ = replay.communicate(timeout=120)
    assert streams.outcomes() == ["done"] * STREAMS
    outcomes = {judged.record.outcome for judged in read_judged(tmp_path / "run")}
    assert outcomes <= {"ok", "cancelled", "unsent"}, output
    for component, pods in before.items():
        assert {pod["spec"]["nodeName"] for pod in chat.pods("chat", component)} == {"node-2"}
        assert evictions(chat, pods) == {201, 429}, "one by one, by the disruption budget"


def evictions(chat: ChartRelease, pods: list[dict[str, Any]]) -> set[int]:
    """Return the status codes of the evictions of these pods."""
    names = {pod["metadata"]["name"] for pod in pods}
    return {
        line["responseStatus"]["code"]
        for line in chat.own.audit()
        if (line.get("objectRef") or {}).get("subresource") == "eviction"
        and line["objectRef"]["name"] in names
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill", [ChartRelease.kill_process, ChartRelease.kill_pod], ids=["process", "pod"]
)
def test_a_killed_engine_costs_only_its_own_streams(
    chat: ChartRelease, kill: Callable[[ChartRelease, str], None]
) -> None:
    before = {pod["metadata"]["name"]: restarts(pod) for pod in chat.pods("chat", "engine")}
    sessions = replicas_of_sessions(chat)
    assert set(sessions.values()) == set(before), "sessions are spread over both engines"
    hits = {pod: chat.state(pod)["prefix_hit_tokens"] for pod in before}
    assert replicas_of_sessions(chat) == sessions, "both routers select the same engine"
    for pod in before:
        assert chat.state(pod)["prefix_hit_tokens"] > hits[pod], "each turn has a cached prefix"
    streams = chat.start_streams("chat", STREAMS, TOKENS_OF_TEN_S)
    kill(chat, min(before))
    survivors = {name: pod for name, pod in sessions.items() if pod != min(before)}
    # The remaining engine serves new requests.
    assert chat.run_streams("chat", STREAMS, 10) == ["done"] * STREAMS
    moved = replicas_of_sessions(chat)
    # A pod in place of the killed one gets its share of the sessions when it is ready.
    assert all(moved[name] == pod or moved[name] not in before for name, pod in survivors.items())
    assert set(streams.outcomes()) == {"done", "replica_lost"}, "each engine had some of them"

    def returned() -> bool:
        pods = chat.pods("chat", "engine")
        now = {pod["metadata"]["name"]: restarts(pod) for pod in pods}
        return len(now) == REPLICAS and now != before

    wait_for(returned, "another start of the engine")
    chat.wait_settled("chat")
    assert chat.run_streams("chat", 2, 10) == ["done", "done"]


def replicas_of_sessions(chat: ChartRelease) -> dict[str, str]:
    """Send a request of each session, and return the engines that responded, by session."""
    url = f"{chat.url('chat')}/v1/completions"
    found: dict[str, str] = {}
    for name in SESSIONS:
        body = json.dumps({"model": "chat", "prompt": f"I am {name}. " * 50, "max_tokens": 1})
        words = ("curl", "--silent", "--fail", "--include", "--json", body)
        head = chat.run_inside(*words, "--header", f"{SESSION}: {name}", url)
        (found[name],) = re.findall(rf"(?im)^{HEADER_REPLICA}: (\S+)", head)
    return found


def restarts(pod: dict[str, Any]) -> int:
    return sum(c["restartCount"] for c in pod["status"].get("containerStatuses", ()))


@pytest.mark.slow
def test_new_revisions_start_under_load_before_the_pods_of_the_old_ones_stop(
    chat: ChartRelease, tmp_path: Path
) -> None:
    def complete(ready: ReadyPods) -> bool:
        return all(len(ready[component]) == REPLICAS for component in COMPONENTS)

    with (
        watch_ready_pods(chat, "chat", tmp_path / "watched") as changes,
        replay_load(chat, "chat", tmp_path),
    ):
        wait_for(lambda: changes() and complete(changes()[-1]), "the watch has all pods")
        begun = len(changes()) - 1
        before = changes()[begun]
        chat.patch("chat", engine={"policy": "slo"}, router={"policy": "round-robin"})

        def replaced() -> bool:
            now = changes()[-1]
            return complete(now) and all(now[one].isdisjoint(before[one]) for one in COMPONENTS)

        wait_for(replaced, "other engines and other routers", timeout_s=180)
        seen = changes()[begun:]
        for component in COMPONENTS:
            assert {len(ready[component]) for ready in seen} == {REPLICAS, REPLICAS + 1}, component


@contextmanager
def watch_ready_pods(
    installation: ChartRelease, name: str, file: Path
) -> Iterator[Callable[[], list[ReadyPods]]]:
    """Watch the pods of a service during the block; unlike polling, a watch misses no change.

    Args:
        installation: installation of the service.
        name: name of the service.
        file: file for the watch events.

    Yields:
        A function that returns the ready pods after each change so far. The first changes add the
        existing pods.
    """
    pods = f"/api/v1/namespaces/{installation.namespace}/pods"
    path = f"{pods}?watch=true&labelSelector=goodput.dev/llmservice={name}"
    with file.open("wb") as events:
        process = subprocess.Popen(
            [installation.cluster.binaries / "kubectl", "get", "--raw", path],
            env=installation.cluster.environment,
            stdout=events,
        )
    try:
        yield lambda: list(_ready_pods(file))
        assert process.poll() is None, "the watch lasted to the end"
    finally:
        process.kill()
        process.wait()


def _ready_pods(file: Path) -> Iterator[ReadyPods]:
    now: dict[str, frozenset[str]] = dict.fromkeys(COMPONENTS, frozenset())
    for line in file.read_bytes().split(b"\n")[:-1]:  # the last line may be incomplete
        change = json.loads(line)
        pod = change["object"]
        metadata = pod["metadata"]
        component, name = metadata["labels"]["app.kubernetes.io/component"], {metadata["name"]}
        ready = (
            change["type"] != "DELETED"
            and conditions_of(pod).get("Ready") == "True"
            and "deletionTimestamp" not in metadata
        )
        now = {**now, component: now[component] | name if ready else now[component] - name}
        yield now
