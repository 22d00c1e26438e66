"""Output of processes as bounded lines, and of `goodput up` without waiting for its reader."""

from __future__ import annotations

import json
import os
import shlex
import threading
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.control import (
    ClassWindow,
    ControlInput,
    ControlState,
    ReplicaPhase,
    ServiceParams,
    Setpoint,
    Signal,
    TargetCounts,
    Traffic,
    control_step,
)
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_operator.local.decide import Address, ProcessPhase, ProcessView, Role, RoutedReplica
from goodput_operator.local.process import MAX_LINE_BYTES, LineSplitter, parse_listening, port_of
from goodput_operator.local.reporter import LineWriter, Reporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 30)))
def test_lines_do_not_depend_on_how_bytes_arrive(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"\n".join(pieces)
    whole = LineSplitter()
    expected = whole.feed(data) + whole.end()
    split, lines = LineSplitter(), []
    for cut in cuts:
        lines += split.feed(data[:cut])
        data = data[cut:]
    lines += split.feed(data) + split.end()
    assert lines == expected


@pytest.mark.parametrize("chunk", [1, 1000, 10**6])
def test_a_long_line_is_truncated(chunk: int) -> None:
    size = MAX_LINE_BYTES * 3
    splitter, lines = LineSplitter(), []
    for start in range(0, size, chunk):
        lines += splitter.feed(b"x" * min(chunk, size - start))
    lines += splitter.feed(b"\nnext\n")
    assert lines == [f"{'x' * MAX_LINE_BYTES}… ({size - MAX_LINE_BYTES} bytes cut)", "next"]


def test_control_characters_are_escaped() -> None:
    lines = LineSplitter().feed(b"a\x1b[2Jb\tc\x00\x9b\xff \xc2\x9b \xc3\xa9\r\n")
    assert lines == ["a\\x1b[2Jb\tc\\x00�� \\x9b é"]


LISTENING = '{"event":"listening","url":"http://127.0.0.1:81","admin_url":"http://127.0.0.1:82/"}'


def test_a_listening_line_gives_the_address() -> None:
    address = parse_listening(LISTENING)
    assert address == Address(url="http://127.0.0.1:81", admin_url="http://127.0.0.1:82")
    assert port_of(address.url) == 81


@pytest.mark.parametrize(
    "line",
    [
        "",
        "listening",
        "{",
        "[]",
        "{" * 100_000,
        '{"event":"listening"}',
        '{"event":"ready","url":"http://127.0.0.1:81","admin_url":"http://127.0.0.1:82"}',
        LISTENING.replace("http://127.0.0.1:81", "ftp://127.0.0.1:81"),
        LISTENING.replace("http://127.0.0.1:81", "http://127.0.0.1"),
        LISTENING.replace("http://127.0.0.1:81", "http://127.0.0.1:99999"),
        LISTENING.replace("http://127.0.0.1:81", "http://[::1:81"),
        LISTENING.replace('"http://127.0.0.1:81"', "81"),
    ],
    ids=lambda line: line[:30] or "empty",
)
def test_any_other_line_is_a_log_line(line: str) -> None:
    assert parse_listening(line) is None


@given(st.text())
def test_any_line_can_be_parsed(line: str) -> None:
    parse_listening(line)
    parse_listening("{" + line)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)
    try:
        os.close(reader)
    except OSError:
        pass  # a test closed it itself


def read_lines(fd: int, until: str) -> list[str]:
    with os.fdopen(os.dup(fd), encoding="utf-8") as file:
        lines = []
        for line in file:
            lines.append(line.rstrip("\n"))
            if lines[-1] == until:
                return lines
    return lines


def test_lines_are_written_in_order(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    for n in range(100):
        writer.write(f"line {n}")
    writer.close()
    assert read_lines(pipe[0], "line 99") == [f"line {n}" for n in range(100)]


def test_lines_for_a_slow_reader_are_dropped_and_counted(
    pipe: tuple[int, int],
) -> None:
    writer = LineWriter(pipe[1], max_queued_bytes=100_000)
    for n in range(10_000):
        writer.write(f"{n:06} {'x' * 100}")
    writer.close(timeout_s=0.01)
    found: list[list[str]] = []
    reader = threading.Thread(target=lambda: found.append(read_lines(pipe[0], "the end")))
    reader.start()
    writer.close()
    os.write(pipe[1], b"the end\n")
    reader.join()
    *kept, notice, _ = found[0]
    assert [line[:6] for line in kept] == [f"{n:06}" for n in range(len(kept))]
    assert notice == f"… {10_000 - len(kept)} lines dropped: they were not read in time"


def test_a_closed_reader_is_not_an_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = LineWriter(pipe[1])
    writer.write("hello")
    writer.write("still open")
    writer.close()


ROUTER = Address(url="http://127.0.0.1:8000", admin_url="http://127.0.0.1:9000")
REPLICA = RoutedReplica(name="chat-0", url="http://127.0.0.1:1", admin_url="http://127.0.0.1:2")


CRASHED = ProcessView(
    name="chat-0",
    role=Role.REPLICA,
    phase=ProcessPhase.EXITED,
    started_ns=0,
    exit_code=-9,
    address=Address(url=REPLICA.url, admin_url=REPLICA.admin_url),
)


def reported(
    *reports: Callable[[Reporter], None], json_events: bool, colour: bool = False
) -> tuple[list[str], list[str]]:
    """Return the lines on stdout and on stderr after these reports."""
    out, err = os.pipe(), os.pipe()
    reporter = Reporter(
        out=LineWriter(out[1]),
        err=LineWriter(err[1]),
        json_events=json_events,
        colour=colour,
        names=("chat-0", "chat-router"),
        model="chat",
    )
    for report in reports:
        report(reporter)
    reporter.close()
    lines = []
    for reader, writer in (out, err):
        os.close(writer)
        lines.append(read_lines(reader, until=""))
        os.close(reader)
    return lines[0], lines[1]


def report_life(reporter: Reporter) -> None:
    """Report the life of a fleet."""
    reporter.log("chat-0", "hello")
    reporter.report_ready("chat", ROUTER, (REPLICA,))
    reporter.report_exit(CRASHED, 500_000_000)
    reporter.report_start(CRASHED, again=True)
    reporter.report_stop("SIGTERM", 30_000_000_000)


def test_events_are_one_json_object_per_line() -> None:
    out, _ = reported(report_life, json_events=True)
    assert [json.loads(line) for line in out] == [
        {
            "event": "ready",
            "url": ROUTER.url,
            "admin_url": ROUTER.admin_url,
            "replicas": [
                {"name": "chat-0", "url": REPLICA.url, "admin_url": REPLICA.admin_url},
            ],
        },
        {"event": "replica_exited", "name": "chat-0", "exit_code": -9, "restart_in_ms": 500},
        {
            "event": "replica_restarted",
            "name": "chat-0",
            "url": REPLICA.url,
            "admin_url": REPLICA.admin_url,
        },
        {"event": "stopping", "reason": "SIGTERM"},
    ]


def test_users_get_the_address_and_an_example_request() -> None:
    out, err = reported(report_life, json_events=False)
    assert out[0] == "chat is ready at http://127.0.0.1:8000"
    (try_line,) = [line for line in out if "curl" in line]
    words = shlex.split(try_line.split("try")[1])
    assert words[0] == "curl"
    assert json.loads(words[-1])["model"] == "chat"
    assert err == [
        "chat-0      | hello",
        "up          | chat-0 ended with signal 9; it restarts in 500 ms",
        "up          | chat-0 is ready again at http://127.0.0.1:1",
        "up          | stopping (SIGTERM): running requests have 30 s to finish",
    ]


def test_names_are_coloured_only_on_request() -> None:
    _, plain = reported(report_life, json_events=False)
    _, coloured = reported(report_life, json_events=False, colour=True)
    assert not any("\x1b" in line for line in plain)
    assert coloured[0] == "\x1b[36mchat-0      |\x1b[0m hello"


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        pytest.param({"terminated_ns": 1, "exit_code": 0}, "has drained", id="drained"),
        pytest.param({}, "does not restart: fewer replicas are desired", id="crashed"),
        pytest.param(
            {"terminated_ns": 1},
            "does not restart: fewer replicas are desired",
            id="killed while it drained",
        ),
    ],
)
def test_a_removed_replica_is_reported_with_its_end(ended: dict[str, Any], words: str) -> None:
    left = replace(CRASHED, **ended)
    out, err = reported(lambda reporter: reporter.report_removal(left), json_events=True)
    assert [json.loads(line) for line in out] == [{"event": "replica_left", "name": "chat-0"}]
    assert err == [f"up          | chat-0 {words}"]


def test_a_change_of_control_is_logged_with_the_inputs_of_its_decision() -> None:
    params = ServiceParams(
        mode=ControlMode.AUTO,
        classes=(SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction(9, 10)),),
    )
    missed = ClassWindow(
        name="chat", ttft=TargetCounts(judged=100), tpot=TargetCounts(judged=100, missed=60)
    )
    step = control_step(
        ControlInput(
            state=ControlState(setpoint=Setpoint.initial(params)),
            params=params,
            interval_ns=10_000_000_000,
            traffic=Traffic(signal=Signal.FRESH, arrivals=100, in_flight=4),
            classes=(missed,),
            engines=(),
            phases={"chat-0": ReplicaPhase.READY},
            desired_replicas=1,
            startups_ns=(),
            now_ns=10_000_000_000,
        )
    )
    _, err = reported(lambda reporter: reporter.report_step(step), json_events=False)
    assert err[0].startswith("up          | token budget 2048 → 1536")
    prefix, _, inputs = err[1].partition(": ")
    assert prefix == "up          | decision TokenBudget TPOTMissed"
    logged = json.loads(inputs)
    assert (logged["arrivals"], logged["in_flight"], logged["signal"]) == (100, 4, "fresh")
    assert logged["classes"][0]["tpot"] == {"judged": 100, "missed": 60, "close": 0}
    assert logged["budget_law"]["reason"] == "TPOTMissed"
