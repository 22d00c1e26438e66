"""A pushed token budget is read in at most eight files, from the decision to the scheduler.

The push runs in this process, over real HTTP and a real socket to the engine core. A file counts
if a local variable of one of its functions is the budget or contains it. Modules that transport
bytes or messages of any kind do not count, because a reader need not open them.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from tests.builders.serving import server_state

import goodput_core
import goodput_engine
import goodput_operator
from goodput_core.control import (
    Bounds,
    ControlInput,
    ControlState,
    ControlStep,
    EngineReading,
    ReplicaPhase,
    ServiceParams,
    Setpoint,
    Signal,
    Traffic,
    control_step,
)
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_core.units import NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.core.process import serve
from goodput_engine.core.wire import front_reader
from goodput_engine.core_client import CoreClient
from goodput_engine.device.load import load_profile
from goodput_engine.messages import EndProcess, Limits, Ready
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.server.app import admin_app
from goodput_engine.server.metrics import EngineMetrics
from goodput_operator.kube.fence import Fence, SystemClock
from goodput_operator.local.control import FleetControl
from goodput_operator.local.decide import Address, ProcessPhase, ProcessView, Role
from goodput_operator.reconcile.actions import Push
from goodput_operator.reconcile.apply import LimitsPusher
from goodput_operator.render.secrets import control_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import FrameType

    from goodput_engine.core.engine_core import EngineCore

    Pushes = Callable[[ControlStep, aiohttp.ClientSession, str], Awaitable[set[str]]]

BUDGET = 1234
KEY = b"0123456789abcdef0123456789abcdef"
CLASSES = (SLOClass(name="chat", ttft_ms=500, tpot_ms=50),)
CONFIGURE: dict[str, Any] = {
    "token_budget": 512,
    "min_token_budget": 64,
    "max_token_budget": 2048,
    "max_num_seqs": 8,
}
PACKAGES = [
    Path(one.__file__ or "").parent for one in (goodput_core, goodput_engine, goodput_operator)
]
TRANSPORT = {"goodput_engine/core_client.py", "goodput_engine/core/wire.py"}


def decided() -> ControlStep:
    """Return a control step that pushes the budget to an engine."""
    params = ServiceParams(mode=ControlMode.AUTO, classes=CLASSES, max_num_seqs=8)
    bounds = replace(Bounds.initial(params), max_tokens=BUDGET)
    return control_step(
        ControlInput(
            state=ControlState(setpoint=Setpoint(limits_revision=2, bounds=bounds, replicas=1)),
            params=params,
            interval_ns=10**10,
            traffic=Traffic(signal=Signal.FRESH),
            classes=(),
            engines=(EngineReading(name="chat-0", signal=Signal.FRESH),),
            phases={"chat-0": ReplicaPhase.READY},
            desired_replicas=1,
            startups_ns=(),
            now_ns=10**10,
        )
    )


def holds(value: object) -> bool:
    """True if a local variable is the budget or contains it."""
    if isinstance(value, ControlStep):
        return True
    if isinstance(value, dict):
        return any(one == BUDGET for one in value.values())
    if isinstance(value, Limits | SchedulerLimits):
        return value.token_budget == BUDGET
    limits = getattr(value, "limits", None)
    if isinstance(limits, Limits | dict):
        return holds(limits)
    return (type(value) is int and value == BUDGET) or getattr(value, "token_budget", 0) == BUDGET


@contextmanager
def files_with_the_budget(files: set[str]) -> Iterator[None]:
    def trace(frame: FrameType, event: str, arg: object) -> Any:
        path = Path(frame.f_code.co_filename)
        package = next((one for one in PACKAGES if one in path.parents), None)
        if package is None:
            return None
        if any(map(holds, frame.f_locals.values())):
            files.add(path.relative_to(package.parent).as_posix())
        frame.f_trace_lines = False
        return trace

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(cast("Any", before))


@asynccontextmanager
async def replica() -> AsyncIterator[tuple[EngineCore, str]]:
    """Start an engine whose core is a thread of this process; yields the core and the URL."""
    token = control_token(KEY, service_uid="uid", revision="1")
    state = server_state(classes=CLASSES, control_token=token, **CONFIGURE)
    core = build_core(state.configure, load_profile(state.configure.device))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    clock = time.monotonic_ns
    thread = threading.Thread(target=serve, args=(theirs, core, [], front_reader(), clock))
    client = CoreClient(cast("Any", None), lambda _: None, 30)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_unix_connection(lambda: client, sock=ours)
    ready = Ready(device="unit", vocab_size=1, max_model_tokens=1, state=core.state(clock()))
    state.serve(client, ready)
    metrics = EngineMetrics(state.settings.identity, lambda: None)
    async with TestServer(admin_app(state, metrics)) as server:
        thread.start()
        try:
            yield core, str(server.make_url(""))
        finally:
            client.send(EndProcess())
            await asyncio.to_thread(thread.join, 10)
            transport.close()
            theirs.close()


async def push_to_process(step: ControlStep, session: aiohttp.ClientSession, url: str) -> set[str]:
    """Push as `goodput up` does."""
    token = control_token(KEY, service_uid="uid", revision="1")
    control = FleetControl(
        params=step.decision.params,
        interval_ns=1,
        token=token,
        reporter=cast("Any", None),  # reports failures only
        clock=time.monotonic_ns,
    )
    view = ProcessView(
        name="chat-0",
        role=Role.REPLICA,
        phase=ProcessPhase.READY,
        started_ns=0,
        address=Address(url=url, admin_url=url),
    )
    await control.push(session, [view], step)
    return set()


async def push_to_pod(step: ControlStep, session: aiohttp.ClientSession, url: str) -> set[str]:
    """Push as the operator does; its decision turns a push into an action."""
    clock = SystemClock()
    fence = Fence(clock)
    fence.extend(clock.now_ns() + 10 * NS_PER_S)
    pusher = LimitsPusher(session, fence=fence, key=KEY)
    actions = [Push(pod=p.name, url=url, revision="1", limits=p.limits) for p in step.pushes]
    assert await pusher.push("uid", actions) == {}
    return {"goodput_operator/reconcile/decide.py"}


@pytest.mark.parametrize("push", [push_to_process, push_to_pod])
async def test_a_pushed_budget_is_read_in_at_most_eight_files(push: Pushes) -> None:
    step, files = decided(), {"goodput_core/control/step.py"}
    with files_with_the_budget(files):
        async with replica() as (core, url), aiohttp.ClientSession() as session:
            files |= await push(step, session, url)
            async with asyncio.timeout(20):
                while core.scheduler.limits.token_budget != BUDGET:  # noqa: ASYNC110 - of a thread
                    await asyncio.sleep(0.001)
    assert "goodput_engine/scheduler/scheduler.py" in files
    assert files & TRANSPORT == TRANSPORT, "the push went through the real transport"
    assert len(files - TRANSPORT) <= 8, sorted(files)
