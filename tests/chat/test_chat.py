"""`make chat` as a user runs it: in a pipe, and on a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shutil
import sys
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml
from aiohttp import web
from tests.replay.sending.stand_ins import DONE, StandIn, delta, event, running, usage
from tools import smollm2
from tools.chat import Chat, _warn_of_size, serve
from tools.torch_packages import packages_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

ROOT = Path(__file__).resolve().parents[2]
CHAT = (sys.executable, "-m", "tools.chat")
PATIENCE_S = 30.0
TORCH = "torch and transformers (5 GB)"
MODEL = "the model SmolLM2-135M-Instruct (0.6 GB)"


def hello(_limit: int) -> Iterable[bytes]:
    """Five tokens."""
    yield from (delta(role="assistant"), delta(content="Hel"), delta(content="lo,\n"))
    yield from (delta(content="wor"), delta(content="ld"), delta("stop", content="!"))
    yield from (usage(5), DONE)


def endless(_limit: int) -> Iterable[bytes]:
    """An answer that does not end."""
    yield delta(content="on")
    yield from repeat(delta(content=" and on"))


def hostile(_limit: int) -> Iterable[bytes]:
    """Sequences that set the title, clear the screen and reverse the text."""
    yield from (
        delta(content="\x1b]0;title\x07\x1b[2J"),
        delta(content="\u202eevil 👩\u200d🚀\tok"),
    )
    yield from (delta("length"), usage(2), DONE)


@dataclass(frozen=True, kw_only=True)
class ChatRecorder(StandIn):
    """A server that keeps the messages of requests."""

    messages: list[list[dict[str, Any]]] = field(default_factory=list)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        self.messages.append((await request.json())["messages"])
        return await super().respond(request)


class RejectingServer(StandIn):
    """A server that rejects every request."""

    async def respond(self, request: web.Request) -> web.StreamResponse:
        error = {"error": {"message": "the prompt is too long"}}
        return web.json_response(error, status=400)


async def ask(question: str | bytes, service: str) -> tuple[int, str, str]:
    """Ask one question in a pipe; return the exit code, stdout and stderr."""
    child = await asyncio.create_subprocess_exec(
        *(*CHAT, service),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    out, err = await child.communicate(question.encode() if isinstance(question, str) else question)
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


async def test_one_question_in_a_pipe_starts_the_service_and_has_only_the_answer_on_stdout() -> (
    None
):
    code, out, err = await ask("Hello,\nhow are you?\n", "examples/chat.yaml")
    assert code == 0, err
    assert out.startswith("the quick brown fox jumps over a lazy dog")
    assert out.count("\n") == 1
    assert re.fullmatch(
        r"starting the service of examples/chat.yaml, .*\n"
        r"  \d+ tokens, TTFT [\d.]+ ms, TPOT [\d.]+ ms\n",
        err,
    ), err


def test_a_small_model_of_a_folder_has_a_warning(tmp_path: Path) -> None:
    assert not _warn_of_size(str(ROOT / "examples/chat.yaml")), "an emulated model"
    manifest = yaml.safe_load((ROOT / "examples/smollm2.yaml").read_text())
    folder = tmp_path / "tiny"
    manifest["spec"]["model"]["source"] = f"file://{folder}"
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(manifest))
    assert not _warn_of_size(str(path)), "no folder"
    folder.mkdir()
    for rows, warning in (
        (1000, "tiny has 3 million parameters, so it is often wrong"),
        (10**6, ""),
    ):
        tensors = {
            "a": {"shape": [rows, 2000]},
            "b": {"shape": [10**6]},
            "__metadata__": {"x": "y"},
        }
        header = json.dumps(tensors).encode()
        content = len(header).to_bytes(8, "little") + header
        (folder / "model.safetensors").write_bytes(content)
        assert _warn_of_size(str(path)) == warning


def test_answers_that_miss_the_services_target_are_late_and_not_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = yaml.safe_load((ROOT / "examples/chat.yaml").read_text())
    manifest["spec"]["engine"]["policy"] = "slo"
    manifest["spec"]["replicas"] = 1
    manifest["spec"]["slo"]["classes"][0]["ttftMs"] = 1  # no step is as short
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(manifest))
    with serve(str(tmp_path / "chat.yaml")) as url:
        chat = Chat(url)
        for _ in range(3):  # without a measured step, the first one would be admitted
            chat.ask("Hello")
    assert capsys.readouterr().out.count("the quick brown fox") >= 3


async def test_the_whole_of_stdin_is_one_question() -> None:
    server = ChatRecorder(answer=hello)
    async with running(server) as url:
        code, out, _ = await ask(b"one\n\ntwo \xff\n", url)
    assert (code, out) == (0, "Hello,\nworld!\n")
    assert server.messages == [[{"role": "user", "content": "one\n\ntwo \ufffd"}]]


async def test_control_characters_of_a_model_are_shown_and_not_obeyed() -> None:
    async with running(StandIn(answer=hostile)) as url:
        code, out, err = await ask("x", url)
    assert code == 0
    assert out == "\\x1b]0;title\\x07\\x1b[2J\\u202eevil 👩\u200d🚀    ok\n"
    assert err.startswith("  2 tokens, the limit, TTFT ")


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([event({"error": {"message": "the device failed"}})], "the service reported: the device"),
        ([], "the service closed the connection before the answer was complete"),
        ([event(b"no JSON")], "the response has another form than expected"),
        ([event({"choices": [{"delta": {"content": ["x"]}}]})], "the response has another form"),
        ([b"data: " + b"x" * (2 << 20)], "the response has another form than expected"),
    ],
    ids=["an error", "a truncated stream", "no JSON", "another type", "an endless line"],
)
async def test_an_answer_that_fails_is_one_sentence(pieces: list[bytes], sentence: str) -> None:
    async with running(StandIn(answer=lambda _: [delta(content="Hel"), *pieces])) as url:
        code, out, err = await ask("x", url)
    assert (code, out) == (70, "Hel\n")
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1


async def test_an_error_response_is_one_sentence() -> None:
    async with running(RejectingServer(answer=hello)) as url:
        code, out, err = await ask("x", url)
    assert (code, out, err) == (70, "", "error: HTTP 400: the prompt is too long\n")


@pytest.mark.parametrize(
    ("question", "service", "part"),
    [
        (
            "x",
            "http://127.0.0.1:9",
            "http://127.0.0.1:9/v1/models: could not connect (Connection refused)",
        ),
        ("x", "missing.yaml", "missing.yaml: no such file"),
        (" \n", "http://127.0.0.1:9", "stdin is empty; write a question to it"),
        ("x" * (1 << 21), "http://127.0.0.1:9", "the question has over 1048576 characters"),
    ],
    ids=["unreachable", "no manifest", "no question", "a long question"],
)
async def test_a_wrong_start_is_one_sentence(question: str, service: str, part: str) -> None:
    code, out, err = await ask(question, service)
    assert (code, out) == (64, "")
    assert f"error: {part}" in err
    assert err.count("\n") == 1 + err.startswith("starting")


class Screen:
    """A terminal with a chat.

    Attributes:
        unread: its output after the text for which a test waited last.
    """

    def __init__(self, child: asyncio.subprocess.Process, terminal: int) -> None:
        self.child = child
        self.unread = ""
        self._terminal = terminal
        self._marks_pastes = False
        self._grown = asyncio.Event()
        asyncio.get_running_loop().add_reader(terminal, self._read)

    def _read(self) -> None:
        self.unread += os.read(self._terminal, 65536).decode("utf-8", "replace")
        for sequence, marks in (("\x1b[?2004h", True), ("\x1b[?2004l\r", False)):
            if sequence in self.unread:
                self.unread, self._marks_pastes = self.unread.replace(sequence, ""), marks
        self._grown.set()

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    async def paste(self, text: str) -> None:
        """Type a text as a terminal does with a pasted one, in parts that fit into its buffer."""
        typed = text.replace("\n", "\r")
        if self._marks_pastes:
            typed = f"\x1b[200~{typed}\x1b[201~"
        for at in range(0, len(typed), 256):
            self.type(typed[at : at + 256])
            await asyncio.sleep(0)

    async def shows(self, part: str) -> str:
        """Wait for a text, and return the output before it."""
        async with asyncio.timeout(PATIENCE_S):
            while part not in self.unread:
                self._grown.clear()
                await self._grown.wait()
        before, _, self.unread = self.unread.partition(part)
        return before

    async def prompts(self) -> None:
        """Wait until the chat waits for input; a signal that arrives earlier may act later."""
        await self.shows("> ")
        process = psutil.Process(self.child.pid)
        async with asyncio.timeout(PATIENCE_S):
            while process.status() != psutil.STATUS_SLEEPING:  # noqa: ASYNC110 - not an event here
                await asyncio.sleep(0.01)


@asynccontextmanager
async def screen(service: str, **variables: str) -> AsyncIterator[Screen]:
    """Run a chat on a terminal of its own."""
    with ExitStack() as stack:
        ours, theirs = pty.openpty()
        for descriptor in (ours, theirs):
            stack.callback(os.close, descriptor)
        # The first terminal that a new session opens sends it the signals of Ctrl-C.
        shell = ("sh", "-c", f'exec "$@" 0<>{os.ttyname(theirs)} >&0 2>&0', "sh")
        child = await asyncio.create_subprocess_exec(
            *(*shell, *CHAT, service),
            env={**os.environ, "TERM": "xterm", **variables},
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            yield Screen(child, ours)
        finally:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            asyncio.get_running_loop().remove_reader(ours)


async def test_a_conversation_keeps_its_messages_until_it_is_cleared() -> None:
    server = ChatRecorder(answer=hello, model="small")
    async with running(server) as url, screen(url, NO_COLOR="1") as shown:
        await shown.shows("small is ready.")
        for question in ("one", " ", "two", "/clear", "three"):
            await shown.prompts()
            shown.type(f"{question}\n")
            if question not in {" ", "/clear"}:
                await shown.shows("Hello,\r\nworld!\r\n  5 tokens, TTFT ")
        await shown.prompts()
        shown.type("\x04")
        assert await shown.child.wait() == 0
    first = {"role": "user", "content": "one"}
    answer = {"role": "assistant", "content": "Hello,\nworld!"}
    assert server.messages == [
        [first],
        [first, answer, {"role": "user", "content": "two"}],
        [{"role": "user", "content": "three"}],
    ]


async def test_a_pasted_text_of_several_lines_is_one_question() -> None:
    text = "the quick brown fox\n\n" * 500 + "What is the colour of the fox?"
    server = ChatRecorder(answer=hello)
    async with running(server) as url, screen(url) as shown:
        await shown.prompts()
        await shown.paste(text)
        await shown.shows("What is the colour of the fox?")
        shown.type("\r")
        await shown.shows("5 tokens, TTFT ")
        await shown.prompts()
        shown.type("\x04")
        assert await shown.child.wait() == 0
    assert server.messages == [[{"role": "user", "content": text}]]


async def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    server = ChatRecorder(answer=endless, pause_s=0.02)
    async with running(server) as url, screen(url) as shown:
        for question in ("talk", "again"):
            await shown.prompts()
            shown.type(f"{question}\n")
            await shown.shows("on and on")
            shown.type("\x03")
            await shown.shows("stopped")
        await shown.prompts()
        shown.type("\x03")
        await shown.shows("Ctrl-D ends the chat.")
        await shown.prompts()
        shown.type("\x04")
        assert await shown.child.wait() == 0
    assert server.messages[1][1]["content"].startswith("on and on")


async def test_a_failed_answer_and_a_dead_service_do_not_end_the_chat() -> None:
    async with AsyncExitStack() as server, AsyncExitStack() as terminal:
        url = await server.enter_async_context(running(RejectingServer(answer=hello)))
        shown = await terminal.enter_async_context(screen(url, NO_COLOR="1"))
        await shown.prompts()
        shown.type("x\n")
        await shown.shows("\r\n  error: HTTP 400: the prompt is too long\r\n")
        await server.aclose()
        await shown.prompts()
        shown.type("x\n")
        await shown.shows("\r\n  error: the connection failed (Connection refused)\r\n")
        await shown.prompts()
        shown.type("\x04")
        assert await shown.child.wait() == 0


@pytest.mark.parametrize("killed", [False, True], ids=["Ctrl-D", "SIGKILL"])
async def test_the_end_of_the_chat_ends_all_that_it_started(killed: bool) -> None:
    async with screen("examples/chat.yaml") as shown:
        await shown.shows("chat is ready.")
        started = psutil.Process(shown.child.pid).children(recursive=True)
        assert len(started) >= 4, "goodput up, two replicas and a router"
        await shown.prompts()
        if killed:
            shown.child.kill()
        else:
            shown.type("\x04")
        assert await shown.child.wait() == (-9 if killed else 0)
        _, alive = psutil.wait_procs(started, timeout=10)
        assert not alive


@pytest.mark.parametrize(
    ("present", "parts"),
    [
        (
            (),
            f"Goodput's own packages (0.5 GB), {TORCH} and {MODEL}: 6.1 GB on disk, 4 to 7 minutes",
        ),
        (
            ("packages", "torch"),
            f"{MODEL}: 0.6 GB on disk, 1 minute",
        ),
        (("packages", "torch", "model"), ""),
    ],
    ids=["nothing", "all but the model", "everything"],
)
def test_the_size_and_the_time_of_the_missing_parts_are_printed_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    present: tuple[str, ...],
    parts: str,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GOODPUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    files = {
        "packages": tmp_path / "venv/.runtime",
        "torch": packages_folder() / "complete",
        "model": smollm2.model_folder() / smollm2._STAMP,
    }
    for name in present:
        files[name].parent.mkdir(parents=True)
        files[name].write_text(smollm2._VERSION if name == "model" else "")
    smollm2.print_plan()
    expected = f"This first downloads {parts} on an idle machine.\n" if parts else ""
    assert capsys.readouterr().out == expected


def test_a_full_disk_is_reported_with_a_remedy_that_moves_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GOODPUT_CACHE", str(tmp_path / "cache"))
    target = smollm2.model_folder()
    target.parent.mkdir(parents=True)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**8))
    with pytest.raises(SystemExit) as ended:
        smollm2._install()
    assert str(ended.value) == (
        f"error: {target} needs 1.2 GB, and its disk has 0.1 GB left; free some space, or make "
        f"{target.parent} a link to a folder of another disk"
    )
