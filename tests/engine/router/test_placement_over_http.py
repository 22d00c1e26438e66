"""Placement over HTTP: the same decisions as in virtual time, and reported load."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.router.conftest import END, TOKEN, respond, stream, until

from goodput_core.contract import HEADER_LOAD
from goodput_core.placement import PLACEMENTS, ReplicaLoad
from goodput_core.placement.blockhash import block_hashes
from goodput_core.spec.choices import RouterPolicy
from goodput_core.spec.workloads import SessionAffinitySpec
from goodput_core.units import NS_PER_S
from goodput_engine.messages import Submit
from goodput_engine.router.replicas import EngineReport, ReplicaPool
from goodput_engine.router.upstreams import Upstream
from goodput_replay.emulation.fleet import VirtualRouter

if TYPE_CHECKING:
    from tests.engine.router.conftest import Behaviour, Call, StartBench


@dataclass
class Stub:
    """A replica in virtual time; the test sets its number of requests."""

    name: str
    in_flight: int = 0

    def load(self, _now_ns: int) -> ReplicaLoad:
        return ReplicaLoad(name=self.name, in_flight=self.in_flight)


@pytest.mark.parametrize("policy", PLACEMENTS)
async def test_the_router_decides_as_in_virtual_time_on_the_same_keys_and_loads(
    start: StartBench, policy: RouterPolicy
) -> None:
    bench = await start(4, policy=policy)
    release: dict[bytes, asyncio.Event] = {}

    async def hold(call: Call) -> None:
        await release[call.body].wait()
        await stream(TOKEN + END)(call)

    for replica in bench.replicas:
        replica.behave = hold
    random, virtual = Random(3), VirtualRouter(policy, seed=0)
    stubs: Any = [Stub(replica.name) for replica in bench.replicas]
    running: list[tuple[bytes, Any, asyncio.Task[tuple[int, bytes]]]] = []
    taken: list[str] = []
    for index in range(60):
        # A few sessions, each turn longer than the one before it.
        ids = [random.randrange(5), *range(16 * (1 + index // 6)), index]
        body = json.dumps({"prompt": ids, "user": str(index)}).encode()
        release[body] = asyncio.Event()
        keys = block_hashes(ids, 16)
        submit = Submit(rid=index, arrival_ns=0, input_tokens=len(ids), block_hashes=keys)
        expected: Any = virtual.place(stubs, submit, 0)
        response = asyncio.ensure_future(bench.post(body))
        arrivals = [asyncio.ensure_future(r.arrived.get()) for r in bench.replicas]
        await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
        found = [r.name for r, at in zip(bench.replicas, arrivals, strict=True) if at.done()]
        for waiting in arrivals:
            waiting.cancel()
        assert found == [expected.name], index
        taken += found
        expected.in_flight += 1
        running.append((body, expected, response))
        while random.random() < 0.45 and running:
            ended, stub, task = running.pop(random.randrange(len(running)))
            release[ended].set()
            assert (await task)[0] == 200
            await until(lambda: sum(r.in_flight for r in bench.router.replicas) == len(running))
            stub.in_flight -= 1
    assert len(set(taken)) == 4, "nothing was compared"
    for ended, _, task in running:
        release[ended].set()
        await task


def reporting(load: str, status: str = "200 OK") -> Behaviour:
    """Respond with a load report in the header."""
    headers = () if status.startswith("200") else ("Retry-After: 9",)
    return respond(status, b'{"choices":[]}', f"{HEADER_LOAD}: {load}", *headers)


FULL = '{"saturated":true,"waiting":8}'


class SaturatedReplica:
    """Report saturation with the first token and end the stream when `end` is set."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.head(
            "200 OK", "Content-Type: text/event-stream", f"{HEADER_LOAD}: {FULL}",
            "Transfer-Encoding: chunked",
        )  # fmt: skip
        await call.chunk(TOKEN)
        await self.end.wait()
        await call.chunk(END)
        await call.end()


async def test_a_replica_that_reports_saturation_in_a_response_gets_no_more_until_it_ends(
    start: StartBench,
) -> None:
    bench = await start(2)
    full, other = bench.replicas
    full.behave = slow = SaturatedReplica()
    first = asyncio.ensure_future(bench.post())
    await until(lambda: next(iter(bench.router.replicas)).saturated)
    for _ in range(5):
        assert (await bench.post())[0] == 200
    assert (len(full.calls), len(other.calls)) == (1, 5)
    slow.end.set()
    assert (await first)[0] == 200
    assert (await bench.post())[0] == 200
    assert len(full.calls) == 2


async def test_with_all_replicas_saturated_the_response_is_429_at_once(start: StartBench) -> None:
    bench = await start(2)
    slow = SaturatedReplica()
    for replica in bench.replicas:
        replica.behave = slow
    running = [asyncio.ensure_future(bench.post()) for _ in range(2)]
    await until(lambda: all(replica.saturated for replica in bench.router.replicas))
    async with bench.complete() as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
    assert [len(replica.calls) for replica in bench.replicas] == [1, 1], "no replica got a request"
    slow.end.set()
    await asyncio.gather(*running)
    assert await bench.settled() == {"attained": 2, "shed": 1}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 429, id="equal"),
        pytest.param({"X_Priority": "-1"}, 429, id="less important"),
        pytest.param({"X_Priority": "1"}, 200, id="more important"),
        pytest.param({"X_SLO_TTFT_Ms": "5000.001"}, 200, id="longer target"),
        pytest.param({"X_SLO_Class": "batch"}, 200, id="a class with a longer target"),
    ],
)
async def test_a_saturated_replica_gets_requests_that_are_more_important_than_a_waiting_one(
    start: StartBench, headers: dict[str, str], status: int
) -> None:
    bench = await start(1)
    (replica,) = bench.router.replicas
    bench.replicas[0].state = b'{"saturated":true,"displaceable":[0,1,5000000000]}'
    replica.wake.set()
    await until(lambda: replica.saturated)
    assert (await bench.post(b"{}", **headers))[0] == status
    assert len(bench.replicas[0].calls) == (status == 200)


@pytest.mark.parametrize(("priority", "status"), [("0", 429), ("1", 200)])
async def test_a_retried_request_can_displace_another_on_a_saturated_replica(
    start: StartBench, priority: str, status: int
) -> None:
    bench = await start(2)
    rejecting, displacing = bench.replicas
    rejecting.behave = respond("429 Too Many Requests", b'{"error":{}}', "Retry-After: 3")
    displacing.state = b'{"saturated":true,"displaceable":[0,1,5000000000]}'
    _, replica = bench.router.replicas
    replica.wake.set()
    await until(lambda: replica.saturated)
    assert (await bench.post(b"{}", X_Priority=priority))[0] == status
    assert len(rejecting.calls) == 1
    assert len(displacing.calls) == (status == 200)


async def test_the_load_header_is_removed_from_the_response(start: StartBench) -> None:
    bench = await start(1)
    bench.replicas[0].behave = reporting('{"waiting":2}')
    async with bench.complete() as response:
        assert HEADER_LOAD not in response.headers
    (replica,) = bench.router.replicas
    assert replica.report.waiting == 2


async def test_a_replica_that_rejects_one_request_and_is_not_saturated_gets_the_next(
    start: StartBench,
) -> None:
    bench = await start(1)
    bench.replicas[0].behave = reporting('{"saturated":false}', "429 Too Many Requests")
    assert [(await bench.post())[0] for _ in range(3)] == [429] * 3
    assert len(bench.replicas[0].calls) == 3


@pytest.mark.parametrize("load", ["", "nonsense", "[1]", '{"waiting":"many"}', "{" * 5_000])
async def test_an_invalid_load_header_changes_nothing(start: StartBench, load: str) -> None:
    bench = await start(1)
    bench.replicas[0].behave = reporting(load)
    assert [(await bench.post())[0] for _ in range(2)] == [200] * 2
    assert next(iter(bench.router.replicas)).report == EngineReport()


async def test_a_report_in_a_response_during_a_probe_is_newer_than_the_probe(
    start: StartBench,
) -> None:
    bench = await start(1)
    (replica,), (fake,) = bench.router.replicas, bench.replicas
    fake.state = b'{"waiting":1}'
    fake.may_report.clear()
    requests = fake.state_requests
    replica.wake.set()
    await until(lambda: fake.state_requests > requests)
    fake.behave = reporting('{"waiting":5}')
    assert (await bench.post())[0] == 200
    fake.state = b"invalid"
    fake.may_report.set()
    replica.wake.set()
    await until(lambda: fake.state_requests > requests + 1)  # so the first probe is complete
    assert replica.report.waiting == 5
    fake.state = b'{"waiting":2}'
    replica.wake.set()
    await until(lambda: replica.report.waiting == 2)


async def test_the_newer_of_two_reports_is_used() -> None:
    replicas = ReplicaPool(RouterPolicy.LEAST_LOADED)
    replicas.set_upstreams([Upstream("a", "http://127.0.0.1:1")])
    (replica,) = replicas
    replica.mark_ready()
    header, poll = EngineReport(saturated=True, waiting=7), EngineReport(saturated=False)
    replica.take_report(header, 20, valid_ns=NS_PER_S)
    replica.take_report(poll, 10, valid_ns=NS_PER_S)  # requested before that response
    assert replica.load(30).waiting == 7
    assert replicas.place(30)[0] is None
    replica.take_report(poll, 40, valid_ns=NS_PER_S)
    assert replicas.place(50)[0] is replica


@pytest.mark.parametrize("by", ["header", "cookie"])
async def test_the_requests_of_a_session_reach_one_replica(start: StartBench, by: str) -> None:
    name = "X-Session-Id" if by == "header" else "sid"
    affinity = SessionAffinitySpec(**{by: name})
    bench = await start(4, session_affinity=affinity)
    reached = set()
    for session in range(8):
        value = f"user-{session}"
        named = {name: value} if by == "header" else {"Cookie": f"other=1; {name}={value}"}
        before = [len(replica.calls) for replica in bench.replicas]
        for turn in range(5):
            body = json.dumps({"prompt": f"{turn}"}).encode()
            assert (await bench.post(body, **named))[0] == 200
        counts = [len(r.calls) - n for r, n in zip(bench.replicas, before, strict=True)]
        assert sorted(counts) == [0, 0, 0, 5]
        reached.add(counts.index(5))
    assert len(reached) > 1, "sessions are spread"
    for _ in range(8):
        assert (await bench.post())[0] == 200, "a request without a session is placed, too"
