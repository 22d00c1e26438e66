"""`replay --ui` serves the run while it is sent, and its report at the end."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from benchmarks.replayer_lateness import mock_server
from tests.builders.pages import opened

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

REPLAY = (sys.executable, "-m", "goodput_core", "replay")
# With this TTFT, a send lag of 100 ms is valid on a busy test machine.
SLO = """
slo:
  classes:
    - {name: interactive, ttftMs: 5000, tpotMs: 500, objective: "90%"}
    - {name: batch, ttftMs: 5000, tpotMs: 500}
  default: interactive
"""
LIVE = r"""() => {
    const text = (selector) => document.querySelector(selector)?.innerText ?? "";
    return text("#connection") === "live"
        && /[1-9]\d* of \d+ requests sent/.test(text("#progress"))
        && /[1-9]\d* of [1-9]\d* requests met every target/.test(text("#classes .card"))
        && text("#verdict").includes("so far")
        && document.querySelectorAll("figure .uplot canvas").length >= 6;
}"""


def _sample(tmp_path: Path, *options: str) -> list[str]:
    slo = tmp_path / "slo.yaml"
    slo.write_text(SLO)
    return [
        *REPLAY, "--trace", "sample", "--window", "0s..12s", "--slo", str(slo), "--no-probe",
        "--length-pinning", "none",
        "--out", str(tmp_path / "run"), *options,
    ]  # fmt: skip


@pytest.mark.slow
def test_the_live_page_turns_into_the_report(browser: Browser, tmp_path: Path) -> None:
    with (
        mock_server(tmp_path / "arrivals.csv") as target,
        subprocess.Popen(
            _sample(tmp_path, "--target", target, "--ui"), stderr=subprocess.PIPE, text=True
        ) as child,
    ):
        assert child.stderr is not None
        line = child.stderr.readline()
        assert line.startswith("live page: http://127.0.0.1:")
        try:
            with opened(browser, line.split()[-1]) as page:
                # One look at the page, because the run goes on meanwhile.
                page.wait_for_function(LIVE, timeout=30_000)
                page.wait_for_url("**/report", timeout=60_000)
                assert page.locator("#connection").count() == 0
                assert page.locator("#slowest table").is_visible()
                assert "so far" not in page.locator("#verdict").inner_text()
            assert child.wait(timeout=30) in {0, 3}  # a busy test machine can be late
        finally:
            child.kill()


def test_a_port_in_use_ends_the_command_before_a_request_is_sent(tmp_path: Path) -> None:
    log = tmp_path / "arrivals.csv"
    with socket.create_server(("127.0.0.1", 0)) as taken, mock_server(log) as target:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            _sample(tmp_path, "--target", target, "--ui", "--ui-port", port),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 64
    assert done.stderr.splitlines()[-1] == (
        f"error: --ui-port: port {port} on 127.0.0.1 is in use; choose another port, or 0 for "
        "any free one"
    )
    assert not log.read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--target", "http://127.0.0.1:1", "--ui-port", "8080"], "--ui-port is only supported"),
        (["--emulate", "examples/chat.yaml", "--ui"], "--ui and --emulate are mutually exclusive"),
        (["--target", "http://127.0.0.1:1", "--ui", "--ui-port", "http"], "'http' is not a port"),
    ],
)
def test_an_invalid_combination_is_rejected(options: list[str], sentence: str) -> None:
    done = subprocess.run(
        [*REPLAY, "--trace", "sample", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 64
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
