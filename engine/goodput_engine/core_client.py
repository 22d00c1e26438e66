"""The client of the engine core: starts the core's process, sends messages, distributes outputs.

One frame arrives per step, with an entry for every request that gained a token. Distributing these
entries only updates counts and wakes readers. This module does not handle HTTP or text.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from goodput_core.errors import ExitCode, InternalError, UsageError
from goodput_core.process import share_session_priority
from goodput_core.units import NS_PER_S
from goodput_engine.core.wire import WireError, core_reader, encode
from goodput_engine.messages import (
    Cancel,
    EndProcess,
    Failed,
    Ready,
    Rejected,
    StepOutputs,
    WarmingUp,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_core.engine_state import EngineState
    from goodput_core.errors import GoodputError
    from goodput_engine.messages import (
        Configure,
        FrontMessage,
        RequestOutput,
        Submit,
    )
    from goodput_engine.scheduler.plan import TokenLogprobs

__all__ = ["CoreClient", "CoreConnection", "RequestStream"]

# Time for the core's process to end before it is killed.
_END_S: Final = 5.0
# Limit of the submitted bytes that the core has not read yet; the core reads between two steps.
_UNREAD_BYTES: Final = 32 * 1024 * 1024
# Time without a message after which a core is considered hung. A running core sends one per second,
# except during a step of a real model, whose longest step is an estimate.
_SILENCE_S: Final = 30.0
_SILENT_STEPS: Final = 10
# Multiple of the above, or of the time of the loading if that is longer, for a core that warms up:
# its steps are not measured yet.
_SILENT_WARM_UP: Final = 10
_SILENCE_CHECKS: Final = 5
# Checks after which the core counts as stuck; it may still recover.
_STUCK_CHECKS: Final = 3
_log: Final = logging.getLogger(__name__)


class RequestStream:
    """The outputs of one request so far.

    Args:
        arrival_ns: arrival time of the request.
        each: True to wake the reader for each output, False to wake it only at the end.

    Attributes:
        tokens: number of output tokens so far.
        token_ids: their ids; empty on an emulated device.
        logprobs: their log-probabilities; empty if the request has no such option.
        cached_tokens: number of prompt tokens taken from the prefix cache.
        first_scheduled_ns: time when the request was first part of a plan; 0 before the first
            token.
        first_token_ns, last_token_ns: times of the first and of the last token so far; 0 before
            the first token.
        finish_reason: "stop" or "length" once all tokens have arrived; None before.
        rejected: the core's rejection, which may follow tokens; None if the request was not
            rejected.
        lost: True if the core ended before the request did, or the request was abandoned.
    """

    __slots__ = (
        "_each",
        "_on_output",
        "_waiter",
        "arrival_ns",
        "cached_tokens",
        "finish_reason",
        "first_scheduled_ns",
        "first_token_ns",
        "last_token_ns",
        "logprobs",
        "lost",
        "rejected",
        "token_ids",
        "tokens",
    )

    def __init__(self, *, arrival_ns: int, each: bool) -> None:
        self.arrival_ns = arrival_ns
        self.tokens = 0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cached_tokens = 0
        self.first_scheduled_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.finish_reason: str | None = None
        self.rejected: Rejected | None = None
        self.lost = False
        self._each = each
        self._waiter: asyncio.Future[None] | None = None
        self._on_output: Callable[[], bool] | None = None

    @property
    def ended(self) -> bool:
        """True if no more output will arrive."""
        return self.finish_reason is not None or self.rejected is not None or self.lost

    async def more(self, taken: int) -> None:
        """Wait for the end or, if each output wakes the reader, for more than `taken` tokens."""
        if not (self.ended or (self._each and self.tokens > taken)):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def follow(self, on_output: Callable[[], bool]) -> None:
        """Call a function after each output, and return at the end or when it returns False.

        Args:
            on_output: called in the callback that receives the step, without a task switch, but
                not for the last output. Its errors are raised here.
        """
        if self.ended:
            return
        self._on_output = on_output
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._on_output = None

    def push(self, output: RequestOutput, at_ns: int) -> None:
        """Add the output of one step."""
        if output.new_tokens:
            if not self.tokens:
                self.first_token_ns = at_ns
                self.first_scheduled_ns = output.first_scheduled_ns
                self.cached_tokens = output.cached_tokens
            self.tokens += output.new_tokens
            self.token_ids += output.token_ids
            self.logprobs += output.logprobs
            self.last_token_ns = at_ns
        self.finish_reason = output.finish_reason
        on_output = self._on_output
        if on_output is not None and output.finish_reason is None:
            try:
                if on_output():
                    return
            except Exception as error:  # noqa: BLE001 - raised by `follow`, for this request only
                self._on_output = None
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_exception(error)
                return
            self._on_output = None
        if self._each or output.finish_reason is not None:
            self._wake()

    def reject(self, rejected: Rejected) -> None:
        """Record that the request was not admitted or was removed, and wake the reader."""
        self.rejected = rejected
        self._wake()

    def lose(self) -> None:
        """Record that no more output will arrive, and wake the reader."""
        self.lost = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class CoreConnection(asyncio.Protocol):
    """A connection to a running core, whose process another one may own.

    Args:
        on_step: called with every step, for metrics.
        silence_s: time after which a ready core that sends no message is considered hung. A core
            that warms up may be silent for ten times as long.

    Attributes:
        state: the core's state after its last step; set once the core is ready.
        full: True if the core has not read too many submitted bytes; no further request should be
            submitted.
        gone: future that is done when the core's process has ended or closed its connection.
    """

    state: EngineState

    def __init__(self, on_step: Callable[[StepOutputs], None], silence_s: float) -> None:
        self.gone: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        self._on_step = on_step
        self._reader = core_reader()
        self._streams: dict[int, RequestStream] = {}
        self._transport: asyncio.Transport | None = None
        self._failed: Failed | None = None
        self.full = False
        self._silence_s = self._limit_s = silence_s
        self._silent_checks = 0
        self._check: asyncio.TimerHandle | None = None

    @classmethod
    async def connect(cls, sock: socket.socket, ready: Ready) -> CoreConnection:
        """Return a connection to a core that is ready.

        Args:
            sock: this process's end of a socket pair; the connection closes it.
            ready: the core's report.
        """
        connection = cls(lambda _: None, _SILENCE_S)
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=sock)
        connection._begin(ready)
        return connection

    @property
    def stuck(self) -> bool:
        """True if the core has been silent for most of the time after which it is killed."""
        return self._silent_checks >= _STUCK_CHECKS

    @property
    def in_flight(self) -> int:
        """Number of requests that were submitted and have not ended."""
        return len(self._streams)

    def submit(self, request: Submit, *, each: bool) -> RequestStream:
        """Submit a request and return its outputs; for `each`, see `RequestStream`."""
        stream = RequestStream(arrival_ns=request.arrival_ns, each=each)
        if self.gone.done():
            stream.lose()
        else:
            self._streams[request.rid] = stream
            self.send(request)
        return stream

    def release(self, rid: int) -> None:
        """Remove a request; cancel it in the core if it has not ended there."""
        if self._streams.pop(rid, None) is not None and not self.gone.done():
            self.send(Cancel(rid=rid))

    def abandon(self) -> None:
        """Cancel every running request and mark its stream as lost."""
        for rid in list(self._streams):
            self._streams[rid].lose()
            self.release(rid)

    def disconnect(self) -> None:
        """Close the connection; the streams of its requests are lost."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base class
        self._transport.set_write_buffer_limits(high=_UNREAD_BYTES)

    def data_received(self, data: bytes) -> None:
        """Part of `asyncio.Protocol`; on the hot path, once per step."""
        if self.stuck:
            _log.info("core responds again")
        self._silent_checks = 0
        try:
            messages = self._reader.feed(data)
        except WireError as error:
            self._failed = Failed(detail=f"{error}", exit_code=ExitCode.INTERNAL)
            assert self._transport is not None
            self._transport.abort()
            return
        for message in messages:
            if isinstance(message, StepOutputs):
                self._step(message)
            elif isinstance(message, Rejected):
                stream = self._streams.pop(message.rid, None)
                if stream is not None:
                    stream.reject(message)
            elif isinstance(message, WarmingUp):
                load_s = message.load_ns / NS_PER_S
                self._watch(_SILENT_WARM_UP * max(self._silence_s, load_s))
            elif isinstance(message, Ready):
                self._begin(message)
            else:
                self._failed = message

    def pause_writing(self) -> None:
        """Part of `asyncio.Protocol`."""
        self.full = True

    def resume_writing(self) -> None:
        """Part of `asyncio.Protocol`."""
        self.full = False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Part of `asyncio.Protocol`; the core has closed the connection."""
        self.gone.set_result(None)
        if self._check is not None:
            self._check.cancel()
        for stream in self._streams.values():
            stream.lose()
        self._streams.clear()

    def _begin(self, ready: Ready) -> None:
        """Start to watch a core that is ready."""
        self.state = ready.state
        longest_step_s = ready.longest_step_ns / NS_PER_S
        self._watch(max(self._silence_s, _SILENT_STEPS * longest_step_s))

    def _watch(self, limit_s: float) -> None:
        """Consider the core hung after this time without a message, from now on."""
        self._limit_s = limit_s
        if self._check is not None:
            self._check.cancel()
        self._schedule_check()

    def _schedule_check(self) -> None:
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(self._limit_s / _SILENCE_CHECKS, self._check_silence)

    def _check_silence(self) -> None:
        """Count the checks without a message.

        Checks are counted instead of seconds, so that a suspension of the machine, however long,
        counts as one check.
        """
        self._silent_checks += 1
        if self._silent_checks == _STUCK_CHECKS:
            _log.warning("core stuck", extra={"kill_after_silent_seconds": self._limit_s})
        if self._silent_checks <= _SILENCE_CHECKS:
            self._schedule_check()
        else:
            self._end_silent()

    def _end_silent(self) -> None:
        """Do nothing: the process that owns the core kills it."""

    def _step(self, step: StepOutputs) -> None:
        self.state = step.state
        self._on_step(step)
        streams = self._streams
        at_ns = step.at_ns
        for output in step.outputs:
            stream = streams.get(output.rid)
            if stream is not None:
                stream.push(output, at_ns)
                if output.finish_reason is not None:
                    del streams[output.rid]

    def send(self, message: FrontMessage) -> None:
        """Send a message to the core; do nothing after it has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))


class CoreClient(CoreConnection):
    """The owner of a running core, created by `start`.

    Args:
        process: the core's process.
        on_step: called with every step, for metrics.
        silence_s: time after which a ready core that sends no message is killed.

    Attributes:
        ready: future of the core's first message.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        on_step: Callable[[StepOutputs], None],
        silence_s: float,
    ) -> None:
        super().__init__(on_step, silence_s)
        self.ready: Final[asyncio.Future[Ready]] = asyncio.get_running_loop().create_future()
        self._process = process
        self._other_sockets: list[socket.socket] = []

    @classmethod
    async def start(
        cls,
        configure: Configure,
        *,
        on_step: Callable[[StepOutputs], None],
        silence_s: float = _SILENCE_S,
        processes: int = 1,
    ) -> CoreClient:
        """Start a core with a configuration; `await_ready` waits until the core is ready.

        Args:
            configure: the configuration.
            on_step: called with every step, for metrics.
            silence_s: time after which a ready core that sends no message is killed.
            processes: number of HTTP processes, this one included.
        """
        pairs = [socket.socketpair() for _ in range(processes)]
        fds = [theirs.fileno() for _, theirs in pairs]
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "goodput_engine.core.process"),
                *("--fd", ",".join(map(str, fds))),
                stdin=DEVNULL,
                # The stdout of this process carries only its own line of JSON.
                stdout=sys.stderr.fileno(),
                pass_fds=fds,
                # In a session of its own, the core does not receive Ctrl-C from the terminal.
                start_new_session=True,
            )
        except OSError:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        share_session_priority(process.pid)
        client = cls(process, on_step, silence_s)
        ours, *client._other_sockets = (ours for ours, _ in pairs)
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: client, sock=ours)
        client.send(configure)
        return client

    async def await_ready(self) -> Ready:
        """Wait until the core is ready.

        Raises:
            UsageError: the core cannot start, for a reason that the user can correct.
            InternalError: the core cannot start for another reason, or died.
        """
        await asyncio.wait((self.ready, self.gone), return_when=asyncio.FIRST_COMPLETED)
        if not self.ready.done():
            raise await self.failure()
        return self.ready.result()

    def take_other_sockets(self) -> list[socket.socket]:
        """Return the ends of the sockets to the other HTTP processes, in their order."""
        taken, self._other_sockets = self._other_sockets, []
        return taken

    async def close(self) -> None:
        """End the core's process."""
        for other in self.take_other_sockets():
            other.close()
        if self._transport is not None and not self._transport.is_closing():
            self.send(EndProcess())
            self._transport.close()
        # While a core loads a model, it reads no messages.
        limit_s = _END_S if self.ready.done() else 0
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            with suppress(TimeoutError):  # a driver can block even SIGKILL
                async with asyncio.timeout(_END_S):
                    await self._process.wait()

    async def failure(self) -> GoodputError:
        """Return an error with the reason why the core ended."""
        if self._failed is not None:
            correctable = self._failed.exit_code == ExitCode.USAGE
            return (UsageError if correctable else InternalError)(self._failed.detail)
        try:
            async with asyncio.timeout(_END_S):
                code = await self._process.wait()
        except TimeoutError:
            return InternalError("the engine core closed its connection; see its log above")
        end = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return InternalError(f"the engine core ended {end}; see its log above")

    def _begin(self, ready: Ready) -> None:
        super()._begin(ready)
        self.ready.set_result(ready)

    def _end_silent(self) -> None:
        """Kill the core; its end is then reported like any other end."""
        phase = "" if self.ready.done() else " of its warm-up"
        detail = f"the engine core was silent for {self._limit_s:g} s{phase}, so it was killed"
        self._failed = Failed(detail=detail, exit_code=ExitCode.INTERNAL)
        self._process.kill()
