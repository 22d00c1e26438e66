"""What clients see when a service loses a process, a pod or a node: an answer, or a proper error.

No request hangs, and what is announced beforehand, a drained node or a new revision, costs none.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.e2e.operator.killing import kill_pod, kill_process
from tests.e2e.operator.loading import under_load
from tests.e2e.operator.watching import PARTS, Serving, watching

from goodput_replay.run.records import read_judged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.operator.installed import Installed

    Until = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("own_cluster")

REPLICAS = 2
ANSWERS = 6
# The emulated device makes about a hundred tokens a second for each.
LONG = 1000
LOST = "replica_lost"


@pytest.fixture(scope="module")
def chat(installed: Installed) -> Iterator[Installed]:
    """Two engines and two routers, all on one node at first."""
    installed.kubectl("cordon", "node-2")
    try:
        router = {"policy": "least-loaded", "replicas": REPLICAS}
        installed.apply("chat", replicas=REPLICAS, router=router)
        installed.settled("chat")
    finally:
        installed.kubectl("uncordon", "node-2")
    yield installed
    installed.kubectl("delete", "llmservice", "chat")


@pytest.mark.slow
def test_a_node_that_is_drained_under_load_costs_no_request(
    chat: Installed, until: Until, tmp_path: Path
) -> None:
    before = {part: chat.pods("chat", part) for part in ("engine", "router")}
    replay = chat.replaying("chat", tmp_path / "run")
    try:
        state = f"http://{before['router'][0]['status']['podIP']}:9000/control/state"
        until(lambda: '"attained":' in chat.inside("curl", "-s", state), "requests are answered")
        # They outlive the preparations of a router's end: it drains while others still come.
        answers = chat.answering("chat", ANSWERS, 2 * LONG)
        words = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=90s")
        chat.kubectl("drain", "node-1", *words, timeout_s=100)
        chat.settled("chat")
        assert replay.poll() is None, "it went on all the time"
    finally:
        chat.kubectl("uncordon", "node-1")
        replay.send_signal(signal.SIGINT)
        said, _ = replay.communicate(timeout=60)
    assert answers.ends() == ["done"] * ANSWERS
    outcomes = {judged.record.outcome for judged in read_judged(tmp_path / "run")}
    assert outcomes <= {"ok", "cancelled", "unsent"}, said
    for part, pods in before.items():
        assert {pod["spec"]["nodeName"] for pod in chat.pods("chat", part)} == {"node-2"}
        assert evictions(chat, pods) == {201, 429}, "one at a time, by its budget"


def evictions(chat: Installed, pods: list[dict[str, Any]]) -> set[int]:
    """What the API server answered to those who would evict some of these pods."""
    names = {pod["metadata"]["name"] for pod in pods}
    return {
        line["responseStatus"]["code"]
        for line in chat.own.audit()
        if (line.get("objectRef") or {}).get("subresource") == "eviction"
        and line["objectRef"]["name"] in names
    }


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_process, kill_pod], ids=["process", "pod"])
def test_an_engine_killed_mid_stream_costs_its_own_answers_and_nothing_else(
    chat: Installed, kill: Callable[[Installed, str], None], until: Until
) -> None:
    before = {pod["metadata"]["name"]: restarts(pod) for pod in chat.pods("chat", "engine")}
    answers = chat.answering("chat", ANSWERS, LONG)
    kill(chat, min(before))
    # New ones are answered meanwhile, by the engine that is left.
    assert chat.answering("chat", ANSWERS, 10).ends() == ["done"] * ANSWERS
    assert set(answers.ends()) == {"done", LOST}, "each engine had some of them"

    def returned() -> bool:
        pods = chat.pods("chat", "engine")
        now = {pod["metadata"]["name"]: restarts(pod) for pod in pods}
        return len(now) == REPLICAS and now != before

    until(returned, "another process")
    chat.settled("chat")
    assert chat.answering("chat", 2, 10).ends() == ["done", "done"]


def restarts(pod: dict[str, Any]) -> int:
    return sum(c["restartCount"] for c in pod["status"].get("containerStatuses", ()))


@pytest.mark.slow
def test_new_revisions_come_in_under_load_and_never_is_an_engine_or_a_router_missing(
    chat: Installed, until: Until, tmp_path: Path
) -> None:
    def whole(serving: Serving) -> bool:
        return all(len(serving[part]) == REPLICAS for part in PARTS)

    with (
        watching(chat, "chat", tmp_path / "watched") as states,
        under_load(chat, "chat", tmp_path, until),
    ):
        until(lambda: states() and whole(states()[-1]), "the watch has begun")
        begun = len(states()) - 1
        before = states()[begun]
        spec = {"engine": {"policy": "slo"}, "router": {"policy": "round-robin"}}
        words = ("patch", "llmservice/chat", "--type=merge", "-p", json.dumps({"spec": spec}))
        chat.kubectl(*words)

        def replaced() -> bool:
            now = states()[-1]
            return whole(now) and all(now[part].isdisjoint(before[part]) for part in PARTS)

        until(replaced, "other engines and other routers", timeout_s=90)
        seen = states()[begun:]
        for part in PARTS:
            assert {len(serving[part]) for serving in seen} == {REPLICAS, REPLICAS + 1}, part
