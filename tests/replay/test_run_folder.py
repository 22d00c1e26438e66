"""A run's folder from the first record to the last file, and what is left when it goes wrong."""

from __future__ import annotations

import errno
import itertools
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from goodput_core.errors import ExitCode, InputError
from goodput_core.verdict import Reason, VerdictKind
from goodput_replay.run.disk import DiskFullError, Reserve, SurvivingFile, write_atomically
from goodput_replay.run.facts import Promise
from goodput_replay.run.folder import RunWriter, default_folder
from goodput_replay.run.names import RECORDS_FILE, REPORT_FILE, SUMMARY_FILE
from goodput_replay.run.records import read_judged, read_records
from goodput_replay.run.summary import read_summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.replay.conftest import SyntheticRun

    from goodput_core.record import RequestRecord
    from goodput_replay.run.summary import Summary


def _record(folder: Path, run: SyntheticRun, *, report: bool = False) -> Summary:
    with RunWriter.create(folder, promise=run.facts.promise) as writer:
        for record in run.warmup:
            assert writer.append(record, warmup=True) is None
        for record in run.records:
            assert writer.append(record) is not None
        assert writer.rows == len(run.warmup) + len(run.records)
        return writer.finish(run.facts, report=report)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_finished_run_holds_records_summary_and_report_and_nothing_else(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    folder = tmp_path / "runs" / "first"
    summary = _record(folder, synthetic_run, report=True)
    assert _names(folder) == {RECORDS_FILE, SUMMARY_FILE, REPORT_FILE}
    assert read_summary(folder) == summary
    assert tuple(read_records(folder)) == synthetic_run.records
    assert sum(row.warmup for row in read_judged(folder)) == len(synthetic_run.warmup)


def test_nothing_looks_finished_while_the_run_lasts(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    with RunWriter.create(tmp_path, promise=synthetic_run.facts.promise) as writer:
        for record in synthetic_run.records:
            writer.append(record)
        assert _names(tmp_path).isdisjoint({RECORDS_FILE, SUMMARY_FILE, REPORT_FILE})


def test_a_run_that_breaks_off_keeps_its_records_but_gets_no_summary(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    def break_off() -> None:
        with RunWriter.create(tmp_path, promise=synthetic_run.facts.promise) as writer:
            for record in synthetic_run.records[:700]:
                writer.append(record)
            raise RuntimeError("a bug of the sender")

    with pytest.raises(RuntimeError):
        break_off()
    assert _names(tmp_path) == {RECORDS_FILE}
    assert tuple(read_records(tmp_path)) == synthetic_run.records[:700]
    with pytest.raises(InputError, match="give the folder of a finished run"):
        read_summary(tmp_path)


def test_an_interrupted_run_is_kept_and_marked_incomplete(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    facts = replace(synthetic_run.facts, complete=False, abort_reason="interrupted after 60 s")
    half = replace(synthetic_run, facts=facts, records=synthetic_run.records[:500])
    summary = _record(tmp_path, half, report=True)
    assert not summary.run.complete
    assert summary.verdict.kind is VerdictKind.INVALID
    assert summary.verdict.reason is Reason.INCOMPLETE
    assert "interrupted after 60 s" in summary.verdict.sentence
    assert summary.validity.unsent_rows == facts.rows_planned - 500
    assert tuple(read_records(tmp_path)) == half.records
    assert "incomplete" in (tmp_path / REPORT_FILE).read_text()


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not empty") as error:
        RunWriter.create(tmp_path, promise=Promise())
    assert error.value.exit_code is ExitCode.USAGE
    assert _names(tmp_path) == {"thesis.tex"}


def test_force_replaces_a_run_and_nothing_else(tmp_path: Path, synthetic_run: SyntheticRun) -> None:
    _record(tmp_path, synthetic_run)
    (tmp_path / "notes.txt").write_text("mine")
    with RunWriter.create(tmp_path, promise=Promise(), force=True):
        assert SUMMARY_FILE not in _names(tmp_path), "it would describe the run before"
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert list(read_records(tmp_path)) == []


@pytest.mark.parametrize("below", [True, False], ids=["below a file", "a file"])
def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, below: bool) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "run" if below else tmp_path / "file"
    with pytest.raises(InputError, match="cannot be made a run's folder"):
        RunWriter.create(path, promise=Promise(), force=True)


@pytest.mark.parametrize(
    ("trace", "target", "expected"),
    [
        ("sample", "chat", "20260304T050607Z-sample-chat"),
        ("prod.parquet", "10.0.0.1", "20260304T050607Z-prod-10.0.0.1"),
        ("../../etc/passwd", "::1", "20260304T050607Z-etc-passwd-1"),
        ("ünï cödé " + "x" * 90, "", "20260304T050607Z-n-c-d-" + "x" * 34),
        ("..", "", "20260304T050607Z"),
    ],
)
def test_the_folder_is_named_by_time_trace_and_target(
    trace: str, target: str, expected: str
) -> None:
    started = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    assert default_folder(started, trace, target) == Path("runs", expected)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of twelve megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system is not permitted here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_what_was_recorded_before_the_disk_filled_is_kept_and_readable(
    tiny_disk: Path, synthetic_run: SyntheticRun
) -> None:
    folder = tiny_disk / "run"
    kept: list[RequestRecord] = []
    with RunWriter.create(folder, promise=synthetic_run.facts.promise) as writer:
        (tiny_disk / "neighbour").write_bytes(bytes((12 << 20) - (8 << 20) - (1 << 18)))

        def fill() -> None:
            for record in itertools.cycle(synthetic_run.records):
                kept.append(replace(record, request_id=f"{len(kept)}-{record.request_id}"))
                writer.append(kept[-1])

        with pytest.raises(DiskFullError, match="the disk is full"):
            fill()
        with pytest.raises(DiskFullError, match=f"the {len(kept)} requests") as error:
            writer.finish(synthetic_run.facts)
    assert error.value.exit_code is ExitCode.INTERNAL
    assert list(read_records(folder)) == kept
    summary = read_summary(folder)
    assert not summary.run.complete
    assert "disk was full" in summary.run.abort_reason
    assert summary.verdict.kind is VerdictKind.INVALID
    assert _names(folder) == {RECORDS_FILE, SUMMARY_FILE, REPORT_FILE}


def test_a_disk_that_is_full_from_the_start_is_said_before_anything_is_sent(
    tiny_disk: Path,
) -> None:
    (tiny_disk / "neighbour").write_bytes(bytes(8 << 20))
    with pytest.raises(DiskFullError, match="before the run began"):
        RunWriter.create(tiny_disk / "run", promise=Promise())


def test_a_write_to_a_full_disk_spends_the_reserve_once_and_then_fails(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve", size=4096)
    assert (tmp_path / "reserve").stat().st_size == 4096
    with (
        SurvivingFile(Path("/dev/full"), reserve) as file,
        pytest.raises(OSError, match="No space") as error,
    ):
        file.write(b"a record")
    assert error.value.errno == errno.ENOSPC
    assert reserve.released
    assert not (tmp_path / "reserve").exists()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(b"old")
    (tmp_path / "summary.json.partial").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
