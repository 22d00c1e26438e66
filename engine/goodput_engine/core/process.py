"""The core process, separate from the server so that no slow client or long prompt delays a step.

The server starts `python -m goodput_engine.core.process --fd N` with one end of a socket pair and
sends `Configure` first. The core replies with `Ready` or `Failed`. Before, while it computes the
first steps of a real model, it sends `WarmingUp` after each part, so that a step that hangs is
detected then too.

A server of several HTTP processes (*peers*) has one socket pair for each, `--fd N,M`. The first
peer leads: the core obeys it alone, and ends with it. The others submit and cancel requests. The
number of a request, modulo the number of peers, is that of its peer.

The server ends the process with `EndProcess` and closes the socket; it sends SIGKILL only if the
process is still alive after a timeout. The core also exits when the other end closes, so it never
outlives the server. It ignores SIGINT, SIGTERM and SIGHUP: after Ctrl-C or a closed terminal it
keeps running until the server has drained.

The core sleeps in `select`, whose timeout has microsecond resolution. It wakes about 0.1 ms late
(median on two busy cores; 0.12 ms at the 90th percentile). The executor schedules by absolute
deadlines, so these delays do not add up, and the core does not have to wait in a busy loop.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import socket
import sys
import time
import traceback
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import structs

from goodput_core.contract import ENV_DEBUG
from goodput_core.errors import ExitCode, GoodputError
from goodput_core.signals import ignore_stop_signals
from goodput_core.units import NS_PER_S
from goodput_engine.core.build import build_core, build_model_core, load_model
from goodput_engine.core.wire import Outbox, WireError, encode, front_reader, request_reader
from goodput_engine.device.load import load_profile
from goodput_engine.device.step_log import StepLog
from goodput_engine.messages import (
    Cancel,
    Configure,
    Drain,
    Failed,
    FollowManifest,
    Ready,
    Rejected,
    SetLimits,
    Submit,
    WarmingUp,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_engine.core.engine_core import EngineCore
    from goodput_engine.core.wire import FrameReader
    from goodput_engine.messages import FrontMessage, RequestOutput, StepOutputs
    from goodput_engine.scheduler.plan import StepOutcome

__all__ = ["main", "serve"]

_RECEIVE_BYTES: Final = 1024 * 1024
# Interval at which an idle core sends its state, so that the server can detect a hung core.
_HEARTBEAT_NS: Final = NS_PER_S


def main(argv: list[str]) -> int:
    """Run a core until the other end of the socket closes."""
    parser = argparse.ArgumentParser(prog="python -m goodput_engine.core.process")
    parser.add_argument(
        "--fd", required=True, metavar="N[,M…]", help="inherited, connected sockets, one per peer"
    )
    fds: str = parser.parse_args(argv).fd
    ignore_stop_signals()
    with ExitStack() as stack:
        sock, *others = (stack.enter_context(_take(int(fd))) for fd in fds.split(","))
        try:
            _run(sock, others)
        except GoodputError as error:
            return _fail(sock, str(error), error.exit_code)
        except Exception as error:  # noqa: BLE001 - no caller would report it
            if os.environ.get(ENV_DEBUG):
                traceback.print_exc()
            detail = f"the engine core failed: {type(error).__name__}: {error}"
            return _fail(sock, detail, ExitCode.INTERNAL)
    return ExitCode.PASS


def _take(fd: int) -> socket.socket:
    # Duplicate to a low number: select(), chosen for its microsecond timeout, fails above 1023.
    sock = socket.socket(fileno=os.dup(fd))
    os.close(fd)
    return sock


class _Peer:
    """One HTTP process.

    Args:
        sock: its socket, connected and non-blocking.
        reader: reads its messages.

    Attributes:
        outbox: messages that are not sent yet.
        open: False after the process has closed its connection.
    """

    __slots__ = ("open", "outbox", "reader", "sock")

    def __init__(self, sock: socket.socket, reader: FrameReader[FrontMessage]) -> None:
        self.sock = sock
        self.reader = reader
        self.outbox = Outbox()
        self.open = True


class _Peers:
    """The HTTP processes.

    Args:
        leader: the peer that leads.
        others: sockets of the others, connected and non-blocking.
        core: the core, which cancels the requests of a peer that ends.
    """

    def __init__(self, leader: _Peer, others: Sequence[socket.socket], core: EngineCore) -> None:
        self._leader = leader
        self._all = (leader, *(_Peer(one, request_reader()) for one in others))
        self._open = list(self._all)
        self._socks = [one.sock for one in self._open]
        self._core = core

    def push(self, message: StepOutputs | Rejected) -> None:
        """Append a message to the outbox of its peer, or the parts of a step to those of all."""
        peers = self._all
        count = len(peers)
        if count == 1:
            self._leader.outbox.push(message)
        elif isinstance(message, Rejected):
            peers[message.rid % count].outbox.push(message)
        else:
            parts: list[list[RequestOutput]] = [[] for _ in peers]
            for output in message.outputs:
                parts[output.rid % count].append(output)
            for peer, outputs in zip(peers, parts, strict=True):
                if peer.open:
                    peer.outbox.push(structs.replace(message, outputs=outputs))

    def flush(self) -> bool:
        """Send as much as the sockets accept; return False if the leader closed its connection."""
        for peer in tuple(self._open):
            try:
                peer.outbox.flush(peer.sock)
            except OSError:
                if peer is self._leader:
                    return False
                self._remove(peer)
        return True

    def receive(self, wait_s: float) -> list[FrontMessage] | None:
        """Return the messages that arrive within a time; None if the leader closed its connection.

        The messages of the leader are last, so that its `Drain` follows the requests that the
        other peers submitted before it.
        """
        waiting = [one.sock for one in self._open if one.outbox.waiting]
        readable, _, _ = select.select(self._socks, waiting, [], wait_s)
        messages: list[FrontMessage] = []
        if self._leader.sock in readable:
            data = _receive(self._leader.sock)
            if not data:
                return None
            messages = self._leader.reader.feed(data)
        if len(self._open) == 1:
            return messages
        requests: list[FrontMessage] = []
        for peer in self._open[1:]:
            if messages or peer.sock in readable:
                requests += self._receive_requests(peer)
        return requests + messages

    def _receive_requests(self, peer: _Peer) -> list[FrontMessage]:
        try:
            data = peer.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if data:
            return peer.reader.feed(data)
        self._remove(peer)
        return []

    def _remove(self, peer: _Peer) -> None:
        number, count = self._all.index(peer), len(self._all)
        peer.open = False
        self._open.remove(peer)
        self._socks.remove(peer.sock)
        self._core.cancel_all(lambda rid: rid % count == number)


def serve(
    sock: socket.socket,
    core: EngineCore,
    messages: list[FrontMessage],
    reader: FrameReader[FrontMessage],
    clock: Callable[[], int],
    *,
    others: Sequence[socket.socket] = (),
) -> None:
    """Step the core in real time until the other end closes or sends `EndProcess`.

    Args:
        sock: socket of the peer that leads, connected and non-blocking.
        core: the core to step.
        messages: messages that arrived together with `Configure`.
        reader: the frame reader, which may already have the start of the next message.
        clock: returns monotonic nanoseconds, on the same clock as the server.
        others: sockets of the other peers.
    """
    peers = _Peers(_Peer(sock, reader), others, core)
    heartbeat_ns = clock() + _HEARTBEAT_NS
    while True:
        for message in messages:
            if isinstance(message, Submit):
                _catch_up(core, peers, message.arrival_ns, clock())
            if not _handle(message, core, peers, clock()):
                return
        now_ns = clock()
        outputs = core.step(now_ns)
        if outputs is None and now_ns >= heartbeat_ns:
            outputs = core.idle_outputs(now_ns)
        if outputs is not None:
            peers.push(outputs)
            heartbeat_ns = now_ns + _HEARTBEAT_NS
        if _push_rejected(core, peers) and core.next_event_ns() is None:
            peers.push(core.idle_outputs(now_ns))
        if not peers.flush():
            return
        due_ns = core.next_event_ns()
        wake_ns = heartbeat_ns if due_ns is None else min(due_ns, heartbeat_ns)
        wait_s = max(0, wake_ns - clock()) / NS_PER_S
        received = peers.receive(wait_s)
        if received is None:
            return
        messages = received


def _run(sock: socket.socket, others: Sequence[socket.socket]) -> None:
    reader = front_reader()
    messages: list[FrontMessage] = []
    while not messages:
        data = _receive(sock)
        if not data:
            return
        messages = reader.feed(data)
    config = messages.pop(0)
    if not isinstance(config, Configure):
        raise WireError(f"the first message must be Configure, not {type(config).__name__}")
    with ExitStack() as stack:
        on_step = None
        if config.step_log is not None:
            on_step = stack.enter_context(closing(StepLog(Path(config.step_log)))).add

        def on_warm_up(load_ns: int) -> None:
            # If the server closed the connection, it also ends this process.
            with suppress(OSError):
                sock.sendall(encode(WarmingUp(load_ns=load_ns)))

        core, ready = _build(config, on_step, on_warm_up)
        try:
            sock.sendall(encode(ready))
        except OSError:
            return  # the server closed the connection
        for one in (sock, *others):
            one.setblocking(False)
        gc.collect()
        gc.freeze()  # later collections skip the long-lived objects
        serve(sock, core, messages, reader, time.monotonic_ns, others=others)


def _build(
    config: Configure,
    on_step: Callable[[StepOutcome], None] | None,
    on_warm_up: Callable[[int], None],
) -> tuple[EngineCore, Ready]:
    """Build the core of a configuration, and the report that it is ready."""
    if config.model is None:
        profile = load_profile(config.device)
        core = build_core(config, profile, on_step=on_step)
        return core, Ready(
            device=profile.name,
            vocab_size=profile.vocab_size,
            max_model_tokens=core.scheduler.max_total_tokens,
            state=core.state(time.monotonic_ns()),
        )
    loaded = load_model(config, config.model, on_warm_up=on_warm_up)
    core = build_model_core(config, loaded, on_step=on_step)
    return core, Ready(
        device=loaded.name,
        vocab_size=loaded.vocab_size,
        max_model_tokens=core.scheduler.max_total_tokens,
        state=core.state(time.monotonic_ns()),
        longest_step_ns=loaded.longest_step_ns,
        model_facts=dict(loaded.facts),
        grammar_problem=loaded.grammar_problem,
    )


def _receive(sock: socket.socket) -> bytes:
    """Return the received bytes; empty if the other end closed the connection."""
    try:
        return sock.recv(_RECEIVE_BYTES)
    except OSError:
        return b""


def _catch_up(core: EngineCore, peers: _Peers, arrival_ns: int, now_ns: int) -> None:
    """Take the steps that were due before a request arrived, without the request.

    If the end of a step is noticed late, the next step still begins at that end on the device's
    clock. A request that arrived after that end must not be part of the next step. An executor that
    computes within a call has no such clock: its next step begins with the next call.
    """
    if core.computes_in_collect:
        return
    until_ns = min(arrival_ns, now_ns)
    while (due_ns := core.next_event_ns()) is not None and due_ns <= until_ns:
        outputs = core.step(now_ns)
        if outputs is not None:
            peers.push(outputs)


def _push_rejected(core: EngineCore, peers: _Peers) -> bool:
    """Report the requests that were removed, after the tokens of their last step.

    Returns:
        True if there were any.
    """
    rejected = core.take_rejected()
    for message in rejected:
        peers.push(message)
    return bool(rejected)


def _handle(message: FrontMessage, core: EngineCore, peers: _Peers, now_ns: int) -> bool:
    """Act on a message; return False after `EndProcess`."""
    if isinstance(message, Submit):
        rejected = core.submit(message, now_ns)
        if rejected is not None:
            peers.push(rejected)
    elif isinstance(message, Cancel):
        core.cancel(message.rid)
    elif isinstance(message, SetLimits):
        core.set_limits(message)
    elif isinstance(message, FollowManifest):
        core.follow_manifest(message)
    elif isinstance(message, Drain):
        core.drain()
    elif isinstance(message, Configure):
        raise WireError("Configure was received twice")
    else:
        return False  # EndProcess
    return True


def _fail(sock: socket.socket, detail: str, exit_code: ExitCode) -> int:
    sock.setblocking(True)
    sock.settimeout(1.0)  # a server that does not read must not keep this process alive
    try:
        sock.sendall(encode(Failed(detail=detail, exit_code=exit_code)))
    except OSError:
        pass
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
