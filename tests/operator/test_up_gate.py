"""`goodput up --gate`: the arguments of the replay, its verdict, and the manifest that serves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders.manifests import llmservice, write_manifest

from goodput_core.errors import ExitCode, SpecError
from goodput_operator.local.gate import gate_command, is_promoted
from goodput_operator.local.options import parse_options

GATE = {"trace": "file:///traces/prod.parquet"}


def command(gate: dict[str, Any] | None, *more: str) -> tuple[str, ...]:
    options = parse_options(["-f", "new.yaml", "--gate", "old.yaml", *more])
    return gate_command(options, llmservice(rollout={"gate": gate}), Path("old.yaml"))


def test_the_sample_trace_is_on_every_machine() -> None:
    assert command({"trace": "sample"})[:2] == ("--trace", "sample")


def test_the_fields_of_the_gate_are_arguments_of_the_replay() -> None:
    least = ("--trace", "/traces/prod.parquet", "-f", "old.yaml", "-f", "new.yaml")
    assert command(GATE) == (*least, "--pairs", "4")
    window = {"startSeconds": 600, "endSeconds": 900}
    more = {**GATE, "pairs": 2, "maxPairs": 6, "window": window, "margin": "1.5%"}
    assert command(more, "--device", "unit") == (
        *(*least, "--pairs", "2", "--max-pairs", "6"),
        *("--window", "600s..900s", "--margin", "1.5%", "--device", "unit"),
    )
    requests = {"model": "m", "endpoint": "chat", "prompt": "text", "tokenizer": "file:///models"}
    assert command({**GATE, **requests}) == (
        *(*least, "--pairs", "4", "--model", "m", "--endpoint", "chat", "--prompt", "text"),
        *("--tokenizer", "/models"),
    )
    spread = {**GATE, "pairs": 1, "history": "file:///runs/aa"}
    pair = ("-f", "old.yaml", "--history", "/runs/aa", "-f", "new.yaml", "--pairs", "1")
    assert command(spread) == (*least[:2], *pair)
    recorded = ("--recorded", "/runs/aa", "-f", "new.yaml", "--pairs", "1")
    assert command({**spread, "baseline": "Recorded"}) == (*least[:2], *recorded)


@pytest.mark.parametrize(
    ("gate", "field", "words"),
    [
        (None, "spec.rollout.gate", "is required for --gate"),
        ({"trace": "pvc://traces/a"}, "spec.rollout.gate.trace", "is not on this machine"),
        (
            {**GATE, "tokenizer": "pvc://a/b"},
            "spec.rollout.gate.tokenizer",
            "is not on this machine",
        ),
        ({**GATE, "history": "pvc://a/b"}, "spec.rollout.gate.history", "is not on this machine"),
    ],
)
def test_a_gate_needs_a_trace_of_this_machine(
    gate: dict[str, Any] | None, field: str, words: str
) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        command(gate)
    assert caught.value.path == field
    assert str(caught.value).startswith("new.yaml: ")


@pytest.mark.parametrize(
    ("verdict", "after", "promoted"),
    [
        (ExitCode.PASS, "Rollback", True),
        (ExitCode.FAIL, "Promote", False),
        (ExitCode.INVALID, "Promote", False),
        (ExitCode.INCONCLUSIVE, "Pause", False),
        (ExitCode.INCONCLUSIVE, "Rollback", False),
        (ExitCode.INCONCLUSIVE, "Promote", True),
    ],
)
def test_only_a_pass_promotes_unless_the_manifest_promotes_the_undecided(
    verdict: ExitCode, after: str, promoted: bool
) -> None:
    gate = llmservice(rollout={"gate": {**GATE, "onInconclusive": after}}).spec.rollout.gate
    assert gate is not None
    assert is_promoted(verdict, gate) is promoted
    assert is_promoted(verdict, replace(gate, pairs=1)) is promoted


GOODPUT = (sys.executable, "-m", "goodput_core")
TARGETS = {
    "default": "interactive",
    "classes": [
        {"name": "interactive", "ttftMs": 2000, "tpotMs": 50, "objective": "80%"},
        {"name": "batch", "ttftMs": 30_000, "tpotMs": 200},
    ],
}


def gated_up(
    folder: Path, *, rate: int, seconds: int, gate: dict[str, Any], **changes: Any
) -> tuple[list[str], str, Path, Path]:
    """Run `goodput up --gate` on a changed manifest until it serves, and stop it.

    Returns:
        The served models, what it printed, and the old and the changed manifest.
    """
    trace = folder / "load.parquet"
    words = ["--out", str(trace), "--rate", str(rate), "--duration", f"{seconds}s"]
    subprocess.run([*GOODPUT, "trace", "synthesize", *words], check=True, capture_output=True)
    (folder / "a").mkdir()
    old = write_manifest(folder / "a", replicas=1, slo=TARGETS)
    rollout = {"gate": {"trace": f"file://{trace}", **gate}}
    new = write_manifest(folder, replicas=1, slo=TARGETS, rollout=rollout, **changes)
    # Another name shows which of the two serves.
    new.write_text(new.read_text("utf-8").replace("name: chat", "name: changed"), "utf-8")
    up = subprocess.Popen(
        [*GOODPUT, "up", "-f", str(new), "--gate", str(old), "--json", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    assert up.stdout is not None
    ready = json.loads(up.stdout.readline())
    with urllib.request.urlopen(f"{ready['url']}/v1/models", timeout=30) as response:
        models = [model["id"] for model in json.load(response)["data"]]
    up.send_signal(signal.SIGTERM)
    _, errors = up.communicate(timeout=60)
    assert (ready["event"], up.returncode) == ("ready", 0), errors
    return models, errors, old, new


@pytest.mark.slow(25)
@pytest.mark.timeout(240)
def test_a_candidate_that_fails_is_refused_and_the_baseline_serves(tmp_path: Path) -> None:
    """The candidate waits three seconds for its batches, so it misses all targets of TTFT.

    A busy machine delays no request to within its target, and a few requests in each run leave the
    client time to send them punctually.
    """
    engine = {"policy": "static", "batchTimeoutMs": 3000}
    models, errors, old, new = gated_up(
        tmp_path, rate=6, seconds=5, gate={"pairs": 1}, engine=engine
    )
    assert f"FAIL: {new} is refused, and {old} is served" in errors, errors
    sentence = r"interactive: 0 of (\d+) requests met .* \1 of \1 misses exceed the TTFT target"
    assert re.search(sentence, " ".join(errors.split())), errors
    assert models == ["chat"]


@pytest.mark.slow(100)
@pytest.mark.timeout(600)
def test_a_changed_manifest_that_passes_is_promoted_and_serves(tmp_path: Path) -> None:
    """A PASS needs a window of twenty seconds and two pairs."""
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        models, errors, old, new = gated_up(
            tmp_path / str(number),
            rate=10,
            seconds=21,
            gate={"pairs": 2, "margin": "10%"},
            engine={"policy": "orca"},
        )
        if f"INVALID: {new} is refused" not in errors:
            break  # otherwise the machine was busy
        assert models == ["chat"]
    assert f"PASS: {new} is promoted, and replaces {old}" in errors, errors
    assert models == ["changed"]
