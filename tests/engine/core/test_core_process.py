"""The core as a process of its own: its first word, its steps in real time, and its end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from tests.builders.schedulers import make_configure

from goodput_core.slo.targets import Targets
from goodput_engine.core import process as core_process
from goodput_engine.core.build import build_core
from goodput_engine.core.engine_core import EngineCore
from goodput_engine.core.process import serve
from goodput_engine.core.wire import core_reader, encode, front_reader
from goodput_engine.device.load import load_profile
from goodput_engine.kv.blocks import BlockPool
from goodput_engine.messages import (
    Cancel,
    Configure,
    Drain,
    EndProcess,
    ExecutorInput,
    Failed,
    Limits,
    Ready,
    Rejected,
    SetLimits,
    StepOutputs,
    Submit,
)
from goodput_engine.scheduler.plan import StepPlan, StepResult
from goodput_engine.scheduler.policies.registry import build_policy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_engine.messages import CoreMessage, FrontMessage


class Core:
    """The front's end of a real core process."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.sock = sock
        self.process = process
        self.reader = core_reader()
        self.unread: list[CoreMessage] = []

    def send(self, *messages: FrontMessage) -> None:
        self.sock.sendall(b"".join(encode(message) for message in messages))

    def receive(self) -> CoreMessage | None:
        """The next message, or None at the end of the stream."""
        while not self.unread:
            data = self.sock.recv(1 << 20)
            if not data:
                return None
            self.unread += self.reader.feed(data)
        return self.unread.pop(0)

    def hear_until_finished(self, *rids: int) -> list[StepOutputs]:
        left, steps = set(rids), []
        while left:
            message = self.receive()
            assert isinstance(message, StepOutputs)
            steps.append(message)
            left -= {o.rid for o in message.outputs if o.finish_reason is not None}
        return steps


@contextmanager
def _core() -> Iterator[Core]:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    fd = theirs.fileno()
    command = [sys.executable, "-m", "goodput_engine.core.process", "--fd", str(fd)]
    process = subprocess.Popen(command, pass_fds=[fd])
    theirs.close()
    try:
        yield Core(ours, process)
    finally:
        ours.close()
        process.wait(20)


def _configure(device: str = "unit", policy: str = "sarathi", budget: int = 512) -> Configure:
    return make_configure(
        device=device,
        policy=policy,
        token_budget=budget,
        min_token_budget=64,
        max_token_budget=1024,
    )


def _submit(rid: int, length: int = 5) -> Submit:
    return Submit(
        rid=rid,
        arrival_ns=time.monotonic_ns(),
        input_tokens=10,
        executor=ExecutorInput(output_tokens=length),
    )


def test_a_request_runs_in_real_time_on_the_modelled_clock() -> None:
    with _core() as core:
        core.send(_configure())
        ready = core.receive()
        assert isinstance(ready, Ready)
        assert (ready.device, ready.vocab_size, ready.max_model_tokens) == ("unit", 32000, 65536)
        assert (ready.state.block_size, ready.state.token_budget) == (16, 512)
        sent = time.monotonic_ns()
        core.send(_submit(1, 50))
        steps = core.hear_until_finished(1)
        assert sum(o.new_tokens for s in steps for o in s.outputs) == 50
        at = [s.at_ns for s in steps]
        assert sent < at[0] <= time.monotonic_ns()
        if steps[-1].state.behind_ns == 0:  # a machine that never stalls for 100 ms
            assert {b - a for a, b in pairwise(at)} == {1_000_000}


def test_a_request_is_in_no_step_that_began_before_it_came() -> None:
    config = _configure()
    core = build_core(config, load_profile(config.device))
    core.submit(Submit(rid=1, arrival_ns=0, input_tokens=10), 0)
    core.step(0)
    assert core.next_event_ns() == 1_000_000
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        ours.shutdown(socket.SHUT_WR)  # the core ends when it has handled what is there
        # The step that ended at 1 ms is noticed at 1.8 ms, with a request that came at 1.5 ms.
        came = Submit(rid=2, arrival_ns=1_500_000, input_tokens=10)
        serve(theirs, core, [came], front_reader(), lambda: 1_800_000)
    assert core.next_event_ns() == 2_000_000
    core.step(2_000_000)
    outputs = core.step(3_000_000)
    assert outputs is not None
    assert {o.rid: o.first_scheduled_ns for o in outputs.outputs} == {1: 0, 2: 2_000_000}


class HostExecutor:
    """An executor that computes a step while `collect` is called, as on a CPU.

    Args:
        front: the other end of the core's socket. During the second step, a second request arrives.
    """

    behind_ns = 0
    computes_in_collect = True
    default_depth = 0

    def __init__(self, front: socket.socket) -> None:
        self.admitted: list[set[int]] = []
        self._front = front
        self._plans: deque[StepPlan] = deque()

    def add(self, submit: Submit) -> None:
        pass

    def forget(self, rids: Iterable[int]) -> None:
        pass

    def submit(self, plan: StepPlan, ready_ns: int) -> None:
        self._plans.append(plan)

    def next_event_ns(self) -> int | None:
        return self._plans[0].at_ns if self._plans else None

    def collect(self, now_ns: int) -> StepResult | None:
        if not self._plans:
            return None
        plan = self._plans.popleft()
        self.admitted.append({one.rid for one in plan.admitted})
        if len(self.admitted) == 2:
            self._front.sendall(encode(_submit(2)))
        elif len(self.admitted) == 6:
            self._front.sendall(encode(EndProcess()))
        at_ns = time.monotonic_ns()
        return StepResult(plan_id=plan.plan_id, at_ns=at_ns, step_ns=at_ns - now_ns, stopped={})


@pytest.mark.parametrize(("depth", "plan"), [(0, 2), (1, 3)])
def test_a_request_that_arrives_while_the_host_computes_is_in_the_next_plan(
    depth: int, plan: int
) -> None:
    """With a depth of one, the next plan but one, because the next one is made already."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        executor = HostExecutor(ours)
        scheduler = Scheduler(
            policy=build_policy("sarathi"),
            kv=BlockPool(total_blocks=20, block_size=16),
            limits=SchedulerLimits(token_budget=64, max_num_seqs=4, max_waiting=10),
            max_model_tokens=300,
            depth=depth,
        )
        core = EngineCore(scheduler=scheduler, executor=executor)
        serve(theirs, core, [_submit(1, 200)], front_reader(), time.monotonic_ns)
    expected: list[set[int]] = [set() for _ in range(6)]
    expected[0], expected[plan] = {1}, {2}
    assert executor.admitted == expected


def test_the_state_without_a_dropped_request_is_sent_at_once_by_an_idle_core() -> None:
    core = build_core(make_configure(late_requests="drop"), load_profile("unit"))
    late = Submit(rid=1, arrival_ns=0, input_tokens=10, targets=Targets(ttft_ns=1_000_000))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        ours.shutdown(socket.SHUT_WR)
        serve(theirs, core, [late], front_reader(), lambda: 5_000_000)
        rejected, outputs = core_reader().feed(ours.recv(1 << 20))
    assert isinstance(rejected, Rejected)
    assert (rejected.rid, rejected.reason) == (1, "late")
    assert isinstance(outputs, StepOutputs)
    assert (outputs.state.waiting, outputs.state.shed) == (0, 1)


def test_refusals_limits_cancellation_and_drain_go_through() -> None:
    with _core() as core:
        core.send(_configure(), SetLimits(revision=2, limits=Limits(token_budget=128)))
        assert isinstance(core.receive(), Ready)
        limited = core.receive()
        assert isinstance(limited, StepOutputs)
        assert (limited.state.limits_revision, limited.state.token_budget) == (2, 128)
        core.send(Submit(rid=7, arrival_ns=0, input_tokens=10**6))
        rejected = core.receive()
        assert isinstance(rejected, Rejected)
        assert (rejected.rid, rejected.reason) == (7, "too_long")
        core.send(_submit(1, 100_000), Cancel(rid=1), Cancel(rid=99), _submit(2), Drain())
        steps = core.hear_until_finished(2)
        assert {o.rid for s in steps for o in s.outputs} == {2}
        assert steps[-1].state.draining
        assert steps[-1].state.kv_free_blocks == steps[-1].state.kv_total_blocks


@pytest.mark.parametrize("way", ["end of stream", "shutdown", "end of stream before a word"])
def test_the_core_ends_when_the_front_is_gone(way: str) -> None:
    with _core() as core:
        if way != "end of stream before a word":
            core.send(_configure(), _submit(1, 60_000))
            assert isinstance(core.receive(), Ready)
        if way == "shutdown":
            core.send(EndProcess())
        else:
            core.sock.close()
        assert core.process.wait(20) == 0


def test_a_signal_to_the_whole_terminal_leaves_the_core_to_the_front() -> None:
    with _core() as core:
        core.send(_configure())
        assert isinstance(core.receive(), Ready)
        core.process.send_signal(signal.SIGINT)
        core.process.send_signal(signal.SIGTERM)
        core.process.send_signal(signal.SIGHUP)
        core.send(_submit(1))
        core.hear_until_finished(1)


@pytest.mark.parametrize(
    ("message", "detail", "exit_code"),
    [
        (_configure(device="h200"), "no device profile is called 'h200'", 64),
        (_configure(policy="fifo"), "policy 'fifo' is not a policy", 64),
        (_configure(budget=8), "the token budget must be 64 to 1024, not 8", 64),
        (Drain(), "the first message must be Configure, not Drain", 70),
    ],
    ids=["device", "policy", "budget", "order"],
)
def test_what_cannot_start_says_why_in_one_sentence(
    message: FrontMessage, detail: str, exit_code: int
) -> None:
    with _core() as core:
        core.send(message)
        failed = core.receive()
        assert isinstance(failed, Failed)
        assert failed.detail.startswith(detail)
        assert failed.exit_code == exit_code
        assert core.receive() is None
        assert core.process.wait(20) == exit_code


def test_an_input_output_error_is_a_failure_and_not_the_end_of_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(core_process, "build_core", full_disk)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(encode(_configure()))
        assert core_process.main(["--fd", str(theirs.detach())]) == 70
        (failed,) = core_reader().feed(ours.recv(1 << 16))
    assert isinstance(failed, Failed)
    assert failed.detail.startswith("the engine core failed: OSError: ")
    assert failed.exit_code == 70


def test_a_broken_frame_ends_the_core_with_a_sentence() -> None:
    with _core() as core:
        core.send(_configure())
        assert isinstance(core.receive(), Ready)
        core.sock.sendall(b"\xff\xff\xff\xff")
        failed = core.receive()
        assert isinstance(failed, Failed)
        assert "a frame announces 4294967295 bytes" in failed.detail
        assert core.process.wait(20) == 70


def test_a_front_that_does_not_read_delays_no_step_and_loses_no_token() -> None:
    with _core() as core:
        core.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        core.send(_configure())
        assert isinstance(core.receive(), Ready)
        core.send(*[_submit(rid, 400) for rid in range(8)])
        steps = core.hear_until_finished(*range(8))
        gained = dict.fromkeys(range(8), 0)
        for step in steps:
            for output in step.outputs:
                gained[output.rid] += output.new_tokens
        assert gained == dict.fromkeys(range(8), 400)
