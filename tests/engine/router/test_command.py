"""`goodput router` as a process, and its errors for invalid input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING

import pytest
import yaml

from goodput_core.dispatch import run_command

if TYPE_CHECKING:
    from collections.abc import Iterator

MANIFEST = Path(__file__).parents[3] / "examples" / "chat.yaml"
UPSTREAM = ("--upstream", "r0=http://127.0.0.1:1")


@contextmanager
def router(*options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    command = [sys.executable, "-m", "goodput_core", "router", "-f", str(MANIFEST), "--json"]
    process = subprocess.Popen(
        [*command, "--port", "0", *UPSTREAM, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process, json.loads(pipe(process.stdout).readline())
        finally:
            process.kill()


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@pytest.mark.parametrize(
    ("stop", "code"),
    [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 130), (None, 130)],
    ids=str,
)
def test_it_prints_its_urls_and_stops_on_a_signal(stop: signal.Signals | None, code: int) -> None:
    with router("--exit-with-parent") as (process, event):
        assert event["event"] == "listening"
        assert event["pid"] == process.pid
        with urllib.request.urlopen(f"{event['url']}/health/live") as answer:
            assert answer.status == 200
        with urllib.request.urlopen(f"{event['admin_url']}/metrics") as answer:
            assert b"goodput_requests_total" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404") as caught:
            urllib.request.urlopen(f"{event['url']}/metrics")
        caught.value.close()
        if stop is None:
            pipe(process.stdin).close()
        else:
            process.send_signal(stop)
        assert process.wait(timeout=10) == code
        assert pipe(process.stdout).read() == ""
        assert "Traceback" not in pipe(process.stderr).read()


class _GuardedServer(BaseHTTPRequestHandler):
    """Another server, of which only the path of its health needs no key."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/live" else 302)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_it_probes_the_health_path_of_its_manifest(tmp_path: Path) -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    runtime = {"kind": "OpenAI", "image": "other:1", "healthPath": "/live"}
    manifest["spec"] = {
        "model": {"source": "pvc://weights"},
        "engine": {"runtime": runtime},
        "slo": manifest["spec"]["slo"],
    }
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with ThreadingHTTPServer(("127.0.0.1", 0), _GuardedServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with router("-f", str(path), "--upstream", f"other={url}") as (_, event):
            ready = {}
            for _ in range(200):
                with urllib.request.urlopen(f"{event['admin_url']}/control/state") as answer:
                    ready = {r["name"]: r["ready"] for r in json.load(answer)["replicas"]}
                if ready["other"]:
                    break
                time.sleep(0.05)
        server.shutdown()
    assert ready == {"r0": False, "other": True}


BROKEN = "apiVersion: goodput.dev/v1alpha1\nkind: LLMService\nmetadata: {name: x}\nspec: {}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "-f", id="nothing"),
        pytest.param(["-f", "MANIFEST"], "name replicas with --upstreams FILE", id="no replicas"),
        pytest.param(["-f", "MANIFEST", "--endpoints", "a/b"], "is not a pod", id="no pod"),
        pytest.param(
            ["-f", "MANIFEST", "--endpoints", "engines"], "NAMESPACE/SERVICE", id="no namespace"
        ),
        pytest.param(
            ["-f", "MANIFEST", "--endpoints", "a/b", "--upstreams", "none.json"],
            "exclude each other",
            id="two sources",
        ),
        pytest.param(["-f", "none.yaml", *UPSTREAM], "none.yaml", id="no manifest"),
        pytest.param(["-f", "BROKEN", *UPSTREAM], "spec.model", id="broken manifest"),
        pytest.param(["-f", "BINARY", *UPSTREAM], "UTF-8", id="binary manifest"),
        pytest.param(["-f", "TWICE", *UPSTREAM], "is already used above", id="a field twice"),
        pytest.param(
            ["-f", "ODD", *UPSTREAM], "odd.yaml: spec.rollout.gate.trace", id="invalid field"
        ),
        pytest.param(["-f", "MANIFEST", "--upstreams", "none.json"], "none.json", id="no file"),
        pytest.param(["-f", "MANIFEST", "--upstreams", "BROKEN"], "broken.yaml", id="bad file"),
        pytest.param(["-f", "MANIFEST", "--upstream", "r0"], "NAME=URL", id="bad upstream"),
        pytest.param(["-f", "MANIFEST", *UPSTREAM, *UPSTREAM], "taken", id="name twice"),
        pytest.param(
            ["-f", "MANIFEST", *UPSTREAM, "--port", "70000"], "not a port in", id="bad port"
        ),
        pytest.param(
            ["-f", "MANIFEST", *UPSTREAM, "--port", "9000", "--admin-port", "9000"],
            "are both 9000",
            id="one port twice",
        ),
        pytest.param(["-f", "MANIFEST", *UPSTREAM, "--idle-timeout", "0s"], "is zero", id="zero"),
        pytest.param(["-f", "MANIFEST", *UPSTREAM, "--host", "x" * 70], "listen", id="long host"),
        pytest.param(["-f", "MANIFEST", *UPSTREAM, "--policy", "x"], "--policy", id="bad policy"),
        pytest.param(["-f", "MANIFEST", *UPSTREAM, "--grace", "5"], "duration", id="no unit"),
        pytest.param(["-f", "MANIFEST", *UPSTREAM, "--host", "no.such.host."], "listen", id="host"),
    ],
)
def test_invalid_input_is_reported_in_one_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text(BROKEN, encoding="utf-8")
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    text = MANIFEST.read_text(encoding="utf-8")
    Path("odd.yaml").write_text(text + "  rollout: {gate: {trace: ftp://t}}\n", encoding="utf-8")
    Path("twice.yaml").write_text(f"{text}\nkind: LLMService\n", encoding="utf-8")
    files = {
        "MANIFEST": str(MANIFEST),
        "BROKEN": "broken.yaml",
        "BINARY": "binary.yaml",
        "TWICE": "twice.yaml",
        "ODD": "odd.yaml",
    }
    assert run_command(["router", *(files.get(a, a) for a in arguments)]) == 64
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in captured.err


def test_a_router_that_waits_for_the_api_server_stops_on_a_signal() -> None:
    command = [sys.executable, "-m", "goodput_core", "router", "-f", str(MANIFEST), "--json"]
    with subprocess.Popen(
        [*command, "--port", "0", "--endpoints", "models/chat-engines"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"},
    ) as process:
        assert "endpoints not updated" in pipe(process.stderr).readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert pipe(process.stdout).read() == "", "the router never listened"
        assert "Traceback" not in pipe(process.stderr).read()


def test_a_port_in_use_is_reported() -> None:
    with router() as (_, event):
        port = str(event["url"]).rpartition(":")[2]
        command = [sys.executable, "-m", "goodput_core", "router", "-f", str(MANIFEST)]
        second = subprocess.run(
            [*command, *UPSTREAM, "--port", port], capture_output=True, text=True, check=False
        )
        assert second.returncode == 64
        assert f"127.0.0.1:{port}" in second.stderr


def test_the_option_overrides_the_policy() -> None:
    with (
        router("--policy", "round-robin") as (_, event),
        urllib.request.urlopen(f"{event['admin_url']}/control/state") as answer,
    ):
        assert json.load(answer)["policy"] == "round-robin"


BROKEN_SOURCE = """
import sys
from goodput_core.dispatch import run_command
from goodput_engine.router.upstreams import UpstreamsFile

async def broken(self, apply):
    {body}

UpstreamsFile.follow = broken
sys.exit(run_command(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise LookupError('a bug')", "internal error: LookupError: a bug; "),
        ("return", "a background task of this process ended"),
    ],
    ids=["raised", "returned"],
)
def test_a_router_ends_if_its_source_of_replicas_fails(
    tmp_path: Path, body: str, message: str
) -> None:
    upstreams = tmp_path / "replicas.json"
    upstreams.write_text("[]")
    ended = subprocess.run(
        [
            *(sys.executable, "-c", BROKEN_SOURCE.format(body=body)),
            *("router", "-f", MANIFEST, "--port", "0", "--upstreams", upstreams),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert ended.returncode == 70
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {message}")
