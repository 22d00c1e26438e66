"""The output of `replay gate` on a terminal and in files, which never replaces another file."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.replay.compare.recorded import chat_run, gate, make_recording, spread
from tests.replay.conftest import INFO

from goodput_core.errors import InputError, UsageError
from goodput_replay.compare.compare_command import main as compare
from goodput_replay.compare.gate_command import main
from goodput_replay.compare.recording import AB_FILE, write_recording
from goodput_replay.runs.files import (
    RECORDS_FILE,
    REPORT_FILE,
    SERVICE_LOG_FILE,
)


def test_a_device_file_is_written_and_not_replaced(tmp_path: Path) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120))
    (tmp_path / "null").symlink_to("/dev/null")
    main([run, "--junit", str(tmp_path / "null")])
    assert (tmp_path / "null").is_symlink()


def test_files_for_pipelines_tell_the_three_outcomes_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {
        "PASS": str(chat_run(tmp_path / "good", seconds=120)),
        "FAIL": str(chat_run(tmp_path / "bad", seconds=120, missed=spread(240))),
        "INCONCLUSIVE": str(chat_run(tmp_path / "short", seconds=10)),
    }
    outcomes = {}
    for verdict, run in runs.items():
        junit, markdown = tmp_path / f"{verdict}.xml", tmp_path / f"{verdict}.md"
        main([run, "--junit", str(junit), "--markdown", str(markdown)])
        assert verdict in capsys.readouterr().out
        assert f" {verdict} (" in markdown.read_text().splitlines()[0]
        suite = ET.parse(junit).getroot()[0]
        outcomes[verdict] = (suite.get("tests"), suite.get("failures"), suite.get("errors"))
    assert outcomes == {
        "PASS": ("1", "0", "0"),
        "FAIL": ("1", "1", "0"),
        "INCONCLUSIVE": ("1", "0", "1"),
    }


def test_one_run_says_what_its_bounds_leave_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(chat_run(tmp_path / name, seconds=120)) for name in ("a", "b")]
    main(runs[:1])
    printed = " ".join(capsys.readouterr().out.split())
    assert "The spread between runs is not included." in printed
    main(runs)
    assert "spread" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "last"),
    [("120", ["gained", "lost", "verdict"]), ("95", ["difference", "bounds", "verdict"])],
)
def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_ones(
    columns: str,
    last: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = chat_run(tmp_path / "old", seconds=120, missed=spread(6))
    new = chat_run(tmp_path / "new", seconds=120, missed=spread(240))
    monkeypatch.setenv("COLUMNS", columns)
    main([str(new), "--baseline", str(old)])
    lines = capsys.readouterr().out.splitlines()
    (header,) = (line for line in lines if line.startswith(" class "))
    assert header.split()[-3:] == last
    (row,) = (line for line in lines if line.startswith(" chat "))
    assert row.split()[-1] == "FAIL"


@pytest.mark.parametrize("other", ["result", "./result", "link", "folder/../result"])
def test_two_outputs_never_replace_each_other(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("result")
    with pytest.raises(UsageError, match=r"--markdown .*: is the file of --junit, too"):
        main([run, "--junit", "result", "--markdown", other])
    assert not (tmp_path / "result").exists()


def test_an_output_never_replaces_the_json_that_the_shell_redirects(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120)
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "goodput_core", "replay", "gate", str(run), "--json"]
    with result.open("wb") as file:
        done = subprocess.run(
            [*command, "--junit", str(result)], stdout=file, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, result.read_bytes()) == (64, b"")
    assert b"is the standard output, too" in done.stderr


def test_an_output_never_replaces_a_file_of_a_run(tmp_path: Path) -> None:
    run, other = (chat_run(tmp_path / name, seconds=120) for name in ("run", "other"))
    kept = (run / RECORDS_FILE).read_bytes()
    for path in (run / "." / RECORDS_FILE, other / REPORT_FILE, other / SERVICE_LOG_FILE):
        with pytest.raises(UsageError, match="is a file of a run"):
            main([str(run), "--markdown", str(path)])
        with pytest.raises(UsageError, match="is a file of a run"):
            compare([str(other), str(run), "--html", str(path)])
    assert (run / RECORDS_FILE).read_bytes() == kept
    assert main([str(run), "--markdown", str(run / "gate.md")]) == 0
    assert main([str(run), "--markdown", str(tmp_path / REPORT_FILE)]) == 0


def test_an_output_never_replaces_the_plan_of_a_recording(tmp_path: Path) -> None:
    write_recording(
        tmp_path, make_recording(same_build=False, pairs=1, folder=tmp_path, looks=(1,))
    )
    with pytest.raises(UsageError, match=r"ab\.json: is a file of `replay ab`"):
        main([str(tmp_path), "--junit", str(tmp_path / AB_FILE)])


PAGES: dict[str, tuple[list[str], bytes, bytes]] = {
    "gate": (["gate", "new", "--junit", "/dev/stdout"], b"PASS (Attained)", b"</testsuites>\n"),
    "compare": (["compare", "old", "new", "--html", "/dev/stdout"], b"<!DOCTYPE", b"measures.\n"),
    "report": (["report", "new", "--out", "/dev/stdout"], b"<!DOCTYPE html>", b"</html>"),
}


@pytest.mark.parametrize(("arguments", "first", "last"), PAGES.values(), ids=PAGES)
def test_an_output_may_be_the_pipe_of_the_standard_output(
    arguments: list[str], first: bytes, last: bytes, tmp_path: Path
) -> None:
    """The link in the folder of devices stays, too; a rename would replace it."""
    for name in ("old", "new"):
        chat_run(tmp_path / name, seconds=120)
    command = [sys.executable, "-m", "goodput_core", "replay", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert first in done.stdout
    assert done.stdout.endswith(last)
    assert done.stdout.count(last) == 1
    assert Path("/dev/stdout").is_symlink()
    with (tmp_path / "page").open("wb") as file:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=file, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, (tmp_path / "page").read_bytes()) == (64, b"")
    assert b"is the standard output, too; name another file" in done.stderr


@pytest.mark.parametrize(
    ("second", "overlaps"), [("05:08:06.999999", True), ("05:08:07.000000", False)]
)
def test_runs_at_the_same_time_are_named_in_every_output(
    second: str, overlaps: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = {"late": second, "early": "05:06:07.000000"}
    runs = [
        str(
            chat_run(
                tmp_path / name,
                seconds=120,
                run=replace(INFO.run, started_at=f"2026-03-04T{start}+00:00"),
            )
        )
        for name, start in starts.items()
    ]
    markdown = tmp_path / "gate.md"
    _, result = gate(runs, capsys)
    assert len(result["warnings"]) == overlaps
    main([*runs, "--markdown", str(markdown)])
    printed = " ".join(capsys.readouterr().out.split())
    for text in (printed, markdown.read_text()):
        assert ("ran at the same time" in text) is overlaps
    if overlaps:
        (warning,) = result["warnings"]
        assert warning.startswith(f"{runs[1]} and {runs[0]} ran at the same time. ")
        assert warning in printed


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120))
    with pytest.raises(InputError, match=r"missing/gate\.xml: the result cannot be written"):
        main([run, "--junit", str(tmp_path / "missing" / "gate.xml")])
    assert "PASS" in capsys.readouterr().out, "the verdict is not lost"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_files_are_written_if_the_reader_of_the_output_has_ended(
    tmp_path: Path, form: list[str]
) -> None:
    run, junit = chat_run(tmp_path / "run"), tmp_path / "gate.xml"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "goodput_core", "replay", "gate", str(run)]
    done = subprocess.run(
        [*command, *form, "--junit", str(junit)], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    assert junit.read_bytes().endswith(b"</testsuites>\n")
