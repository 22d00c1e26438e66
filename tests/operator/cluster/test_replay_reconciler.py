"""The driver of TraceReplays with an API server in memory and real armed shards."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from pythonjsonlogger.json import JsonFormatter

from goodput_core.units import NS_PER_S
from goodput_operator.kube.cache import Cache, ReplayKey
from goodput_operator.kube.fence import SystemClock
from goodput_operator.kube.objects import ADMIN_PORT, CHILDREN, JOB, LLMSERVICE, POD, TRACEREPLAY
from goodput_operator.reconcile.event_recorder import EventRecorder
from goodput_operator.render.pods import Installation
from goodput_operator.replays.reconciler import EVENT_REPLAY, ReplayReconciler
from goodput_operator.replays.shards import ShardClient, shard_token
from goodput_replay.sending.arming import await_start
from goodput_replay.shares import Share

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from goodput_operator.reconcile.work_queue import Result

KEY = b"0123456789abcdef" * 2
UID = "0c0ffee0-0000"
NIGHT = ReplayKey("team", "night")
PATH = "/apis/goodput.dev/v1alpha1/namespaces/team/tracereplays/night"
JOBS = "/apis/batch/v1/namespaces/team/jobs"
LABELS = {"goodput.dev/tracereplay": "night"}
ADDRESSES = ("127.77.0.1", "127.77.0.2")
SLO = {"classes": [{"name": "chat", "ttftMs": 500, "tpotMs": 50, "objective": "99%"}]}


def replay() -> dict[str, Any]:
    return {
        "apiVersion": "goodput.dev/v1alpha1",
        "kind": "TraceReplay",
        "metadata": {
            "name": "night",
            "namespace": "team",
            "uid": UID,
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        },
        "spec": {
            "trace": "sample",
            "target": {"url": "http://llm"},
            "slo": SLO,
            "allowProduction": True,
            "records": "s3://runs/night",
            "shards": len(ADDRESSES),
        },
    }


def owned(kind: str, name: str, owner: dict[str, Any], **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": "2",
            "labels": LABELS,
            "ownerReferences": [owner],
        },
        "status": status,
    }


class ReplayCluster:
    """A cache with one TraceReplay, and its reconciler."""

    def __init__(self, bench: Any, session: aiohttp.ClientSession) -> None:
        self.server = bench.server
        self.server.objects[PATH] = replay()
        kinds = (LLMSERVICE, TRACEREPLAY, POD, JOB, *CHILDREN)
        self.cache = Cache((kind.name, "") for kind in kinds)
        self.cache.update(self.server.objects[PATH], deleted=False)
        clock = SystemClock()
        self.shards = ShardClient(session, fence=bench.fence, key=KEY)
        self.reconciler = ReplayReconciler(
            cache=self.cache,
            client=bench.client,
            shards=self.shards,
            recorder=EventRecorder(bench.client, clock=clock, instance="test"),
            installation=Installation(
                engine_image="e:1", router_image="r:1", replay_image="replay:1"
            ),
            clock=clock,
            key=KEY,
        )

    @property
    def status(self) -> dict[str, Any]:
        """The stored status."""
        return dict(self.server.objects[PATH].get("status") or {})

    async def reconcile_stored(self) -> Result:
        """Reconcile once the watch has delivered the stored replay."""
        self.cache.update(self.server.objects[PATH], deleted=False)
        return await self.reconciler.reconcile(NIGHT)

    async def starts(self) -> list[int | None]:
        """Return the starts that the shards have accepted, nanoseconds since 1970."""
        urls = {address: f"http://{address}:{ADMIN_PORT}" for address in ADDRESSES}
        readings = await self.shards.read(urls, SystemClock().unix_ns)
        states = [reading.state for reading in readings.values()]
        assert None not in states
        return [state.start_at_ns for state in states if state is not None]

    def add_armed_pods(self) -> None:
        """Add the Job and its ready pods to the cache, as the watches would."""
        self.cache.update(
            owned("Job", "night-shards", {"uid": UID, "controller": True}), deleted=False
        )
        for number, address in enumerate(ADDRESSES):
            ready = [{"type": "Ready", "status": "True"}]
            owner = {"kind": "Job", "name": "night-shards"}
            name = f"night-shards-{number}-x"
            pod = owned("Pod", name, owner, podIP=address, conditions=ready)
            self.cache.update(pod, deleted=False)


@pytest.fixture
async def cluster(bench: Any) -> AsyncIterator[ReplayCluster]:
    async with aiohttp.ClientSession() as session:
        yield ReplayCluster(bench, session)


@asynccontextmanager
async def armed_shards(token: str) -> AsyncIterator[None]:
    """Run the armed shards of the replay on two addresses of this machine."""
    tasks = [
        asyncio.create_task(
            await_start(
                (address, ADMIN_PORT),
                token=token,
                share=Share(index=number, count=len(ADDRESSES)),
                requests=3,
            )
        )
        for number, address in enumerate(ADDRESSES)
    ]
    for address in ADDRESSES:
        while True:
            try:
                _, writer = await asyncio.open_connection(address, ADMIN_PORT)
                writer.close()
                break
            except OSError:
                await asyncio.sleep(0.01)
    yield
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_the_token_is_created_before_the_job(
    cluster: ReplayCluster,
) -> None:
    result = await cluster.reconciler.reconcile(NIGHT)
    assert not result.failed
    written = [path.rpartition("/")[2] for _, path, _ in cluster.server.writes]
    assert written == ["status", "secrets", "jobs"]
    token = cluster.server.bodies[1]["stringData"]["token"]
    assert token == shard_token(KEY, UID)
    assert cluster.status["phase"] == "Arming"


async def test_armed_shards_receive_the_stored_start(cluster: ReplayCluster) -> None:
    async with armed_shards(shard_token(KEY, UID)):
        cluster.add_armed_pods()
        result = await cluster.reconciler.reconcile(NIGHT)
        assert not result.failed
        start = datetime.fromisoformat(cluster.status["startTime"]).timestamp()
        again = await cluster.reconciler.reconcile(NIGHT)
        assert not again.failed, "the same start is confirmed"
        assert datetime.fromisoformat(cluster.status["startTime"]).timestamp() == start
        assert await cluster.starts() == [int(start) * NS_PER_S] * len(ADDRESSES)


async def test_no_shard_is_started_if_the_start_could_not_be_stored(cluster: ReplayCluster) -> None:
    async with armed_shards(shard_token(KEY, UID)):
        cluster.add_armed_pods()
        cluster.server.rejections["PATCH", f"{PATH}/status"] = (503, {"message": "starting"})
        assert (await cluster.reconciler.reconcile(NIGHT)).failed
        assert await cluster.starts() == [None] * len(ADDRESSES)


async def test_shards_with_another_token_are_not_started(cluster: ReplayCluster) -> None:
    async with armed_shards("another"):
        cluster.add_armed_pods()
        assert (await cluster.reconciler.reconcile(NIGHT)).failed
        assert await cluster.starts() == [None] * len(ADDRESSES)


async def test_a_deleted_replay_is_forgotten(cluster: ReplayCluster) -> None:
    cluster.cache.update(cluster.server.objects[PATH], deleted=True)
    assert (await cluster.reconciler.reconcile(NIGHT)).deleted
    assert cluster.server.writes == []


async def test_a_job_of_another_owner_ends_the_replay_with_the_name_in_conflict(
    cluster: ReplayCluster, caplog: pytest.LogCaptureFixture
) -> None:
    job = f"{JOBS}/night-shards"
    cluster.server.put(job, {"apiVersion": "batch/v1", "kind": "Job"})
    before = dict(cluster.server.objects[job])
    assert (await cluster.reconciler.reconcile(NIGHT)).failed, "it is repeated at once"
    with caplog.at_level(logging.INFO, logger="goodput_operator"):
        await cluster.reconcile_stored()
    line = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert (line["message"], line["tracereplay"], line["reason"]) == (
        EVENT_REPLAY,
        "night",
        "Invalid",
    )
    assert line["detail"].startswith("NameConflict: Job night-shards belongs to another object")
    assert cluster.status["phase"] == "Finished"
    assert (cluster.status["verdict"], cluster.status["reason"]) == ("INVALID", "NameConflict")
    assert cluster.status["message"].startswith("Job night-shards belongs to another object")
    assert cluster.server.objects[job] == before


async def test_a_job_of_another_owner_under_the_name_of_the_merge_ends_the_replay(
    cluster: ReplayCluster,
) -> None:
    ours = {"uid": UID, "controller": True}
    done = [{"type": "Complete", "status": "True"}]
    cluster.cache.update(owned("Job", "night-shards", ours, conditions=done), deleted=False)
    cluster.server.put(f"{JOBS}/night-merge", {"apiVersion": "batch/v1", "kind": "Job"})
    assert (await cluster.reconciler.reconcile(NIGHT)).failed
    assert cluster.status["phase"] == "Merging"
    await cluster.reconcile_stored()
    assert (cluster.status["verdict"], cluster.status["reason"]) == ("INVALID", "NameConflict")
    assert cluster.status["message"].startswith("Job night-merge belongs to another object")


async def test_a_rejected_job_is_shown_until_it_is_created(cluster: ReplayCluster) -> None:
    cluster.server.rejections["POST", JOBS] = (403, {"message": "exceeded quota: no-jobs"})
    assert (await cluster.reconciler.reconcile(NIGHT)).failed
    assert (await cluster.reconcile_stored()).failed
    shown = "Job night-shards cannot be created: exceeded quota: no-jobs"
    assert cluster.status["conditions"][0]["message"] == shown
    assert (await cluster.reconcile_stored()).failed
    assert cluster.status["conditions"][0]["message"] == shown
    cluster.server.rejections.clear()
    assert not (await cluster.reconcile_stored()).failed
    await cluster.reconcile_stored()
    assert cluster.status["conditions"][0]["message"] == "2 shards are starting"
