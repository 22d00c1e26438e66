"""`replay ab`: orders, looks, and real runs of two builds in virtual and in real time."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
from tests.builders.manifests import write_manifest

from goodput_core.errors import InputError, UsageError
from goodput_core.replay_job import ABState, decode_ab_result
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.compare.ab import main, plan_looks, plan_orders
from goodput_replay.compare.progress import serving_progress
from goodput_replay.compare.recording import read_recording
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from pathlib import Path


def test_orders_come_in_blocks_of_two_that_cancel_a_drift() -> None:
    seen = Counter[tuple[str, ...]]()
    for seed in range(200):
        orders = plan_orders(6, random.Random(seed))
        for first, second in zip(orders[::2], orders[1::2], strict=True):
            assert {first, second} == {"AB", "BA"}
            seen[first, second] += 1
    assert min(seen.values()) > 200, "both blocks occur"
    assert len(plan_orders(3, random.Random(1))) == 3


@pytest.mark.parametrize(
    ("pairs", "max_pairs", "virtual", "looks"),
    [
        (None, None, False, (4,)),
        (6, None, False, (6,)),
        (4, 8, False, (4, 6, 8)),
        (4, 7, False, (4, 6, 7)),
        (None, 4, False, (4,)),
        (None, None, True, (1,)),
    ],
)
def test_the_looks_are_fixed_beforehand(
    pairs: int | None, max_pairs: int | None, virtual: bool, looks: tuple[int, ...]
) -> None:
    assert plan_looks(pairs, max_pairs, virtual=virtual) == looks


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-f", "a.yaml"], "name two builds with the same option"),
        (["-f", "a.yaml", "--target", "http://b"], "name two builds with the same option"),
        (
            ["--emulate", "a", "--emulate", "b", "--pairs", "4"],
            "runs in virtual time have no noise",
        ),
        (["-f", "a", "-f", "b", "--pairs", "6", "--max-pairs", "4"], "is less than 6 pairs"),
        (["-f", "a", "-f", "b", "--pairs", "1", "--max-pairs", "4"], "at least --pairs 2"),
        (["-f", "a", "-f", "b", "--pairs", "0"], "a number of pairs"),
        (["-f", "a", "-f", "b", "--salt", "x"], "--salt is set for each run"),
        (["-f", "a", "-f", "b", "--gate"], "--gate is what this command does"),
        (["-f", "a", "-f", "b", "--dry-run"], "--dry-run sends nothing"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(arguments: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        main(["--trace", "sample", *arguments])


def test_a_missing_history_ends_the_command_before_the_first_run(tmp_path: Path) -> None:
    out = tmp_path / "ab"
    arguments = ["-f", "a", "-f", "b", "--history", str(tmp_path), "--out", str(out)]
    with pytest.raises(InputError, match="no recordings of `replay ab`"):
        main(["--trace", "sample", *arguments])
    assert not out.exists()


def build(folder: Path, name: str, **changes: Any) -> str:
    (folder / name).mkdir()
    return str(write_manifest(folder / name, "chat", replicas=1, **changes))


def run_ab(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "goodput_core", "replay", "ab", "--trace", "sample", "--json"]
    done = subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_two_policies_in_virtual_time_need_one_pair(tmp_path: Path) -> None:
    old = build(tmp_path, "old", engine__policy="sarathi")
    new = build(tmp_path, "new", engine__policy="slo")
    options = ["--emulate", old, "--emulate", new, "--rate-scale", "6", "--out", "ab"]
    options += ["--result-file", "result", "--upload", f"file://{tmp_path}/kept/ab"]
    code, result, _ = run_ab(tmp_path, *options)
    assert result["virtual"]
    assert code == result["exit_code"]
    message = decode_ab_result((tmp_path / "result").read_text(encoding="utf-8"))
    assert message is not None
    assert message.verdict is not None
    assert message.verdict.exit_code == code
    assert (message.reason, message.pairs) == (result["reason"], 1)
    assert re.fullmatch(
        r"\w+: [+−]?[\d.]+ points \([+−]?[\d.]+ … [+−]?[\d.]+\)", message.interval or ""
    )
    assert read_recording(tmp_path / "kept" / "ab") == read_recording(tmp_path / "ab")
    assert "SinglePair" not in {check["reason"] for c in result["classes"] for check in c["checks"]}
    recording = read_recording(tmp_path / "ab")
    assert not recording.same_build
    assert recording.looks == (1,)
    (pair,) = recording.pairs
    policies = [
        emulation.policy
        for name in (pair.baseline, pair.candidate)
        if (emulation := read_summary(tmp_path / "ab" / name).emulation) is not None
    ]
    assert policies == ["sarathi", "slo"]


@pytest.mark.slow(35)
def test_one_build_against_itself_is_marked_and_sends_equal_prompts_within_a_pair(
    tmp_path: Path,
) -> None:
    same = build(tmp_path, "same")
    options = ["-f", same, "-f", same, "--window", "0s..4s", "--pairs", "2", "--out", "aa"]
    options += ["--no-report", "--no-scrape"]
    code, result, progress = run_ab(tmp_path, *options)
    assert code in {2, 3}, "four seconds prove nothing, and a busy machine may be late"
    assert len(result["baselines"]) == 2 or code == 3
    assert "pair 1, baseline: " in progress
    recording = read_recording(tmp_path / "aa")
    assert recording.same_build
    salts = []
    for pair in recording.pairs:
        runs = [
            read_summary(tmp_path / "aa" / name).run for name in (pair.baseline, pair.candidate)
        ]
        assert {run.salt for run in runs} == {pair.salt}
        started = {"A": runs[0].started_at, "B": runs[1].started_at}
        assert "".join(sorted(started, key=started.__getitem__)) == pair.order
        salts.append(pair.salt)
    assert len(set(salts)) == len(salts)


def test_the_progress_is_served_while_pairs_are_recorded() -> None:
    with (
        pytest.raises(UsageError, match=r"--progress 192\.0\.2\.1:1: cannot be listened on"),
        serving_progress(("192.0.2.1", 1), 4),
    ):
        raise AssertionError("the address is not of this machine")
    with serving_progress(None, 4) as on_state:
        assert on_state is None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with serving_progress(("127.0.0.1", port), 4) as on_state:
        assert on_state is not None
        with urlopen(f"{url}/gate/state", timeout=5) as response:
            assert json.load(response) == {"pairs": 0, "planned": 4}
        on_state(ABState(pairs=1, planned=4, verdict=VerdictKind.INCONCLUSIVE))
        with urlopen(f"{url}/gate/state", timeout=5) as response:
            state = {"pairs": 1, "planned": 4, "verdict": "INCONCLUSIVE"}
            assert json.load(response) == state
        with pytest.raises(HTTPError, match="404"):
            urlopen(url, timeout=5)
    with pytest.raises(URLError):
        urlopen(url, timeout=5)


class _Requests(BaseHTTPRequestHandler):
    """A server without a list of models; its class attribute has the received request lines."""

    lines: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.send_error(404)

    def log_request(self, *_: object) -> None:
        self.lines.append(self.requestline)


def test_a_target_that_is_down_ends_the_command_before_the_first_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "goodput_core", "replay", "ab", "--trace", "sample"]
    options = ["--ttft", "1s", "--tpot", "50ms", "--model", "chat", "--no-probe", "--out", "ab"]
    with ThreadingHTTPServer(("127.0.0.1", 0), _Requests) as server:
        Thread(target=server.serve_forever).start()
        targets = ["--target", f"http://127.0.0.1:{server.server_port}"]
        targets += ["--target", "http://127.0.0.1:1"]
        done = subprocess.run(
            [*command, *options, *targets],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        server.shutdown()
    assert done.returncode == 64
    assert "candidate: http://127.0.0.1:1/v1/models: could not connect" in done.stderr
    assert _Requests.lines == ["GET /v1/models HTTP/1.1"]
    assert not (tmp_path / "ab").exists()


def test_a_bad_manifest_is_reported_before_the_first_run(tmp_path: Path) -> None:
    good = build(tmp_path, "good")
    (tmp_path / "bad.yaml").write_text("kind: nonsense\n")
    command = [sys.executable, "-m", "goodput_core", "replay", "ab", "--trace", "sample"]
    done = subprocess.run(
        [*command, "-f", good, "-f", "bad.yaml", "--out", "ab", "--result-file", "result"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 64
    assert "candidate: bad.yaml" in done.stderr
    assert not (tmp_path / "ab").exists()
    message = decode_ab_result((tmp_path / "result").read_text(encoding="utf-8"))
    assert message is not None
    assert (message.verdict, message.reason) == (None, "Error")
    assert message.message in done.stderr
