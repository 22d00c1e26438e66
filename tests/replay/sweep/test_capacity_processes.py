"""`replay capacity` over HTTP, with real processes and signals; no process remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml
from tests.builders.manifests import write_manifest
from tests.builders.traces import steady_rows, write_rows

from goodput_core.errors import Interrupted
from goodput_replay.sweep.probe import replays

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
GOODPUT = [sys.executable, "-m", "goodput_core"]
TIMEOUT_S = 60


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A manifest of one replica, with targets that a busy machine also meets."""
    classes = [{"name": "chat", "ttftMs": 20_000, "tpotMs": 2_000, "objective": "50%"}]
    slo = {"classes": classes, "default": "chat"}
    return write_manifest(tmp_path, "chat", replicas=1, slo=slo)


def _trace(folder: Path, *, seconds: int) -> Path:
    rows = steady_rows(20 * seconds, input_tokens=20, output_tokens=2)
    return write_rows(folder / "trace.parquet", rows)


def _search(*options: str | Path, cwd: Path) -> tuple[int, dict[str, Any]]:
    command = [*GOODPUT, "replay", "capacity", "--json", *map(str, options)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    assert "each rate takes at least 1 s of real time" in done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, result


def _check(result: dict[str, Any], folder: Path) -> None:
    assert [p["rate_scale"] for p in result["probes"]] == [1, 2]
    rates = [p["offered_per_s"] for p in result["probes"]]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.1)
    for probe in result["probes"]:
        assert probe["attainment"] == {"chat": 1.0}
        summary = json.loads((folder / probe["run"] / "summary.json").read_text(encoding="utf-8"))
        assert summary["target"]["url"].startswith("http://127.0.0.1:")


@pytest.mark.slow
def test_each_rate_is_tried_on_a_new_service(manifest: Path, tmp_path: Path) -> None:
    options: list[str | Path] = [
        "--trace",
        _trace(tmp_path, seconds=1),
        "-f",
        manifest,
        "--probes",
        "2",
    ]
    code, result = _search(*options, "--out", "probes", cwd=tmp_path)
    assert code == 2, result  # a second is too short to show anything
    _check(result, tmp_path)
    urls = {
        json.loads((tmp_path / p["run"] / "summary.json").read_text())["target"]["url"]
        for p in result["probes"]
    }
    assert len(urls) == 2


@pytest.mark.slow
def test_a_running_server_is_tried_at_one_rate_after_another(
    manifest: Path, tmp_path: Path
) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text(yaml.safe_dump(yaml.safe_load(manifest.read_text())["spec"]["slo"]))
    with _serving(manifest) as url:
        options: list[str | Path] = [
            "--trace",
            _trace(tmp_path, seconds=1),
            "--target",
            url,
            "--slo",
            slo,
        ]
        code, result = _search(*options, "--probes", "2", "--out", "probes", cwd=tmp_path)
    assert code == 2, result
    _check(result, tmp_path)


def test_an_unreachable_server_is_reported_before_the_first_request(tmp_path: Path) -> None:
    command = [*GOODPUT, "replay", "capacity", "--trace", str(_trace(tmp_path, seconds=1))]
    command += ["--target", "http://127.0.0.1:9", "--slo", str(ROOT / "examples" / "slo.yaml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "error: at 1 times the trace's rate: " in done.stderr
    assert "127.0.0.1:9" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "to_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, False)],
    ids=["ctrl-c", "sigterm", "hang-up"],
)
def test_a_signal_ends_the_search_and_all_its_processes(
    manifest: Path, tmp_path: Path, signum: signal.Signals, to_group: bool
) -> None:
    command = [*GOODPUT, "replay", "capacity", "--trace", str(_trace(tmp_path, seconds=300))]
    command += ["-f", str(manifest), "--out", "probes"]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _until_sending(process)
            started = psutil.Process(process.pid).children(recursive=True)
            assert len(started) >= 5  # replay, up, an engine and its core, a router
            if to_group:
                os.killpg(process.pid, signum)
            else:
                process.send_signal(signum)
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("error: at 1 times the trace's rate: interrupted by ")
    assert "Traceback" not in errors
    assert [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def test_the_results_before_an_interruption_are_printed(manifest: Path, tmp_path: Path) -> None:
    command = [*GOODPUT, "replay", "capacity", "--trace", str(_trace(tmp_path, seconds=5))]
    command += ["--emulate", str(manifest), "--precision", "0.1", "--json", "--out", "probes"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "1 × the trace's rate" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("error: ")
    assert "interrupted" in errors
    assert json.loads(output)["probes"][0]["rate_scale"] == 1


def test_no_replay_is_started_after_an_interruption() -> None:
    with replays([]) as run:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            run.plan()


def _until_sending(process: subprocess.Popen[str]) -> None:
    """Return when the replay is connected to the service that was started for it."""
    search = psutil.Process(process.pid)
    for _ in range(10 * TIMEOUT_S):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        for replay in search.children():
            with suppress(psutil.NoSuchProcess):
                if any(c.status == psutil.CONN_ESTABLISHED for c in replay.net_connections()):
                    return
    pytest.fail("no request was sent")


@contextmanager
def _serving(manifest: Path) -> Iterator[str]:
    command = [*GOODPUT, "up", "-f", str(manifest), "--port", "0", "--json", "--exit-with-parent"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            events = (json.loads(line) for line in process.stdout)
            yield next(event["url"] for event in events if event["event"] == "ready")
        finally:
            process.stdin.close()
            process.wait(TIMEOUT_S)
