"""`replay --scrape` records the server's metrics, and never changes the result of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from benchmarks.replayer_lateness import mock_server

from goodput_replay.runs.server_metrics import read_server_metrics
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
KEY = "a-very-secret-key"


class _MetricsPage(BaseHTTPRequestHandler):
    keys: set[str | None]
    scraped: threading.Event

    def do_GET(self) -> None:
        self.keys.add(self.headers["Authorization"])
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(b"vllm:num_requests_running 3\nmine 7\n")
        self.scraped.set()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def _metrics_page() -> Iterator[tuple[str, type[_MetricsPage]]]:
    handler = type("Page", (_MetricsPage,), {"keys": set(), "scraped": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()


def _command(tmp_path: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "goodput_core", "replay", "--trace", "sample", "--no-probe"),
        *("--length-pinning", "none", "--out", str(tmp_path / "run"), *options),
    ]


def test_pages_are_recorded_without_the_key_and_failing_ones_change_nothing(
    tmp_path: Path,
) -> None:
    with mock_server(tmp_path / "arrivals.csv") as target, _metrics_page() as (address, page):
        done = subprocess.run(
            _command(
                tmp_path, "--target", target, "--window", "0s..3s", "--ttft", "2s", "--tpot", "1s",
                "--scrape", address, "--scrape", "http://127.0.0.1:9/metrics",
                "--scrape-metric", "mine", "--scrape-key-env", "SCRAPE_KEY",
            ),
            capture_output=True, text=True, check=False, env={**os.environ, "SCRAPE_KEY": KEY},
        )  # fmt: skip
    assert done.returncode in {0, 3}, done.stderr
    url = f"http://{address}/metrics"
    metrics = read_server_metrics(tmp_path / "run")
    assert metrics is not None
    assert set(metrics.sources) == {url, "http://127.0.0.1:9/metrics"}
    assert metrics.sources[url].failed == 0
    assert set(metrics.values(url, "running_requests")[1]) == {3.0}
    assert set(metrics.values(url, "mine")[1]) == {7.0}
    assert page.keys == {f"Bearer {KEY}"}
    assert not [f for f in (tmp_path / "run").iterdir() if KEY.encode() in f.read_bytes()]
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert [w.partition(": ")[2].partition(" ")[0] for w in warnings] == [
        "http://127.0.0.1:9/metrics", "http://127.0.0.1:9/metrics:",
    ]  # fmt: skip
    assert "Traceback" not in done.stderr
    assert 'id="server-0"' in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("scraped", [True, False], ids=["scraped", "--no-scrape"])
def test_the_engines_of_a_started_service_are_found(scraped: bool, tmp_path: Path) -> None:
    options = ["-f", "examples/chat.yaml", "--window", "0s..5s", "--no-report"]
    done = subprocess.run(
        _command(tmp_path, *options, *(() if scraped else ("--no-scrape",))),
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in {0, 3}, done.stderr
    metrics = read_server_metrics(tmp_path / "run")
    if not scraped:
        assert metrics is None
        return
    assert metrics is not None
    engines = {name: one for name, one in metrics.sources.items() if one.series}
    assert set(engines) == {"chat-0", "chat-1"}
    assert {"running_requests", "waiting_requests", "kv_usage", "output_tokens"} <= set(
        engines["chat-0"].series
    )
    assert not [one for one in metrics.sources.values() if one.failed]
    assert sum(sum(metrics.values(name, "output_tokens")[1]) for name in engines) > 0


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_metrics(tmp_path: Path) -> None:
    with mock_server(tmp_path / "arrivals.csv") as target, _metrics_page() as (address, page):
        command = _command(tmp_path, "--target", target, "--scrape", address, "--no-report")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            assert page.scraped.wait(30)
            child.send_signal(signal.SIGINT)
            assert child.wait(30) == 130
    metrics = read_server_metrics(tmp_path / "run")
    assert metrics is not None
    assert metrics.sources[f"http://{address}/metrics"].scrapes >= 1
    assert not read_summary(tmp_path / "run").run.complete


@pytest.mark.slow
def test_a_run_ends_in_order_if_the_scraping_process_was_killed(tmp_path: Path) -> None:
    with mock_server(tmp_path / "arrivals.csv") as target, _metrics_page() as (address, page):
        command = _command(
            tmp_path, "--target", target, "--scrape", address, "--no-report", "--window", "0s..5s",
            "--json",
        )  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert page.scraped.wait(30)
            (observing,) = psutil.Process(child.pid).children()
            observing.kill()
            assert child.stdout is not None
            summary = json.load(child.stdout)
            assert child.wait(60) in {0, 3}
    assert summary["run"]["complete"]
    assert not (tmp_path / "run" / "server_metrics.parquet").exists()


def test_a_key_that_is_not_set_ends_the_command_before_the_run(tmp_path: Path) -> None:
    done = subprocess.run(
        _command(tmp_path, "--target", "http://127.0.0.1:9", "--scrape", "127.0.0.1:9",
                 "--scrape-key-env", "NO_SUCH_KEY"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 64
    assert done.stderr == "error: --scrape-key-env NO_SUCH_KEY: the variable is not set\n"
