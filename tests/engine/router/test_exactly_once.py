"""Each request has exactly one outcome, for every behaviour of replicas and clients."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import aiohttp
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.engine.router.conftest import END, TOKEN

from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.router.service import RouterService
from goodput_engine.router.settings import ProbeSettings, RouterLimits, RouterSettings, Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.router.conftest import Call, FakeReplica

# The steps of a replica.
SCRIPTS = st.sampled_from(
    [
        ("head", "token", "token", "end"),
        ("whole",),
        ("reset",),
        ("close",),
        ("500",),
        ("429",),
        ("400",),
        ("hang",),
        ("head", "reset"),
        ("head", "token", "reset"),
        ("head", "token", "hang"),
        ("head", "half", "close"),
        ("head", "token", "half", "reset"),
        ("head", "error"),
        ("head", "close"),
        ("garbage",),
    ]
)
# A client reads the response, disconnects before or during it, or sends an invalid request.
CLIENTS = st.sampled_from(["read", "read", "read", "leave", "leave midway", "bad class"])


async def play(call: Call, script: tuple[str, ...]) -> None:
    for step in script:
        match step:
            case "head":
                await call.stream_head()
            case "token":
                await call.chunk(TOKEN)
            case "half":
                await call.chunk(b'data: {"choi')
            case "error":
                await call.chunk(b'data: {"error":{"message":"x"}}\n\n')
            case "end":
                await call.chunk(END)
                await call.end()
            case "whole":
                await call.whole("200 OK", b"{}", 'X-Goodput-Timings: {"ttft_ms":1}')
            case "reset":
                call.reset()
            case "close":
                call.writer.close()
            case "hang":
                await asyncio.Event().wait()
            case "garbage":
                await call.send(b"\x00\x01\r\n\r\n")
            case status:
                await call.whole(f"{status} X", b"{}")


@settings(max_examples=examples(30), deadline=None)
@given(requests=st.lists(st.tuples(SCRIPTS, SCRIPTS, CLIENTS), min_size=1, max_size=12))
def test_each_request_has_exactly_one_outcome(
    fake_replica: Callable[[str], FakeReplica],
    requests: list[tuple[tuple[str, ...], tuple[str, ...], str]],
) -> None:
    uvloop.run(_run(fake_replica, requests))  # the loop that the command runs on


async def _run(
    fake_replica: Callable[[str], FakeReplica],
    requests: list[tuple[tuple[str, ...], tuple[str, ...], str]],
) -> None:
    promise = SLOClass(name="only", ttft_ms=1_000, tpot_ms=1_000)
    router_settings = RouterSettings(
        llmservice="chat",
        policy=RouterPolicy.LEAST_LOADED,
        classes={"only": promise},
        default_class="only",
        timeouts=Timeouts(first_byte_ns=50 * NS_PER_MS, idle_ns=50 * NS_PER_MS),
        limits=RouterLimits(retry_burst=3),
        probe=ProbeSettings(interval_ns=NS_PER_S, retry_ns=NS_PER_MS),
    )
    arrived = [asyncio.Event() for _ in requests]
    replicas = [fake_replica("r0"), fake_replica("r1")]
    for replica in replicas:
        await replica.start()

        async def behave(call: Call) -> None:
            row = int(call.header("X-Row") or "0")
            arrived[row].set()
            first, second, _ = requests[row]
            seen = sum(c.header("X-Row") == call.header("X-Row") for r in replicas for c in r.calls)
            await play(call, first if seen == 1 else second)

        replica.behave = behave
    async with (
        RouterService(
            router_settings, clock=time.monotonic_ns, upstreams=[r.upstream for r in replicas]
        ) as router,
        aiohttp.ClientSession() as client,
    ):
        while not all(replica.ready for replica in router.replicas):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        await asyncio.gather(
            *(
                ask(client, router.url, row, how, arrived[row])
                for row, (_, _, how) in enumerate(requests)
            )
        )
        async with asyncio.timeout(5):
            await router.outcomes.idle.wait()
        counted = sum(router.outcomes.by_class()["only"].values()) + router.outcomes.client_errors
        assert counted == len(requests)
        outcomes = router.outcomes.by_class()["only"]
        seconds = router.outcomes.seconds(0, time.monotonic_ns() + NS_PER_S).classes.get("only")
        judged = sum(n for name, n in outcomes.items() if name not in {"cancelled", "unjudged"})
        assert (sum(seconds.total) if seconds else 0) == judged
        assert (sum(seconds.good) if seconds else 0) == outcomes["attained"]
        assert [replica.in_flight for replica in router.replicas] == [0, 0]
    for replica in replicas:
        await replica.refuse()


async def ask(
    client: aiohttp.ClientSession, url: str, row: int, how: str, arrived: asyncio.Event
) -> None:
    headers = {"X-Row": str(row)} | ({"X-SLO-Class": "none"} if how == "bad class" else {})
    url += "/v1/completions"
    if how == "leave":
        # Disconnect only once the router has the request; otherwise it has no outcome.
        asking = asyncio.ensure_future(client.post(url, data=b"{}", headers=headers))
        waiting = asyncio.ensure_future(arrived.wait())
        await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        waiting.cancel()
        for response in await asyncio.gather(asking, waiting, return_exceptions=True):
            if isinstance(response, aiohttp.ClientResponse):
                response.close()
        return
    with contextlib.suppress(aiohttp.ClientError):
        async with client.post(url, data=b"{}", headers=headers) as response:
            if how == "leave midway":
                await response.content.readany()
                return
            await response.read()
