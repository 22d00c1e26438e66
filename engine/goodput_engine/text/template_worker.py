"""The process that renders a chat template: `python -m goodput_engine.text.template_worker --fd N`.

The kernel ends it when a message takes too much processor time, and gives it no more memory than
its limit. It has one end of a socket pair, and ends when the server closes the other end.

A message is its length and JSON: first the template, then chats. A reply is one byte, 1 for a text
and 0 for an error, and the length and text.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_core.signals import ignore_stop_signals
from goodput_engine.text.chat_template import MAX_PROMPT_BYTES, ChatTemplate

if TYPE_CHECKING:
    from io import BufferedRWPair

__all__ = [
    "MAX_COMPILE_S",
    "MAX_MEMORY_BYTES",
    "MAX_RENDER_S",
    "OUT_OF_MEMORY",
    "main",
    "read_reply",
    "write_message",
]

MAX_COMPILE_S: Final = 5
"""Limit of processor time to compile the template."""
MAX_RENDER_S: Final = 2
"""Limit of processor time to render a chat."""
MAX_MEMORY_BYTES: Final = 1 << 30
"""Limit of the address space: the largest body in Python's widest form, and some copies of it."""
OUT_OF_MEMORY: Final = 3
"""Exit code after an allocation failed."""

_LENGTH: Final = struct.Struct("<I")
_REPLY: Final = struct.Struct("<?I")
_MAX_ERROR_BYTES: Final = 1 << 16


def main(argv: list[str]) -> int:
    """Answer messages until the server closes the connection."""
    parser = argparse.ArgumentParser(prog="python -m goodput_engine.text.template_worker")
    parser.add_argument("--fd", type=int, required=True, help="an inherited, connected socket")
    sock = socket.socket(fileno=parser.parse_args(argv).fd)
    ignore_stop_signals()
    _limit_resources()
    try:
        _serve(sock.makefile("rwb"))
    except MemoryError:
        # Nothing that needs memory can be relied on any more.
        os._exit(OUT_OF_MEMORY)
    except OSError:  # the server has ended
        return 1
    return 0


def write_message(stream: BufferedRWPair, message: bytes) -> None:
    """Send a message to the process."""
    stream.write(_LENGTH.pack(len(message)))
    stream.write(message)
    stream.flush()


def read_reply(stream: BufferedRWPair) -> tuple[bool, str]:
    """Read a reply of the process.

    Raises:
        EOFError: the process closed the connection, or sent something else.
    """
    valid, size = _REPLY.unpack(_read(stream, _REPLY.size))
    if size > MAX_PROMPT_BYTES:
        raise EOFError
    return valid, _read(stream, size).decode("utf-8", "surrogatepass")


class _ServedTemplate:
    """The template, once the first message has brought it."""

    def __init__(self) -> None:
        self._template: ChatTemplate | None = None
        self._now = datetime.fromtimestamp(0, UTC)

    @property
    def limit_s(self) -> int:
        """Limit of processor time for the next message."""
        return MAX_COMPILE_S if self._template is None else MAX_RENDER_S

    def reply(self, data: bytes) -> str:
        """Return the prompt of a chat, or nothing for the template.

        Raises:
            InputError: the template is invalid, or fails.
        """
        message = json.loads(data.decode("utf-8", "surrogatepass"))
        if self._template is None:
            self._template = ChatTemplate(**message, now=lambda: self._now)
            return ""
        self._now = datetime.fromisoformat(message["now"])
        return self._template.render(message["messages"], message["tools"])


def _serve(stream: BufferedRWPair) -> None:
    template = _ServedTemplate()
    while header := stream.read(_LENGTH.size):
        data = _read(stream, _LENGTH.unpack(header)[0])
        # Without a handler, SIGPROF ends the process, whatever it computes.
        signal.setitimer(signal.ITIMER_PROF, template.limit_s)
        valid = True
        try:
            text = template.reply(data).encode("utf-8", "surrogatepass")
        except InputError as error:
            valid = False
            text = str(error).encode("utf-8", "backslashreplace")[:_MAX_ERROR_BYTES]
        signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(_REPLY.pack(valid, len(text)))
        stream.write(text)
        stream.flush()


def _limit_resources() -> None:
    for kind, limit in ((resource.RLIMIT_AS, MAX_MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # macOS, or a lower limit of the server itself
            resource.setrlimit(kind, (limit, limit))
    # If the memory of the machine or the container runs out, the kernel ends this process first.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _read(stream: BufferedRWPair, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
