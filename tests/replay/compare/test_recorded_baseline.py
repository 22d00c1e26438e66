"""A recorded baseline: its latest run is compared, and the spread is that between recordings."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.replay.compare.recorded import chat_run
from tests.replay.conftest import INFO

from goodput_core.errors import InputError, UsageError
from goodput_replay.compare import ab
from goodput_replay.compare.comparable import RunInputs, require_comparable
from goodput_replay.compare.gate_command import main as judge
from goodput_replay.compare.recorded_baseline import find_recorded_runs
from goodput_replay.compare.recording import (
    ABRecording,
    RecordedPair,
    find_history,
    write_recording,
)
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STABLE = "chat-0a1b2c3d"
WINDOW_S = 120
SIDES = {"baseline": "baseline", "candidate": "candidate"}


def record(folder: Path, name: str, missed: int, **changes: Any) -> Path:
    """Record a build with itself; the first run missed this number of its 1,200 requests."""
    run = folder / name / "baseline"
    chat_run(run, missed=spread(missed), seconds=WINDOW_S, **{"revision": STABLE, **changes})
    write_recording(folder / name, recording(RecordedPair(order="AB", salt="s", **SIDES)))
    return folder / name


def spread(missed: int) -> range:
    """Return evenly spread numbers of requests."""
    return range(0, 1200, 1200 // missed)


def recording(*pairs: RecordedPair, recorded: bool = False) -> ABRecording:
    return ABRecording(
        baseline="http://chat",
        candidate="http://new" if recorded else "http://chat",
        same_build=not recorded,
        looks=(1,),
        confidence="95%",
        margin="1%",
        pairs=pairs,
        recorded=recorded,
    )


def compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, nights: Sequence[int], candidate: int
) -> dict[str, Any]:
    """Judge a candidate against the first of some nights; numbers are missed requests."""
    history = tmp_path / "history"
    for number, missed in enumerate(nights):
        record(history, f"night-{number}", missed)
    out = tmp_path / "out"
    shutil.copytree(history / "night-0" / "baseline", out / "baseline")
    chat_run(out / "candidate", missed=spread(candidate), seconds=WINDOW_S)
    pair = RecordedPair(order="AB", salt="s", **SIDES)
    write_recording(out, recording(pair, recorded=True))
    judge([str(out), "--history", str(history), "--json"])
    (chat,) = json.loads(capsys.readouterr().out)["classes"]
    check: dict[str, Any] = next(one for one in chat["checks"] if one["rule"] == "difference")
    return check


@pytest.mark.parametrize(
    ("nights", "candidate", "verdict"),
    [
        ((2, 2, 1, 3, 2, 2), 2, "PASS"),
        ((2, 2, 1, 3, 2, 2), 60, "FAIL"),
        # Nights that differ by more than the margin prove neither that nor its opposite.
        ((2, 40, 1, 60, 20, 2), 2, "INCONCLUSIVE"),
        ((2, 40, 1, 60, 20, 2), 60, "INCONCLUSIVE"),
        # Two nights besides the baseline are hardly an estimate of a spread.
        ((2, 1, 6), 2, "INCONCLUSIVE"),
    ],
    ids=["alike", "worse", "restless and alike", "restless and worse", "three nights"],
)
def test_the_spread_between_nights_decides_what_one_run_can_show(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    nights: Sequence[int],
    candidate: int,
    verdict: str,
) -> None:
    check = compare(tmp_path, capsys, nights=nights, candidate=candidate)
    assert check["verdict"] == verdict, check


def test_recordings_that_do_not_fit_are_left_out_and_the_error_names_one(tmp_path: Path) -> None:
    record(tmp_path, "a", 1)
    record(tmp_path, "other", 1, revision="chat-ffffffff")
    record(tmp_path, "copy", 1, revision="test-0a1b2c3d")
    record(tmp_path, "silent", 1, revision="")
    record(tmp_path, "late", 1, lag_ms=90)
    (tmp_path / "running").mkdir()
    write_recording(tmp_path / "running", recording())
    with pytest.raises(InputError, match=r"needs 3 recordings .* there are 2; 3 more were left"):
        find_recorded_runs(tmp_path, STABLE)
    last = record(tmp_path, "last", 1)
    found = find_recorded_runs(tmp_path, STABLE)
    names = {run.parent.name for run in found}
    assert names == {"a", "copy", last.name}
    starts = [json.loads((run / "summary.json").read_text())["run"]["started_at"] for run in found]
    assert starts == sorted(starts, reverse=True), "the latest is first"
    assert {run.parent.name for run in find_recorded_runs(tmp_path, None)} == {
        *names,
        "other",
        "silent",
    }


def test_recordings_of_other_requests_are_no_spread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for side in SIDES.values():
        chat_run(out / side, seconds=60)
    write_recording(out, recording(RecordedPair(order="AB", salt="s", **SIDES), recorded=True))
    for number in range(3):
        record(tmp_path / "history", f"night-{number}", 1)
    with pytest.raises(InputError, match="is of other requests: the length of the window differs"):
        judge([str(out), "--history", str(tmp_path / "history"), "--json"])
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "needs one new build"),
        (("--emulate", "a.yaml"), "needs one new build"),
        (("-f", "a.yaml", "-f", "b.yaml"), "needs one new build"),
        (("-f", "a.yaml", "--pairs", "4"), "--pairs cannot be combined with --recorded"),
        (("-f", "a.yaml", "--max-pairs", "4"), "--max-pairs cannot be combined"),
        (("-f", "a.yaml", "--history", "h"), "--history cannot be combined"),
    ],
    ids=["no build", "virtual time", "two builds", "pairs", "looks", "a history"],
)
def test_options_that_do_not_fit_a_recorded_baseline_are_rejected(
    tmp_path: Path, options: Sequence[str], words: str
) -> None:
    for number in range(3):
        record(tmp_path / "h", f"night-{number}", 1)
    given = [str(tmp_path / "h") if word == "h" else word for word in options]
    with pytest.raises(UsageError, match=words):
        ab.main(["--trace", "sample", "--recorded", str(tmp_path / "h"), *given])


def test_too_few_recordings_end_the_command_with_a_result_before_any_run(tmp_path: Path) -> None:
    record(tmp_path / "h", "night-0", 1)
    words = ["--trace", "sample", "--recorded", str(tmp_path / "h"), "-f", "absent.yaml"]
    with pytest.raises(InputError, match="there are 1"):
        ab.main([*words, "--result-file", str(tmp_path / "result"), "--out", str(tmp_path / "o")])
    assert "needs 3 recordings" in (tmp_path / "result").read_text(encoding="utf-8")
    assert not (tmp_path / "o").exists()


def test_the_gate_compares_one_run_with_the_latest_recording_or_with_a_named_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(6):
        record(tmp_path / "history", f"night-{number}", 2)
    run = str(chat_run(tmp_path / "new", missed=spread(3), seconds=WINDOW_S))
    named = str(chat_run(tmp_path / "old", missed=spread(4), seconds=WINDOW_S))
    recorded = [run, "--recorded", str(tmp_path / "history"), "--json"]
    assert judge(recorded) == 0
    latest = find_recorded_runs(tmp_path / "history", None)[0]
    found = json.loads(capsys.readouterr().out)
    assert found["baselines"] == [str(latest)]
    assert judge([*recorded, "--baseline", named]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["baselines"] == [named]
    assert found["classes"][0]["difference"] == pytest.approx(1 / 1200, abs=1e-6)
    # The same pair without the recordings shows nothing about the spread between runs.
    assert judge([run, "--baseline", named, "--json"]) == 2


def at(day: int) -> dict[str, Any]:
    """Return the change with which a run started on this day."""
    return {"run": replace(INFO.run, started_at=f"2026-03-{day:02}T05:06:07+00:00")}


def test_of_very_many_recordings_the_latest_are_used_whatever_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goodput_replay.compare.recording._MAX_RECORDINGS", 4)
    for day in range(1, 7):
        record(tmp_path, f"night-{day}", 2, **at(day))
    (tmp_path / "running").mkdir()
    write_recording(tmp_path / "running", recording())
    names = [folder.name for folder, _ in find_history(tmp_path)]
    assert names == [f"night-{day}" for day in range(3, 7)]


def test_a_later_recording_of_other_requests_or_of_another_revision_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in range(1, 7):
        record(tmp_path / "history", f"night-{day}", 2, **at(day))
    record(tmp_path / "history", "other-revision", 2, revision="chat-ffffffff", **at(7))
    for day in range(8, 31):
        for half in ("morning", "night"):  # more recordings than are read
            folder = tmp_path / "history" / f"other-window-{day}-{half}"
            hour = {"morning": 8, "night": 22}[half]
            started = replace(INFO.run, started_at=f"2026-03-{day:02}T{hour:02}:00:00+00:00")
            chat_run(folder / "baseline", seconds=60, revision=STABLE, run=started)
            write_recording(folder, recording(RecordedPair(order="AB", salt="s", **SIDES)))
    run = chat_run(tmp_path / "new", missed=spread(3), seconds=WINDOW_S)
    inputs = {field.name: getattr(read_summary(run), field.name) for field in fields(RunInputs)}
    require_comparable(
        RunInputs(**inputs), baseline=None, recorded=str(tmp_path / "history"), revision=STABLE
    )
    options = ["--recorded", str(tmp_path / "history"), "--recorded-revision", STABLE, "--json"]
    assert judge([str(run), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["baselines"] == [str(tmp_path / "history" / "night-6" / "baseline")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("run", "run"), "--recorded needs one run of the candidate"),
        (("ab",), "--recorded needs one run of the candidate"),
        (("run", "--history", "h"), "--history cannot be combined with --recorded"),
    ],
    ids=["two runs", "a recording", "a history"],
)
def test_options_of_the_gate_that_do_not_fit_recordings_are_rejected(
    tmp_path: Path, options: Sequence[str], words: str
) -> None:
    record(tmp_path, "ab", 1)
    given = [str(tmp_path / word) if word in {"run", "ab", "h"} else word for word in options]
    with pytest.raises(UsageError, match=words):
        judge([*given, "--recorded", str(tmp_path)])
    with pytest.raises(UsageError, match="only supported with --recorded"):
        judge([str(tmp_path), "--recorded-revision", "chat-0a1b2c3d"])
