"""Runs, recordings and arguments that `replay gate` refuses to judge."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.replay.compare.recorded import CHAT, chat_run, gate, make_recording, pairs
from tests.replay.conftest import INFO

from goodput_core.dispatch import run_command
from goodput_core.errors import InputError, UsageError
from goodput_core.replay_job import decode_ab_result
from goodput_replay.compare.gate_command import main
from goodput_replay.compare.recording import ABRecording, RecordedPair, write_recording
from goodput_replay.runs.files import (
    RECORDS_FILE,
    SUMMARY_FILE,
)
from goodput_replay.runs.slo import SLOClasses


def test_an_unfinished_recording_is_not_judged(tmp_path: Path) -> None:
    write_recording(
        tmp_path, make_recording(same_build=False, pairs=2, folder=tmp_path, looks=(4,))
    )
    with pytest.raises(InputError, match="2 of 4 planned pairs are complete"):
        main([str(tmp_path)])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slo": replace(CHAT, outage_s=5)}, "slo.outageSeconds differs"),
        ({"lag_ms": 90}, "an invalid run cannot be part of a history"),
    ],
    ids=["other SLO", "invalid"],
)
def test_a_history_of_other_or_invalid_runs_is_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    arguments = pairs(tmp_path, count=1)
    recording = make_recording(same_build=True, pairs=2, folder=tmp_path, looks=(2,))
    shutil.rmtree(tmp_path / "history" / "b-1")
    chat_run(tmp_path / "history" / "b-1", seconds=120, **changes)
    write_recording(tmp_path, recording)
    with pytest.raises(InputError, match=text):
        main([*arguments, "--history", str(tmp_path)])


def test_judged_runs_are_no_history_of_themselves(tmp_path: Path) -> None:
    write_recording(tmp_path, make_recording(same_build=True, pairs=4, folder=tmp_path))
    with pytest.raises(InputError, match="part of its own history"):
        main([str(tmp_path), "--history", str(tmp_path)])


@pytest.mark.parametrize(
    "changes",
    [
        {"confidence": "10%"},
        {"margin": "nope"},
        {"looks": ()},
        {"looks": (8, 4)},
        {"looks": (0, 4)},
        {"version": "2"},
    ],
)
def test_a_tampered_recording_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    recording = make_recording(same_build=False, pairs=1, folder=tmp_path, looks=(1,))
    write_recording(tmp_path, replace(recording, **changes))
    with pytest.raises(InputError, match=r"ab\.json: not a recording"):
        main([str(tmp_path)])


def test_a_run_without_an_slo_is_refused(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=5, slo=SLOClasses())
    with pytest.raises(InputError, match="the run has no SLO"):
        main([str(run)])


def test_runs_of_different_slos_are_refused_with_the_field(tmp_path: Path) -> None:
    old = chat_run(tmp_path / "old", seconds=120)
    new = chat_run(tmp_path / "new", seconds=120, warmup_rows=9)
    with pytest.raises(InputError, match="--warmup differs: 9 and 0; replay the same trace"):
        main([str(new), "--baseline", str(old)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a", "b", "--baseline", "c"], "2 runs of the candidate and 1 of the baseline"),
        (["a", "--history", "h"], "--history is only supported with --baseline"),
        (["a", "--margin", "-1%"], "--margin"),
        (["a", "--margin", "100%"], "--margin: .* a margin is at least 0% and below 100%"),
        (["a", "--confidence", "49%"], "--confidence: .* a confidence is at least 50%"),
        (["a", "--confidence", "100%"], "--confidence: .* at least 50% and below 100%"),
        (["a", "--serve", "8080"], "is not HOST:PORT"),
        ([], "RUN"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(arguments: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        main(arguments)


def test_copies_of_a_run_do_not_count_twice(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120)
    copy = shutil.copytree(run, tmp_path / "copy")
    text = f"{run} and {copy} are copies of one run; every run counts once"
    with pytest.raises(InputError, match=text):
        main([str(run), str(copy)])
    with pytest.raises(InputError, match="copies of one run"):
        main([str(run), "--baseline", str(copy)])


def test_the_same_run_does_not_count_twice(tmp_path: Path) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120))
    with pytest.raises(InputError, match="given twice"):
        main([run, "--baseline", run])


def test_a_run_that_was_cut_off_is_named(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120)
    records = run / RECORDS_FILE
    records.write_bytes(records.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"records\.parquet: not a readable Parquet file"):
        main([str(run)])
    (run / SUMMARY_FILE).unlink()
    with pytest.raises(InputError, match="give the folder of a finished run"):
        main([str(run)])


@pytest.mark.parametrize("kept", [slice(0, 1000), slice(30, None)], ids=["the last", "the missed"])
def test_records_without_some_requests_of_the_summary_are_rejected(
    tmp_path: Path, kept: slice
) -> None:
    run = chat_run(tmp_path / "run", seconds=120, missed=range(30))
    table = pq.read_table(run / RECORDS_FILE)
    pq.write_table(table.take(list(range(1200))[kept]), run / RECORDS_FILE)
    with pytest.raises(InputError, match="the records are not those of the summary"):
        main([str(run)])


def test_records_of_another_run_are_rejected(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120, missed=range(300))
    other = chat_run(tmp_path / "other", seconds=120)
    (run / RECORDS_FILE).write_bytes((other / RECORDS_FILE).read_bytes())
    with pytest.raises(InputError, match=r"1200 of 1200 met .* and summary\.json .* 900 of 1200"):
        main([str(run)])


@pytest.mark.parametrize("command", ["gate", "compare", "report"])
def test_records_of_another_run_with_the_same_totals_are_rejected(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = chat_run(tmp_path / "run", seconds=120, missed=range(300))
    other = chat_run(tmp_path / "other", seconds=120, missed=range(100, 400))
    (run / RECORDS_FILE).write_bytes((other / RECORDS_FILE).read_bytes())
    names = [run, other] if command == "compare" else [run]
    assert run_command(["replay", command, *map(str, names)]) == 64
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (
        f"error: {run / RECORDS_FILE}: the records are not those of the summary, which has another "
        "digest of them; restore both files or replay again"
    )


def test_a_summary_of_an_earlier_version_has_no_digest_and_is_accepted(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120)
    summary = json.loads((run / SUMMARY_FILE).read_text())
    assert summary.pop("records_digest").startswith("sha256:")
    (run / SUMMARY_FILE).write_text(json.dumps(summary))
    assert main([str(run)]) == 0
    assert run_command(["replay", "report", str(run)]) == 0


def test_a_flipped_bit_in_the_judgements_is_found(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120, missed=range(0, 1200, 7))
    path = run / RECORDS_FILE
    data = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    (judgement,) = (one for one in columns if one.path_in_schema == "judgement")
    data[judgement.data_page_offset + judgement.total_compressed_size // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"records\.parquet: damaged"):
        main([str(run)])


def test_a_recording_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    pair = RecordedPair(order="AB", salt="s", baseline="../secret", candidate="b")
    recording = ABRecording(
        baseline="a",
        candidate="b",
        same_build=False,
        looks=(1,),
        confidence="95%",
        margin="1%",
        pairs=(pair,),
    )
    write_recording(tmp_path, recording)
    with pytest.raises(InputError, match="lies outside the folder"):
        main([str(tmp_path)])


def test_a_margin_without_a_baseline_is_rejected(tmp_path: Path) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120))
    with pytest.raises(UsageError, match="--margin is only supported with --baseline"):
        main([run, "--margin", "1%"])


@pytest.mark.parametrize(
    "started_at", ["yesterday", "2026-03-04T05:06:07"], ids=["text", "no zone"]
)
def test_a_start_that_is_no_instant_is_rejected(started_at: str, tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=5, run=replace(INFO.run, started_at=started_at))
    with pytest.raises(InputError, match=r"summary\.json: not a run's summary .*or replay again"):
        main([str(run)])


@pytest.mark.parametrize(
    ("window", "problem"),
    [
        ({"length_s": -5.0}, "the window does not end after its start"),
        ({"length_s": 0.0}, "the window does not end after its start"),
        ({"length_s": 4e7}, "the window is longer than a year"),
        ({"start_s": -4e7}, "begins more than a year away"),
    ],
    ids=["negative", "empty", "long", "late"],
)
def test_a_window_that_no_run_has_is_rejected_with_its_problem(
    tmp_path: Path, window: dict[str, float], problem: str
) -> None:
    run = chat_run(tmp_path / "run", seconds=5)
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    summary["window"] |= window
    path.write_text(json.dumps(summary))
    with pytest.raises(InputError, match=rf"summary\.json: not a run's summary .*{problem}"):
        main([str(run)])


def store(folder: Path, *runs: Path) -> str:
    """Copy runs into a folder that stands for object storage, and return its URI."""
    for run in runs:
        shutil.copytree(run, folder / run.name)
    return f"file://{folder}"


def test_runs_in_object_storage_are_named_by_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [chat_run(tmp_path / name, seconds=120) for name in ("new", "old")]
    local = gate([str(runs[0]), "--baseline", str(runs[1])], capsys)
    uri = store(tmp_path / "store", *runs)
    arguments = [f"{uri}/new", "--baseline", f"{uri}/old", "--result-file", str(tmp_path / "r")]
    code, result = gate(arguments, capsys)
    assert (result["candidates"], result["baselines"]) == ([f"{uri}/new"], [f"{uri}/old"])
    assert (code, result["classes"]) == (local[0], local[1]["classes"])
    message = decode_ab_result((tmp_path / "r").read_text(encoding="utf-8"))
    assert message is not None
    assert (message.verdict, message.reason, message.pairs) == (
        "INCONCLUSIVE", "SinglePair", 1,
    )  # fmt: skip
    assert message.interval == "chat: 0.00 points (−0.23 … +0.23)"
    assert not list(Path(tempfile.gettempdir()).glob("goodput-*/run-*")), "the copies are removed"


def damage(run: Path, kind: str) -> None:
    """Make a run unusable as a baseline."""
    summary = run / SUMMARY_FILE
    if kind == "absent":
        shutil.rmtree(run)
    elif kind == "no records":
        (run / RECORDS_FILE).unlink()
    elif kind == "no summary":
        summary.unlink()
    elif kind == "other file":
        summary.write_bytes(b"\x00\xff{")
    elif kind == "other records":
        (run / RECORDS_FILE).write_bytes(b"PAR1" + b"\x00" * 64 + b"PAR1")
    else:
        content = json.loads(summary.read_text(encoding="utf-8"))
        if kind == "other format":
            content["version"] = "99"
        elif kind == "other trace":
            content["trace"]["digest"] = "sha256:" + "00" * 32
        elif kind == "other SLO":
            content["promises"][0]["ttft_ms"] = 501
        summary.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("absent", "{uri}/old: no such object"),
        ("no records", "{uri}/old/records.parquet: "),
        ("no summary", "{uri}/old/summary.json: "),
        ("other file", "{uri}/old/summary.json: "),
        ("other records", "{uri}/old/records.parquet: "),
        ("other format", "{uri}/old/summary.json: "),
        ("other trace", "{uri}/new and {uri}/old cannot be compared: the trace differs"),
        ("other SLO", "{uri}/new and {uri}/old cannot be compared: ttft_ms of chat differs"),
    ],
)
def test_an_unusable_baseline_is_one_sentence_and_no_verdict(
    tmp_path: Path, kind: str, words: str
) -> None:
    runs = [chat_run(tmp_path / name, seconds=30) for name in ("new", "old")]
    uri = store(tmp_path / "store", *runs)
    damage(tmp_path / "store/old", kind)
    result = tmp_path / "result"
    code = run_command(
        ["replay", "gate", f"{uri}/new", "--baseline", f"{uri}/old", "--result-file", str(result)]
    )
    assert code == 64
    message = decode_ab_result(result.read_text(encoding="utf-8"))
    assert message is not None
    assert (message.verdict, message.reason) == (None, "Error")
    assert message.message.startswith(words.format(uri=uri)), message.message
    assert "/goodput-" not in message.message, "no path of a copy"
    assert "\n" not in message.message
