"""`python -m tools.chat SERVICE`: talk to a served model in the terminal, for `make chat`.

SERVICE is a manifest, which is served on this machine until the chat ends, or the URL of a running
service. If stdin is not a terminal, it is one question. Answers are written to stdout, and all else
to stderr.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec
import yaml

from goodput_core.contract import (
    EVENT_READY,
    HEADER_SLO_TPOT_MS,
    HEADER_SLO_TTFT_MS,
    PATH_CHAT_COMPLETIONS,
)
from goodput_core.errors import ExitCode, GoodputError, InternalError, UsageError
from goodput_core.spec.manifest import parse_manifest, read_manifest_text
from goodput_core.text import printable
from goodput_core.units import format_duration
from goodput_engine.openai.errors import read_error
from goodput_engine.openai.sse import SSEReader
from goodput_engine.weights.source import local_folder
from goodput_replay.sending.client.chunks import (
    DONE,
    CompletionChunk,
    decode_chunk,
    decode_usage,
    error_sentence,
    status_sentence,
)
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.preflight import list_models
from goodput_replay.sending.target import parse_target

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# A small model errs and rambles if a token is drawn by chance. Without the penalty, it repeats a
# line for ever.
_SAMPLING: Final = {"temperature": 0, "frequency_penalty": 0.3, "max_tokens": 512}
_MAX_QUESTION: Final = 1 << 20
_MAX_ERROR_BYTES: Final = 4096
_READ_BYTES: Final = 1 << 16
_MAX_LOG_BYTES: Final = 1 << 20
_SILENCE_S: Final = 300
# A late answer is better than none, so the chat replaces the targets of the service, by which the
# policy `slo` would reject a long question.
_TARGETS: Final = {HEADER_SLO_TTFT_MS: str(_SILENCE_S * 1000), HEADER_SLO_TPOT_MS: "60000"}
# Below this number of parameters, a model answers in sentences that are often wrong.
_SMALL: Final = 1_000_000_000
_POLL_S: Final = 0.1
_STOP_S: Final = 10
_TEXT: Final = msgspec.json.Decoder(str | None)
_DIM: Final = "\x1b[2m{}\x1b[0m"
# Characters of a text that are not printable: two of them join letters and emoji.
_KEPT: Final = frozenset("\n\u200c\u200d")


class Chat:
    """A conversation with the first model of a service.

    Args:
        url: URL of the service.

    Raises:
        UnreachableError: the service cannot be reached, or serves no model.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address, self._prefix = parts.netloc, parts.path
        self._messages: list[dict[str, str]] = []
        self.model = asyncio.run(_first_model(url))

    def clear(self) -> None:
        """Forget the conversation."""
        self._messages.clear()

    def ask(self, question: str) -> str:
        """Write the answer to a question to stdout while it arrives.

        If the answer is interrupted, the conversation has its first part.

        Returns:
            The length of the answer, and its latencies.

        Raises:
            InternalError: the request failed.
        """
        messages = [*self._messages, {"role": "user", "content": question}]
        pieces: list[str] = []
        times: list[int] = []
        tokens, at_limit = 0, False
        began_ns = time.monotonic_ns()
        try:
            with closing(self._stream(messages)) as chunks:
                for text, chunk in chunks:
                    # Later events without text are tokens too, whose text is held back.
                    if text or (times and chunk.choices):
                        times.append(time.monotonic_ns())
                    if text:
                        pieces.append(text)
                        _write(_safe(text))
                    for choice in chunk.choices or ():
                        at_limit = at_limit or choice.finish_reason == "length"
                    if chunk.has_usage:
                        tokens = decode_usage(chunk.usage).completion_tokens or 0
        finally:
            if pieces:
                answer = {"role": "assistant", "content": "".join(pieces)}
                self._messages = [*messages, answer]
                _write("" if pieces[-1].endswith("\n") else "\n")
        parts = [f"{tokens} tokens{', the limit' if at_limit else ''}"]
        if times:
            parts.append(f"TTFT {format_duration(times[0] - began_ns)}")
        if len(times) > 1:
            parts.append(f"TPOT {format_duration((times[-1] - times[0]) // max(1, tokens - 1))}")
        return ", ".join(parts)

    def _stream(self, messages: list[dict[str, str]]) -> Generator[tuple[str, CompletionChunk]]:
        """Yield the events of an answer, with their text, until it is complete."""
        body = {"model": self.model, "messages": messages, **_SAMPLING}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events = SSEReader()
        with self._post(json.dumps(body)) as response:
            while data := response.read1(_READ_BYTES):
                for event in events.feed(data):
                    if event == DONE:
                        return
                    if read_error(event) is not None:
                        raise InternalError(f"the service reported: {error_sentence(event)}")
                    chunk = decode_chunk(event)
                    deltas = [choice.delta for choice in chunk.choices or ()]
                    contents = [delta.content for delta in deltas if delta and delta.content]
                    yield "".join(_TEXT.decode(one) or "" for one in contents), chunk
        raise InternalError("the service closed the connection before the answer was complete")

    @contextmanager
    def _post(self, body: str) -> Iterator[http.client.HTTPResponse]:
        """Send a request, and close its connection when the block ends."""
        headers = {"Content-Type": "application/json", **_TARGETS}
        try:
            with closing(http.client.HTTPConnection(self._address, timeout=_SILENCE_S)) as opened:
                opened.request("POST", f"{self._prefix}{PATH_CHAT_COMPLETIONS}", body, headers)
                with opened.getresponse() as response:
                    if response.status != http.client.OK:
                        start = response.read(_MAX_ERROR_BYTES)
                        raise InternalError(status_sentence(response.status, None, start))
                    yield response
        except TimeoutError as error:
            raise InternalError(f"the service sent nothing for {_SILENCE_S} s") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or "closed by the service"
            raise InternalError(f"the connection failed ({reason})") from error
        except (ValueError, msgspec.DecodeError) as error:
            raise InternalError("the response has another form than expected") from error


async def _first_model(url: str) -> str:
    async with open_session({}) as session:
        return (await list_models(session, parse_target(url))).models[0]


@contextmanager
def serve(manifest: str) -> Iterator[str]:
    """Serve a manifest on this machine while the block runs; yields the URL of the router.

    Raises:
        UsageError: the service did not start, for the reason in the error.
    """
    command = [sys.executable, "-m", "goodput_core", "up", "-f", manifest, "--port", "0"]
    # If this process is killed, the service ends too.
    command += ["--json", "--exit-with-parent"]
    with tempfile.TemporaryFile() as events, tempfile.TemporaryFile() as log:
        # In a session of its own, it does not receive the Ctrl-C that stops an answer.
        up = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=events, stderr=log, start_new_session=True
        )
        try:
            yield _wait_ready(up, events.fileno(), log.fileno())
        finally:
            assert up.stdin is not None
            up.stdin.close()
            try:
                up.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                up.kill()


def _wait_ready(up: subprocess.Popen[bytes], events: int, log: int) -> str:
    while up.poll() is None:
        for line in os.pread(events, _READ_BYTES, 0).splitlines(keepends=True):
            if line.endswith(b"\n") and (event := json.loads(line))["event"] == EVENT_READY:
                url: str = event["url"]
                return url
        time.sleep(_POLL_S)
    written = os.pread(log, _MAX_LOG_BYTES, 0).decode("utf-8", "replace").splitlines()
    errors = [line.removeprefix("error: ") for line in written if line.startswith("error: ")]
    raise UsageError((errors or [f"goodput up ended with code {up.returncode}"])[-1])


def _talk(chat: Chat) -> None:
    """Read questions from the terminal until its end."""
    with suppress(ImportError):
        readline = import_module("readline")  # `input` then edits lines and has a history
        # Python turns this off. Without it, each line of a pasted text is a question.
        readline.parse_and_bind("set enable-bracketed-paste on")
    _tell(f"{chat.model} is ready. Ctrl-C stops an answer, /clear starts again, Ctrl-D ends.\n")
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            _tell("")
            return
        except KeyboardInterrupt:
            _tell("\nCtrl-D ends the chat.")
            continue
        if question == "/clear":
            chat.clear()
        elif question:
            try:
                _tell(f"  {chat.ask(question)}\n")
            except KeyboardInterrupt:
                _tell("  stopped\n")
            except InternalError as error:
                _tell(f"  error: {printable(str(error))}\n")


def _read_question() -> str:
    """Return the question of a stdin that is not a terminal."""
    question = sys.stdin.read(_MAX_QUESTION + 1).strip()
    if not question:
        raise UsageError("stdin is empty; write a question to it, or use a terminal")
    if len(question) > _MAX_QUESTION:
        raise UsageError(f"the question has over {_MAX_QUESTION} characters; shorten it")
    return question


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(line: str) -> None:
    dimmed = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(_DIM.format(line) if dimmed else line, file=sys.stderr, flush=True)


def _safe(text: str) -> str:
    """Return a text without control characters, which could rewrite the screen."""
    text = text.replace("\t", "    ")
    return "".join(one if one in _KEPT else printable(one) for one in text)


def main(service: str) -> None:
    """Talk to a service; see the module's docstring.

    Raises:
        GoodputError: the service did not start or cannot be reached, or the only answer failed.
    """
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    question = None if sys.stdin.isatty() else _read_question()
    if service.startswith("http://"):
        _run(service, question)
        return
    _tell(f"starting the service of {service}, which loads its model in less than a minute")
    if warning := _warn_of_size(service):
        _tell(warning)
    with serve(service) as url:
        _run(url, question)


def _warn_of_size(manifest: str) -> str:
    """Return a warning if the model is in a folder and small; otherwise an empty text."""
    with suppress(GoodputError, OSError, ValueError):
        text = read_manifest_text(Path(manifest))
        folder = local_folder(parse_manifest(text, source=manifest, yaml=yaml).spec.model)
        with (folder / "model.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        size = sum(prod(tensor["shape"]) for tensor in header.values())
        if size < _SMALL:
            millions = round(size / 1e6)
            return f"{folder.name} has {millions} million parameters, so it is often wrong"
    return ""


def _run(url: str, question: str | None) -> None:
    chat = Chat(url)
    if question is None:
        _talk(chat)
    else:
        _tell(f"  {chat.ask(question)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except GoodputError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout ended first
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
