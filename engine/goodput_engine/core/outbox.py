"""What the core has said and the front has not read yet: bounded, and never in a step's way.

While the socket takes nothing more, steps are merged instead of queued: a front that was held up
gets one message with all tokens of each request. So what waits is bounded by the requests there
are, and the core is never blocked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_engine.core.wire import encode
from goodput_engine.messages import RequestOutput, StepOutputs

if TYPE_CHECKING:
    import socket

    from goodput_engine.messages import CoreMessage

__all__ = ["Outbox"]

_MERGE_ABOVE_BYTES: Final = 1024 * 1024


class Outbox:
    """Unsent messages to one non-blocking socket.

    Args:
        merge_above_bytes: with more than this unsent, steps are merged.
    """

    def __init__(self, *, merge_above_bytes: int = _MERGE_ABOVE_BYTES) -> None:
        self._merge_above_bytes = merge_above_bytes
        self._unsent = bytearray()
        self._held: StepOutputs | None = None
        self._held_outputs: dict[int, RequestOutput] = {}

    @property
    def waiting(self) -> bool:
        """Whether anything is unsent."""
        return bool(self._unsent) or self._held is not None

    def push(self, message: CoreMessage) -> None:
        """Say something, after everything said before."""
        if not isinstance(message, StepOutputs) or (
            self._held is None and len(self._unsent) <= self._merge_above_bytes
        ):
            self._release()
            self._unsent += encode(message)
            return
        held = self._held_outputs
        for output in message.outputs:
            before = held.get(output.rid)
            held[output.rid] = output if before is None else _merged(before, output)
        self._held = message

    def flush(self, sock: socket.socket) -> None:
        """Send what the socket takes.

        Raises:
            OSError: the other side is gone.
        """
        while self.waiting:
            if not self._unsent:
                self._release()
            try:
                sent = sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def _release(self) -> None:
        if self._held is not None:
            last = self._held
            self._unsent += encode(
                StepOutputs(
                    at_ns=last.at_ns,
                    step_ns=last.step_ns,
                    outputs=list(self._held_outputs.values()),
                    state=last.state,
                )
            )
            self._held = None
            self._held_outputs = {}


def _merged(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    return RequestOutput(
        rid=first.rid,
        new_tokens=first.new_tokens + second.new_tokens,
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
        cached_tokens=first.cached_tokens,
        first_scheduled_ns=first.first_scheduled_ns,
    )
