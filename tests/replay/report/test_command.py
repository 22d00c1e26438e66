"""`replay report DIR` rebuilds the page, or reports the problem in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.replay.conftest import write_run

from goodput_core.dispatch import run_command
from goodput_core.errors import ExitCode
from goodput_replay.report.run_report import write_report
from goodput_replay.runs.files import (
    RECORDS_FILE,
    REPORT_FILE,
    SERVER_METRICS_FILE,
    SUMMARY_FILE,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun


@pytest.fixture
def folder(tmp_path: Path, synthetic_run: SyntheticRun) -> Path:
    path = tmp_path / "run"
    write_run(path, synthetic_run.info, synthetic_run.records[:100], write_report=write_report)
    return path


def test_the_report_is_rebuilt_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = folder / REPORT_FILE
    first = report.read_bytes()
    report.unlink()
    assert run_command(["replay", "report", str(folder)]) == 0
    assert report.read_bytes() == first
    assert capsys.readouterr().out == f"{report}\n"


def test_control_characters_of_a_path_are_escaped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "\x1b]0;owned\x07.html"
    assert run_command(["replay", "report", str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out == rf"{tmp_path}/\x1b]0;owned\x07.html" + "\n"


def test_the_report_is_written_to_out(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    (folder / REPORT_FILE).unlink()
    assert run_command(["replay", "report", str(folder), "--out", str(out)]) == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert not (folder / REPORT_FILE).exists()


@pytest.mark.parametrize("name", [RECORDS_FILE, SUMMARY_FILE, SERVER_METRICS_FILE])
def test_the_report_does_not_replace_another_file_of_the_run(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    link = tmp_path / "link.html"
    link.symlink_to(folder / name)
    for out in (folder / name, link):
        assert run_command(["replay", "report", str(folder), "-o", str(out)]) == ExitCode.USAGE
        assert capsys.readouterr().err == (
            f"error: --out {out}: is a file of a run; name another file\n"
        )
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert run_command(["replay", "report", str(folder), "-o", str(folder / REPORT_FILE)]) == 0


def _no_summary(folder: Path) -> None:
    (folder / SUMMARY_FILE).unlink()


def _no_records(folder: Path) -> None:
    (folder / RECORDS_FILE).unlink()


def _cut_records(folder: Path) -> None:
    path = folder / RECORDS_FILE
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _foreign_summary(folder: Path) -> None:
    (folder / SUMMARY_FILE).write_text('{"name": "chat"}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_summary, "summary.json: No such file"),
        (_no_records, "records.parquet: no such file"),
        (_cut_records, "records.parquet: not a readable Parquet file"),
        (_foreign_summary, "summary.json: not a run's summary"),
    ],
    ids=["no summary", "no records", "cut records", "foreign summary"],
)
def test_a_folder_without_a_run_is_rejected(
    folder: Path,
    spoil: Callable[[Path], None],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(folder)
    assert run_command(["replay", "report", str(folder)]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["a", "b"], ["a", "--open"], ["/nowhere"]],
    ids=["no folder", "two folders", "unknown option", "nothing there"],
)
def test_an_invalid_command_line_is_rejected(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["replay", "report", *arguments]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_a_report_that_cannot_be_written_is_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "missing" / "page.html"
    assert run_command(["replay", "report", str(folder), "--out", str(out)]) == ExitCode.USAGE
    assert "the report cannot be written" in capsys.readouterr().err
