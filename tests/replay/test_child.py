"""Replays in child processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_COMMAND = """
import sys
from goodput_replay.child import child_replays

load = ["--rate", "1/s", "--duration", "1h", "--input-tokens", "8", "--output-tokens", "8"]
with child_replays() as children:
    children.run(*load, "--target", sys.argv[1], "--out", sys.argv[2])
"""


def test_a_replay_ends_if_its_command_is_killed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", _COMMAND, url, str(tmp_path / "run")]
        with subprocess.Popen(command) as parent:
            connection, _ = server.accept()  # the replay waits for the list of models
            parent.kill()
        with connection:
            connection.settimeout(8)  # the replay itself would wait for ten seconds
            assert connection.recv(1 << 16).startswith(b"GET /v1/models")
            assert connection.recv(1 << 16) == b"", "the replay has closed its connection"
