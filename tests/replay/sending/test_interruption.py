"""Signals during a replay: in every phase, the records are kept and all processes end."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.builders.traces import steady_rows
from tests.replay.sending.builders import http_response

from goodput_replay.runs.record_rows import read_judged
from goodput_replay.sending.local_service import running_service

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.replay.sending.builders import Serve, WriteTrace


CHAT = Path(__file__).parents[3] / "examples" / "chat.yaml"
MODELS = b'{"data":[{"id":"m","owned_by":"goodput"}]}'
EVENTS = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
# A replay whose judging prints its progress and never ends.
ENDLESS_JUDGING = """
import sys, time
from goodput_core.dispatch import run_command
from goodput_replay.runs import folder

handled = []
install = folder.handle_stop_signals

def handle_stop_signals(handle):
    return install(lambda cause: (handle(cause), handled.append(cause)))

def build_summary(*_):
    print("judging", flush=True)
    while not handled:
        time.sleep(0.01)
    print("signalled", flush=True)
    time.sleep(3600)

folder.handle_stop_signals = handle_stop_signals
folder.build_summary = build_summary
sys.exit(run_command(["replay", *sys.argv[1:]]))
"""


# The first terminal that a session leader opens becomes its controlling terminal.
ON_A_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(terminal, number)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class StallingServer:
    """A server that responds to the first three requests only; the sixth sets `busy`."""

    def __init__(self) -> None:
        self.busy = asyncio.Event()
        self._requests = 0

    async def __call__(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"GET"):
            writer.write(http_response(MODELS))
            return
        self._requests += 1
        if self._requests <= 3:
            writer.write(http_response(EVENTS, kind="text/event-stream"))
        if self._requests == 6:
            self.busy.set()


@pytest.fixture(autouse=True)
def default_sighup() -> Iterator[None]:
    """Restore the default of SIGHUP, which a child inherits and `nohup` ignores."""
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, inherited)


@pytest.fixture
def trace(trace_of: WriteTrace) -> Path:
    """Forty requests in two seconds."""
    return trace_of(steady_rows(40, input_tokens=20, output_tokens=1))


def start(folder: Path, *arguments: object, program: tuple[str, ...] = ()) -> Any:
    program = program or ("-m", "goodput_core", "replay")
    return asyncio.create_subprocess_exec(
        sys.executable,
        *program,
        *map(str, arguments),
        "--no-probe",
        "--out",
        "run",
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", "GOODPUT_DEBUG": ""},
    )


async def error_of(child: asyncio.subprocess.Process) -> str:
    """Return the only error message of a command."""
    _, err = await asyncio.wait_for(child.communicate(), 60)
    lines = [line for line in err.decode().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err.decode()
    return lines[0]


def outcomes(folder: Path) -> list[str]:
    return sorted(row.record.outcome.value for row in read_judged(folder / "run"))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        pytest.param(signal.SIGINT, "Ctrl-C", id="ctrl-c"),
        pytest.param(signal.SIGTERM, "SIGTERM", id="sigterm"),
        pytest.param(signal.SIGHUP, "the closed terminal", id="hang-up"),
    ],
)
async def test_an_interrupted_run_keeps_its_records_and_is_marked_incomplete(
    serve: Serve, trace: Path, tmp_path: Path, number: signal.Signals, said: str
) -> None:
    target = StallingServer()
    url = await serve(target)
    child = await start(tmp_path, "--trace", trace, "--target", url, "--no-report")
    await target.busy.wait()
    child.send_signal(number)
    assert f"error: interrupted by {said} after " in await error_of(child)
    assert child.returncode == 130
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert not summary["run"]["complete"]
    assert summary["run"]["abort_reason"] == f"interrupted by {said}"
    assert summary["verdict"]["kind"] == "INVALID"
    assert outcomes(tmp_path).count("ok") == 3
    assert outcomes(tmp_path).count("cancelled") >= 3


async def test_rates_of_an_interrupted_run_are_those_of_its_part_that_was_run(
    serve: Serve, trace: Path, tmp_path: Path
) -> None:
    target = StallingServer()
    url = await serve(target)
    child = await start(
        tmp_path, "--trace", trace, "--target", url, "--no-report", "--window", "..10m"
    )
    await target.busy.wait()
    child.send_signal(signal.SIGINT)
    await error_of(child)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["window"]["rows_planned"] == 40
    length_s = summary["window"]["length_s"]
    assert 1 <= length_s < 60
    overall = summary["overall"]
    assert overall["offered_per_s"] == pytest.approx(overall["requests"] / length_s, rel=1e-3)


async def test_a_closed_terminal_is_ignored_under_nohup(
    serve: Serve, trace: Path, tmp_path: Path
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    target = StallingServer()
    url = await serve(target)
    child = await start(tmp_path, "--trace", trace, "--target", url, "--timeout", "3s")
    await target.busy.wait()
    child.send_signal(signal.SIGHUP)
    await asyncio.wait_for(child.communicate(), 60)
    assert outcomes(tmp_path) == ["ok"] * 3 + ["timeout"] * 37


async def test_a_closed_terminal_keeps_the_records(
    serve: Serve, trace: Path, tmp_path: Path
) -> None:
    target = StallingServer()
    url = await serve(target)
    terminal, end = pty.openpty()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ON_A_TERMINAL, os.ttyname(end), "-m", "goodput_core", "replay",
        "--trace", trace, "--target", url, "--out", "run", "--no-report", "--no-probe",
        cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    await target.busy.wait()
    os.close(end)
    os.close(terminal)
    assert await asyncio.wait_for(child.wait(), 60) == 130
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["run"]["abort_reason"] == "interrupted by the closed terminal"
    assert outcomes(tmp_path).count("ok") == 3


@pytest.mark.parametrize("first", ["sending", "judging"])
async def test_a_second_ctrl_c_ends_a_run_that_is_being_judged(
    serve: Serve, trace: Path, tmp_path: Path, first: str
) -> None:
    target = StallingServer()
    url = await serve(target)
    child = await start(
        tmp_path, "--trace", trace, "--target", url, "--timeout", "3s",
        program=("-c", ENDLESS_JUDGING),
    )  # fmt: skip
    if first == "sending":
        await target.busy.wait()
        child.send_signal(signal.SIGINT)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"judging\n"
    if first == "judging":
        child.send_signal(signal.SIGINT)
    assert await child.stdout.readline() == b"signalled\n"
    child.send_signal(signal.SIGINT)
    sentence = await error_of(child)
    assert child.returncode == 130
    count = len(outcomes(tmp_path))
    assert sentence == (
        f"error: ended immediately by Ctrl-C; run holds the records of {count} requests"
    )
    assert outcomes(tmp_path).count("ok") == 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["records.parquet"]


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return every process whose working directory is in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(folder)):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("children", [0, 3], ids=["at once", "with processes"])
async def test_ctrl_c_during_the_start_of_the_service_leaves_no_process_and_no_folder(
    trace: Path, tmp_path: Path, times: int, children: int
) -> None:
    child = await start(tmp_path, "--trace", trace, "-f", CHAT)
    assert child.stderr is not None
    assert await child.stderr.readline() == b"starting chat\n"
    while len(processes_of(tmp_path)) <= children:  # noqa: ASYNC110 - they raise no event
        await asyncio.sleep(0.01)
    for _ in range(times):
        child.send_signal(signal.SIGINT)
    assert (await error_of(child)).endswith("by Ctrl-C; nothing was recorded")
    assert child.returncode == 130
    assert not (tmp_path / "run").exists()
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes_of(tmp_path), timeout=10)
    assert alive == []


async def test_ctrl_c_during_the_stop_of_the_service_waits_for_its_end(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    ready, leave = asyncio.Event(), asyncio.Event()

    async def use() -> None:
        async with running_service(
            CHAT, device=None, log=log, decisions=tmp_path / "d", report=print
        ):
            ready.set()
            await leave.wait()

    before = psutil.Process().children(recursive=True)
    using = asyncio.ensure_future(use())
    await asyncio.wait_for(ready.wait(), 60)
    leave.set()
    await asyncio.sleep(0)  # it is being stopped now
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert psutil.Process().children(recursive=True) == before
