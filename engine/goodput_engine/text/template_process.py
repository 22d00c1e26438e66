"""A process of its own for the chat template of a model.

A template comes with the model, and can loop for ever or create gigabytes with a short expression.
Its process has limits of the kernel for processor time and memory, so that such a template costs
one request, and neither the HTTP process nor the core. A process that reaches a limit ends, and the
next chat starts another one.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import InputError, InternalError
from goodput_core.process import share_session_priority
from goodput_engine.text.template_worker import (
    MAX_COMPILE_S,
    MAX_MEMORY_BYTES,
    MAX_RENDER_S,
    OUT_OF_MEMORY,
    read_reply,
    write_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime
    from io import BufferedRWPair

__all__ = ["TemplateProcess"]

# The limits are of processor time, which a busy machine divides. A process that is silent for
# longer than this is killed.
_SILENCE_S: Final = 60.0
_END_S: Final = 5.0


class TemplateProcess:
    """A chat template that is rendered in a process with limits.

    All methods may be called from several threads. They block until the process has responded.

    Args:
        source: text of the template.
        special_tokens: variables of the template, such as `bos_token`.
        now: returns the current local time, for templates that state the date.

    Raises:
        InputError: the source is not a valid template, or takes too much time or memory; one
            sentence without the file's name.
        InternalError: the process cannot be started.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime]
    ) -> None:
        self._template = {"source": source, "special_tokens": dict(special_tokens)}
        self._now = now
        self._lock = threading.Lock()
        self._worker: _Worker | None = self._start()

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt of a chat; see `ChatTemplate.render`.

        Raises:
            InputError: the template rejects the messages, fails, or takes too much time or memory;
                one sentence.
            InternalError: the process cannot be started, or was ended from outside.
        """
        request = {"messages": list(messages), "tools": tools, "now": self._now().isoformat()}
        try:
            data = _encode(request)
        except (RecursionError, ValueError) as error:
            raise InputError(f"the messages cannot be passed to the template: {error}") from error
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is None or worker.has_ended:
                worker = self._start()
            try:
                valid, text = worker.ask(data, MAX_RENDER_S)
            except _LimitExceeded as exceeded:
                raise InputError(
                    f"the chat template of the model fails for these messages: {exceeded}"
                ) from exceeded
            self._worker = worker
        if not valid:
            raise InputError(text)
        return text

    def _start(self) -> _Worker:
        worker = _Worker()
        try:
            valid, text = worker.ask(_encode(self._template), MAX_COMPILE_S)
        except _LimitExceeded as exceeded:
            raise InputError(f"the chat template is invalid: {exceeded}") from exceeded
        if not valid:
            raise InputError(text)
        return worker


class _LimitExceeded(Exception):
    """The process ended at one of its limits; the text is the end of a sentence."""


class _Worker:
    """A running process.

    Raises:
        InternalError: it cannot be started.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_SILENCE_S)
        module = "goodput_engine.text.template_worker"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Signals of the terminal are for the server, which drains.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise InternalError(
                f"the process of the chat template cannot be started: {error.strerror}"
            ) from error
        finally:
            theirs.close()
        share_session_priority(self._process.pid)
        self._stream = ours.makefile("rwb")
        ours.close()  # the stream keeps it open
        self._end = weakref.finalize(self, _end, self._process, self._stream)

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, because something outside killed it."""
        return self._process.poll() is not None

    def ask(self, message: bytes, limit_s: int) -> tuple[bool, str]:
        """Send a message and return the reply: True and a text, or False and an error.

        The process has ended after an error is raised.

        Args:
            message: the message.
            limit_s: the limit of processor time that the process has for the reply.

        Raises:
            _LimitExceeded: the process has reached a limit.
            InternalError: it ended for another reason.
        """
        try:
            write_message(self._stream, message)
            return read_reply(self._stream)
        except (OSError, EOFError) as error:
            is_silent = isinstance(error, TimeoutError)
            code = None if is_silent else self._exit_code()
            self._end()
            if is_silent:
                raise _LimitExceeded(f"it takes more than {_SILENCE_S:.0f} s") from error
            if code == -signal.SIGPROF:
                raise _LimitExceeded(f"it takes more than {limit_s} s of processor time") from error
            if code == OUT_OF_MEMORY:
                raise _LimitExceeded(
                    f"it needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
                ) from error
            raise InternalError(
                f"the process of the chat template ended with the code {code}; retry the request"
            ) from error

    def _exit_code(self) -> int | None:
        """Return the exit code of the process, which has closed its connection."""
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None


def _encode(message: Mapping[str, Any]) -> bytes:
    # The error for a lone surrogate is that of the tokenizer.
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _end(process: subprocess.Popen[bytes], stream: BufferedRWPair) -> None:
    process.kill()
    with suppress(OSError):  # unsent bytes
        stream.close()
    process.wait()
