"""Replicas from EndpointSlices, with a real HTTP server that lists and watches."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from tests.builders.http import PATIENCE_S
from tests.engine.router.conftest import until
from tests.engine.router.slices_server import SlicesServer, endpoint, line, serve, slice_of

from goodput_core.errors import UsageError
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.router.endpoints import (
    APIServer,
    EndpointsWatch,
    WatchIntervals,
    in_cluster,
    parse_service,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from goodput_engine.router.upstreams import Upstream

QUICK = WatchIntervals(retry_ns=5 * NS_PER_MS, max_retry_ns=20 * NS_PER_MS)


class WatchedReplicas:
    """The lists of replicas that a watch has published so far."""

    def __init__(self) -> None:
        self.upstreams: Sequence[Upstream] = ()
        self.count = 0
        self._published = asyncio.Event()

    def apply(self, upstreams: Sequence[Upstream]) -> None:
        self.upstreams = upstreams
        self.count += 1
        self._published.set()

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while [u.name for u in self.upstreams] != list(names):
                self._published.clear()
                await self._published.wait()


@dataclass
class Setting:
    cluster: SlicesServer
    api: APIServer
    token_file: Path
    runner: web.AppRunner

    def watch(self, intervals: WatchIntervals = QUICK) -> EndpointsWatch:
        return EndpointsWatch(
            self.api,
            namespace="models",
            service="chat-engines",
            rng=random.Random(1),
            clock=time.monotonic_ns,
            intervals=intervals,
        )

    @asynccontextmanager
    async def following(self, intervals: WatchIntervals = QUICK) -> AsyncIterator[WatchedReplicas]:
        watch = self.watch(intervals)
        following = WatchedReplicas()
        following.apply(await watch.first())
        task = asyncio.create_task(watch.follow(following.apply))
        try:
            yield following
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    cluster = SlicesServer()
    runner, port = await serve(cluster)
    token_file = tmp_path / "token"
    token_file.write_text("first\n", encoding="utf-8")
    api = APIServer(url=f"http://127.0.0.1:{port}", token_file=token_file, ca_file=None)
    yield Setting(cluster, api, token_file, runner)
    await runner.cleanup()


async def test_added_and_removed_pods_are_followed(setting: Setting) -> None:
    cluster = setting.cluster
    cluster.put(slice_of("s1", endpoint("a", "10.0.0.1", ready=True)))
    async with setting.following() as following:
        await following.until("a")
        (one,) = following.upstreams
        assert (one.url, one.admin_url) == ("http://10.0.0.1:8000", "http://10.0.0.1:9000")
        both = [endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")]
        cluster.put(slice_of("s1", *both))
        await following.until("a", "b")
        cluster.put(slice_of("s2", endpoint("c", "10.0.0.3")), "ADDED")
        await following.until("a", "b", "c")
        cluster.drop("s1")
        await following.until("c")
        cluster.drop("s2")
        await following.until()
    assert cluster.requests.count("list") == 1, "only the watch reported the changes"


async def test_pods_that_are_not_ready_are_included_and_terminating_ones_are_not(
    setting: Setting,
) -> None:
    starting = endpoint("starting", "10.0.0.1", ready=False)
    ending = endpoint("ending", "10.0.0.2", ready=False, serving=True, terminating=True)
    setting.cluster.put(slice_of("s", starting, ending))
    async with setting.following() as following:
        await following.until("starting")


async def test_a_server_without_an_admin_port_is_included_once_its_pod_is_ready(
    setting: Setting,
) -> None:
    def slice_without(*endpoints: dict[str, Any]) -> dict[str, Any]:
        return {**slice_of("s", *endpoints), "ports": [{"name": "http", "port": 8100}]}

    ready = endpoint("ready", "10.0.0.1", ready=True)
    setting.cluster.put(slice_without(ready, endpoint("starting", "10.0.0.2", ready=False)))
    async with setting.following() as following:
        await following.until("ready")
        setting.cluster.put(slice_without(ready, endpoint("starting", "10.0.0.2", ready=True)))
        await following.until("ready", "starting")


async def test_a_change_without_an_effect_on_replicas_is_not_published(setting: Setting) -> None:
    cluster = setting.cluster
    cluster.put(slice_of("s", endpoint("a", "10.0.0.1", ready=False)))
    async with setting.following() as following:
        cluster.put(slice_of("s", endpoint("a", "10.0.0.1", ready=True)))
        cluster.put(slice_of("t", endpoint("b", "10.0.0.2")))
        await following.until("a", "b")
        assert following.count == 2


async def test_two_families_of_addresses_are_one_replica(setting: Setting) -> None:
    setting.cluster.put(slice_of("six", endpoint("a", "fd00::1"), family="IPv6"))
    async with setting.following() as following:
        assert following.upstreams[0].url == "http://[fd00::1]:8000"
        setting.cluster.put(slice_of("four", endpoint("a", "10.0.0.1")))
        await until(lambda: following.upstreams[0].url == "http://10.0.0.1:8000")


@pytest.mark.parametrize(
    "useless",
    [
        slice_of("x", endpoint("x", "10.0.0.9"), ports=False),
        slice_of("x", endpoint("x", "host.example"), family="FQDN"),
        slice_of("x", endpoint("x", "10.0.0.9/../admin")),
        slice_of("x"),
        {"metadata": {"name": "x"}},
    ],
    ids=["no ports", "names", "no address", "no endpoints", "nothing"],
)
async def test_a_slice_without_usable_addresses_is_ignored(
    setting: Setting, useless: dict[str, Any]
) -> None:
    setting.cluster.put(useless)
    setting.cluster.put(slice_of("s", endpoint("a", "10.0.0.1")))
    async with setting.following() as following:
        await following.until("a")


async def test_a_long_list_is_read_in_pages(setting: Setting) -> None:
    setting.cluster.page = 2
    names = [f"p{i}" for i in range(5)]
    for i, name in enumerate(names):
        setting.cluster.put(slice_of(f"s{i}", endpoint(name, f"10.0.0.{i}")))
    async with setting.following() as following:
        await following.until(*names)
    assert setting.cluster.requests[:3] == ["list"] * 3


async def test_without_the_api_server_the_last_known_replicas_are_kept(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = setting.cluster
    cluster.put(slice_of("s", endpoint("a", "10.0.0.1")))
    async with setting.following() as following:
        await cluster.watching.wait()
        port = setting.runner.addresses[0][1]
        await setting.runner.cleanup()
        await until(lambda: bool(caplog.records))
        assert [u.name for u in following.upstreams] == ["a"]
        cluster.put(slice_of("s", endpoint("b", "10.0.0.2")))
        setting.runner, _ = await serve(cluster, port)
        await following.until("b")
        await setting.runner.cleanup()
    assert {r.message for r in caplog.records} == {"endpoints not updated"}


@pytest.mark.parametrize("status", [500, 403, 429, 410])
async def test_an_error_status_is_retried(setting: Setting, status: int) -> None:
    cluster = setting.cluster
    cluster.failing = status
    cluster.put(slice_of("s", endpoint("a", "10.0.0.1")))
    known = asyncio.create_task(_names(setting.watch()))
    await until(lambda: len(cluster.requests) >= 3)
    assert not known.done()
    cluster.failing = 0
    assert await asyncio.wait_for(known, PATIENCE_S) == ["a"]


async def test_an_expired_version_leads_to_a_new_list(setting: Setting) -> None:
    cluster = setting.cluster
    cluster.put(slice_of("s", endpoint("a", "10.0.0.1")))
    watch = setting.watch()
    await watch.first()
    cluster.put(slice_of("s", endpoint("b", "10.0.0.2")))
    cluster.history.clear()
    cluster.oldest = cluster.version
    following = WatchedReplicas()
    task = asyncio.create_task(watch.follow(following.apply))
    await following.until("b")
    task.cancel()
    assert cluster.requests[:3] == ["list", "watch", "list"]


@pytest.mark.parametrize(
    "invalid",
    [b"{\n", b'{"type":"MODIFIED","object":[]}\n', b'{"type":"ADDED"}\n', b"\xff\xfe\n"],
    ids=["broken", "a list", "no object", "not text"],
)
async def test_an_invalid_line_in_a_watch_leads_to_a_new_list(
    setting: Setting, invalid: bytes
) -> None:
    cluster = setting.cluster
    cluster.put(slice_of("s", endpoint("a", "10.0.0.1")))
    async with setting.following() as following:
        await cluster.watching.wait()
        cluster.silent = True
        cluster.put(slice_of("s", endpoint("b", "10.0.0.2")))
        cluster.send_raw(invalid)
        await following.until("b")
    assert cluster.requests.count("list") >= 2


@pytest.mark.parametrize(
    "intervals",
    [
        WatchIntervals(retry_ns=5 * NS_PER_MS, silence_ns=50 * NS_PER_MS),
        WatchIntervals(retry_ns=5 * NS_PER_MS, watch_ns=NS_PER_S, resync_ns=50 * NS_PER_MS),
    ],
    ids=["a dead connection", "a change without an event"],
)
async def test_a_change_that_a_silent_watch_misses_is_found(
    setting: Setting, intervals: WatchIntervals
) -> None:
    cluster = setting.cluster
    cluster.put(slice_of("s", endpoint("a", "10.0.0.1")))
    async with setting.following(intervals) as following:
        await cluster.watching.wait()
        cluster.silent = True
        cluster.put(slice_of("s", endpoint("b", "10.0.0.2")))
        await following.until("b")


async def test_the_token_is_read_for_each_request(setting: Setting) -> None:
    cluster = setting.cluster
    cluster.put(slice_of("s", endpoint("a", "10.0.0.1")))
    watch = setting.watch()
    assert await _names(watch) == ["a"]
    cluster.token = "second"
    setting.token_file.write_text("second", encoding="utf-8")
    following = WatchedReplicas()
    task = asyncio.create_task(watch.follow(following.apply))
    cluster.put(slice_of("s", endpoint("b", "10.0.0.2")))
    await following.until("b")
    task.cancel()
    assert cluster.requests.count("list") == 1


async def test_a_bookmark_advances_the_version_of_the_watch(setting: Setting) -> None:
    cluster = setting.cluster
    cluster.put(slice_of("s", endpoint("a", "10.0.0.1")))
    watch = setting.watch(WatchIntervals(retry_ns=5 * NS_PER_MS, watch_ns=NS_PER_S))
    await watch.first()
    bookmark = {"kind": "EndpointSlice", "metadata": {"resourceVersion": "99"}}
    cluster.raw = line("BOOKMARK", bookmark)
    cluster.version = 99
    following = WatchedReplicas()
    task = asyncio.create_task(watch.follow(following.apply))
    await until(lambda: cluster.requests.count("watch") >= 2)
    cluster.oldest = 99
    cluster.put(slice_of("s", endpoint("b", "10.0.0.2")))
    await following.until("b")
    task.cancel()
    assert cluster.requests.count("list") == 1


def test_the_api_server_is_known_only_in_a_pod() -> None:
    with pytest.raises(UsageError, match="KUBERNETES_SERVICE_HOST"):
        in_cluster({})
    pod = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert in_cluster(pod).url == "https://[fd00::1]:6443"


@pytest.mark.parametrize("text", ["", "chat", "a/b/c", "A/b", "a/../b", "a/"])
def test_a_service_is_parsed_with_its_namespace(text: str) -> None:
    assert parse_service("models/chat-engines") == ("models", "chat-engines")
    with pytest.raises(ValueError, match="NAMESPACE/SERVICE"):
        parse_service(text)


async def _names(watch: EndpointsWatch) -> list[str]:
    return [u.name for u in await watch.first()]
