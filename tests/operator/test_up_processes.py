"""`goodput up` over stand-in children: real processes and signals, and none left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., Any]


def upstreams(router_url: str) -> dict[str, str]:
    """Return the replicas in the router's file, from the stand-in router."""
    with urllib.request.urlopen(router_url, timeout=10) as answer:
        return {u["name"]: u["url"] for u in json.load(answer)}


def test_a_service_becomes_ready_and_ends_with_sigterm(start_up: Start) -> None:
    up = start_up()
    ready = up.event("ready")
    assert [r["name"] for r in ready["replicas"]] == ["chat-0", "chat-1"]
    assert upstreams(ready["url"]) == {r["name"]: r["url"] for r in ready["replicas"]}
    assert len(up.members()) == 4
    up.signal(signal.SIGTERM)
    assert up.event("stopping") == {"event": "stopping", "reason": "SIGTERM"}
    assert up.wait() == 0
    assert up.left_behind() == []
    assert "chat-0      | engine chat-0 is starting\n" in up.log()
    assert "chat-router | drained\n" in up.log()
    assert "\x1b" not in up.log()


def test_the_private_folder_is_private_and_removed(start_up: Start, tmp_path: Path) -> None:
    up = start_up()
    up.event("ready")
    (folder,) = tmp_path.glob("goodput-chat-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    up.signal(signal.SIGTERM)
    up.wait()
    assert not folder.exists()


def test_ctrl_c_drains_the_children_and_exits_130(start_up: Start) -> None:
    up = start_up()
    up.event("ready")
    up.signal(signal.SIGINT)
    assert up.wait() == 130
    assert up.log().count("drained") == 3
    assert up.left_behind() == []


def test_the_limit_of_open_files_is_raised_for_every_process(start_up: Start) -> None:
    script = str(Path(__file__).parent / "children" / "up.py")
    limited = 'ulimit -Sn 256; exec "$@"'
    up = start_up(program=("bash", "-c", limited, "bash", sys.executable, script))
    up.event("ready")
    for process in (psutil.Process(up.process.pid), up.child("chat-0")):
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard > 256


def test_replicas_serve_until_the_router_has_drained(start_up: Start, tmp_path: Path) -> None:
    """A draining router still sends requests to replicas, which must admit them."""
    release = tmp_path / "release"
    up = start_up(env={"STAND_IN_RELEASE": str(release)}, chat_router="drains-slowly")
    ready = up.event("ready")
    up.signal(signal.SIGINT)
    up.wait_for_log("chat-router | draining")
    for replica in ready["replicas"] * 10:
        with urllib.request.urlopen(replica["url"], timeout=10) as answer:
            assert answer.status == 200
    assert "drained" not in up.log()
    release.touch()
    assert up.wait() == 130
    lines = [line.split("|")[0].strip() for line in up.log().splitlines() if "drained" in line]
    assert lines[0] == "chat-router"
    assert sorted(lines[1:]) == ["chat-0", "chat-1"]


def test_a_second_ctrl_c_kills_at_once(start_up: Start) -> None:
    up = start_up("--grace", "10m", chat_0="stubborn forks")
    up.event("ready")
    up.signal(signal.SIGINT)
    up.event("stopping")
    up.signal(signal.SIGINT)
    assert up.wait() == 130
    assert up.left_behind() == []


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(start_up: Start) -> None:
    up = start_up("--grace", "1ms", chat_1="stubborn forks")
    up.event("ready")
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert "chat-1 is killed: it did not end within" in up.log()
    assert up.left_behind() == []


def test_a_closed_terminal_ends_everything(start_up: Start) -> None:
    # `nohup` ignores SIGHUP, which a child would inherit.
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        up = start_up()
    finally:
        signal.signal(signal.SIGHUP, inherited)
    up.event("ready")
    up.signal(signal.SIGHUP)
    assert up.wait() == 130
    assert up.left_behind() == []


def test_the_end_of_the_parent_ends_everything(start_up: Start) -> None:
    up = start_up("--exit-with-parent")
    up.event("ready")
    up.process.stdin.close()
    assert up.event("stopping")["reason"] == "stdin closed"
    assert up.wait() == 0
    assert up.left_behind() == []


def test_stdin_is_left_alone_without_exit_with_parent(start_up: Start) -> None:
    up = start_up()
    up.process.stdin.close()
    up.event("ready")
    up.signal(signal.SIGTERM)
    assert up.event("stopping")["reason"] == "SIGTERM"


@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_kill_9_of_up_leaves_no_process_behind(start_up: Start, moment: str) -> None:
    up = start_up(chat_1="well" if moment == "ready" else "silent", chat_router="once-crashes")
    up.event("ready" if moment == "ready" else "router_exited")
    up.signal(signal.SIGKILL)
    assert up.wait() == -signal.SIGKILL
    assert up.left_behind() == []


def test_an_internal_error_leaves_no_process_behind(start_up: Start) -> None:
    up = start_up(env={"UP_BREAKS": "1"}, chat_0="stubborn forks")
    assert up.wait() == 1
    assert "RuntimeError: a bug in the supervisor" in up.log()
    assert up.left_behind() == []


def test_sigterm_while_starting_ends_soon(start_up: Start) -> None:
    up = start_up("--grace", "10m", chat_1="once-crashes", chat_0="silent stubborn")
    up.event("replica_exited")
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert up.left_behind() == []


def test_a_killed_replica_restarts_and_is_published_with_its_new_url(start_up: Start) -> None:
    up = start_up(chat_1="forks")
    ready = up.event("ready")
    (grandchild,) = up.child("chat-1").children()
    up.child("chat-1").kill()
    exited = up.event("replica_exited")
    assert (exited["name"], exited["exit_code"]) == ("chat-1", -9)
    assert 0 < exited["restart_in_ms"] <= 500
    returned = up.event("replica_restarted")
    assert returned["name"] == "chat-1"
    assert returned["url"] != ready["replicas"][1]["url"]
    assert upstreams(ready["url"]) == {
        "chat-0": ready["replicas"][0]["url"],
        "chat-1": returned["url"],
    }
    psutil.wait_procs([grandchild], timeout=10)
    assert not grandchild.is_running()


def test_a_killed_router_restarts_on_its_ports(start_up: Start) -> None:
    up = start_up()
    ready = up.event("ready")
    up.child("chat-router").kill()
    assert up.event("router_exited")["exit_code"] == -9
    returned = up.event("router_restarted")
    assert returned["url"] == ready["url"]
    assert returned["admin_url"] == ready["admin_url"]
    assert len(upstreams(ready["url"])) == 2


def test_a_router_restarts_while_a_replica_crashes(start_up: Start) -> None:
    up = start_up(chat_1="once-well then crashes")
    ready = up.event("ready")
    up.child("chat-1").kill()
    assert up.event("replica_exited")["exit_code"] == -9
    assert up.event("replica_exited")["exit_code"] == 70
    up.child("chat-router").kill()
    assert up.event("router_restarted")["url"] == ready["url"]
    assert list(upstreams(ready["url"])) == ["chat-0"]


@pytest.mark.parametrize(("name", "role"), [("chat-1", "replica"), ("chat-router", "router")])
def test_a_hanging_process_is_restarted(start_up: Start, name: str, role: str) -> None:
    up = start_up("--liveness-timeout", "100ms")
    up.event("ready")
    up.child(name).suspend()
    ended = up.event(f"{role}_exited")
    assert (ended["name"], ended["exit_code"]) == (name, -9)
    assert up.event(f"{role}_restarted")["name"] == name
    assert f"{name} is killed: it failed its liveness checks for 0.1 s" in up.log()
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert up.left_behind() == []


def test_a_replica_that_crashes_at_its_first_start_is_restarted(start_up: Start) -> None:
    up = start_up(chat_1="once-crashes")
    assert len(up.event("ready")["replicas"]) == 2
    assert [e["event"] for e in up.seen] == ["replica_exited", "replica_restarted", "ready"]
    assert "chat-1      | error: the device is on fire\n" in up.log()


def test_a_rejected_manifest_is_reported_once_with_the_users_path(start_up: Start) -> None:
    up = start_up(chat_0="refuses", chat_1="refuses")
    assert up.wait() == 64
    chat = Path(__file__).parents[2] / "examples" / "chat.yaml"
    errors = [line for line in up.log().splitlines() if "error" in line]
    assert errors == [f"error: {chat}: spec.model.source: no such device"]
    assert up.left_behind() == []
    assert [json.loads(line)["event"] for line in up.process.stdout] == ["stopping"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("silent", "its last log line was 'engine chat-1 is starting'"),
        (
            "once-crashes then silent",
            "it ended with code 70, its last log line was 'the device is on",
        ),
        ("crashes", "it ended with code 70, its last log line was 'the device is on fire'"),
        ("missing", "its last log line was 'cannot start /no/such/program: No such file"),
        ("floods silent", "chat-1 was not ready"),
    ],
)
def test_a_replica_that_never_becomes_ready_is_named(
    start_up: Start, kind: str, words: str
) -> None:
    up = start_up("--ready-timeout", "1500ms", chat_1=kind)
    assert up.wait() == 70
    error = up.log().splitlines()[-1]
    assert error.startswith("error: chat-1 was not ready within 1.5 s")
    assert words in error
    assert up.left_behind() == []


def test_a_flood_of_unread_lines_blocks_nothing(start_up: Start) -> None:
    # The log goes to a pipe that is full from the start.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    try:
        up = start_up(chat_0="floods", stderr_fd=writer)
    finally:
        os.close(writer)
    up.event("ready")
    up.child("chat-1").kill()
    up.event("replica_restarted")
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert up.left_behind() == []
    os.close(reader)


def test_a_port_in_use_is_rejected_before_a_process_starts(start_up: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start_up("--port", str(port))
        assert up.wait() == 64
    (sentence,) = up.log().splitlines()
    assert sentence == (
        f"error: port {port} on 127.0.0.1 is in use; choose another with --port, "
        "or --port 0 for any free one"
    )
