"""A run's folder: complete, interrupted, or on a full disk."""

from __future__ import annotations

import collections
import errno
import itertools
import random
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from goodput_core.errors import ExitCode, InputError
from goodput_core.files import write_atomically
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_replay.report.run_report import write_report
from goodput_replay.runs.files import (
    DECISIONS_FILE,
    RECORDS_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    DiskFullError,
    ReservedFile,
    reserve_file,
)
from goodput_replay.runs.folder import RunWriter, default_folder
from goodput_replay.runs.record_rows import read_judged, read_records
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.runs.summary import read_summary, write_summary

if TYPE_CHECKING:
    from tests.replay.conftest import SyntheticRun

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.runs.summary import Summary


def _record(folder: Path, run: SyntheticRun, *, report: bool = False) -> Summary:
    write = write_report if report else None
    with RunWriter(folder, slo=run.info.slo, write_report=write) as writer:
        for record in run.warmup:
            assert writer.append(record, warmup=True) is None
        for record in run.records:
            assert writer.append(record) is not None
        assert writer.rows == len(run.warmup) + len(run.records)
        return writer.finish(run.info)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_finished_run_has_only_records_summary_and_report(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    folder = tmp_path / "runs" / "first"
    summary = _record(folder, synthetic_run, report=True)
    assert _names(folder) == {RECORDS_FILE, SUMMARY_FILE, REPORT_FILE}
    assert read_summary(folder) == summary
    assert tuple(read_records(folder)) == synthetic_run.records
    assert sum(row.warmup for row in read_judged(folder)) == len(synthetic_run.warmup)


def test_no_file_has_its_final_name_during_the_run(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    with RunWriter(tmp_path, slo=synthetic_run.info.slo) as writer:
        for record in synthetic_run.records:
            writer.append(record)
        assert _names(tmp_path).isdisjoint({RECORDS_FILE, SUMMARY_FILE, REPORT_FILE})


def test_a_failed_run_keeps_its_records_and_has_no_summary(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    def fail() -> None:
        with RunWriter(tmp_path, slo=synthetic_run.info.slo) as writer:
            for record in synthetic_run.records[:700]:
                writer.append(record)
            raise RuntimeError("a bug in the sender")

    with pytest.raises(RuntimeError):
        fail()
    assert _names(tmp_path) == {RECORDS_FILE}
    assert tuple(read_records(tmp_path)) == synthetic_run.records[:700]
    with pytest.raises(InputError, match="give the folder of a finished run"):
        read_summary(tmp_path)


def test_an_interrupted_run_is_kept_and_marked_incomplete(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    info = synthetic_run.info.incomplete("interrupted after 60 s")
    half = replace(synthetic_run, info=info, records=synthetic_run.records[:500])
    summary = _record(tmp_path, half, report=True)
    assert not summary.run.complete
    assert summary.verdict.kind is VerdictKind.INVALID
    assert summary.verdict.reason is Reason.INCOMPLETE
    assert "interrupted after 60 s" in summary.verdict.sentence
    assert summary.validity.unsent_rows == info.rows_planned - 500
    assert tuple(read_records(tmp_path)) == half.records
    assert "incomplete" in (tmp_path / REPORT_FILE).read_text()


def test_a_folder_with_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not empty") as error:
        RunWriter(tmp_path, slo=SLOClasses())
    assert error.value.exit_code is ExitCode.USAGE
    assert _names(tmp_path) == {"thesis.tex"}


def test_force_replaces_a_run_and_keeps_other_files(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    _record(tmp_path, synthetic_run, report=True)
    (tmp_path / "notes.txt").write_text("mine")
    with RunWriter(tmp_path, slo=SLOClasses(), force=True) as writer:
        writer.append(synthetic_run.records[0])
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert list(read_records(tmp_path)) == [synthetic_run.records[0]]
    assert _names(tmp_path) == {RECORDS_FILE, "notes.txt"}, (
        "the summary of the earlier run is removed"
    )


def test_a_run_without_a_request_keeps_the_earlier_run(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    summary = _record(tmp_path, synthetic_run, report=True)
    with RunWriter(tmp_path, slo=SLOClasses(), force=True):
        pass
    assert _names(tmp_path) == {RECORDS_FILE, SUMMARY_FILE, REPORT_FILE}
    assert read_summary(tmp_path) == summary
    assert tuple(read_records(tmp_path)) == synthetic_run.records


def test_a_run_without_a_request_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with RunWriter(tmp_path / name, slo=SLOClasses()):
            assert _names(tmp_path / name)
            (tmp_path / name / f"{DECISIONS_FILE}.partial").write_text("{}")
    assert not (tmp_path / "new").exists()
    assert _names(tmp_path / "empty") == set()


@pytest.mark.parametrize("below", [True, False], ids=["below a file", "a file"])
def test_a_path_that_is_not_a_folder_is_rejected(tmp_path: Path, below: bool) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "run" if below else tmp_path / "file"
    with pytest.raises(InputError, match="the run's folder cannot be created"):
        RunWriter(path, slo=SLOClasses(), force=True)


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


def _fill(folder: Path) -> None:
    """Fill the rest of the disk, as another program could."""
    with (folder / "neighbour").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 14))


@pytest.mark.parametrize("in_flight", [0, 600, 20_000], ids=["none", "a group", "too many"])
def test_records_from_before_the_disk_was_full_are_kept_and_readable(
    tiny_disk: Path, synthetic_run: SyntheticRun, in_flight: int
) -> None:
    folder = tiny_disk / "run"
    put: list[RequestRecord] = []
    with RunWriter(folder, slo=synthetic_run.info.slo, write_report=write_report) as writer:
        records = itertools.cycle(synthetic_run.records)

        def append() -> None:
            long = random.Random(len(put)).randbytes(500).hex()  # does not compress
            put.append(replace(next(records), request_id=f"{len(put)}-{long}"))
            writer.append(put[-1])

        append()
        _fill(tiny_disk)
        with pytest.raises(DiskFullError, match="the disk is full"):
            collections.deque(iter(append, True), maxlen=0)
        # Requests in flight are cancelled and recorded too.
        for _ in range(in_flight):
            with pytest.raises(DiskFullError):
                append()
        _fill(tiny_disk)
        with pytest.raises(DiskFullError, match="requests recorded until then are kept") as error:
            writer.finish(synthetic_run.info)
    assert error.value.exit_code is ExitCode.INTERNAL
    kept = list(read_records(folder))
    ids = {record.request_id for record in kept}
    assert kept == [record for record in put if record.request_id in ids]
    lost = len(put) - len(kept)
    assert f"the {len(kept)} requests" in str(error.value)
    assert (f", {lost} more did not fit" in str(error.value)) == (lost > 0) == (in_flight > 9999)
    summary = read_summary(folder)
    assert not summary.run.complete
    assert "disk was full" in summary.run.abort_reason
    assert summary.verdict.kind is VerdictKind.INVALID
    assert _names(folder) == {RECORDS_FILE, SUMMARY_FILE, REPORT_FILE}


def test_a_run_is_complete_if_its_report_does_not_fit(
    tiny_disk: Path, synthetic_run: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_then(folder: Path, summary: Summary) -> None:
        write_summary(folder, summary)
        _fill(tiny_disk)

    monkeypatch.setattr("goodput_replay.runs.folder.write_summary", fill_then)
    with pytest.raises(DiskFullError, match="no space for its report; free some space and run"):
        _record(tiny_disk / "run", synthetic_run, report=True)
    assert _names(tiny_disk / "run") == {RECORDS_FILE, SUMMARY_FILE}
    assert read_summary(tiny_disk / "run").run.complete


def test_a_disk_that_is_full_at_the_start_is_reported(
    tiny_disk: Path,
) -> None:
    (tiny_disk / "neighbour").write_bytes(bytes(8 << 20))
    with pytest.raises(DiskFullError, match="before the run began"):
        RunWriter(tiny_disk / "run", slo=SLOClasses())
    assert _names(tiny_disk) == {"neighbour"}


def test_the_reserve_of_a_file_can_be_written_on_a_full_disk(tiny_disk: Path) -> None:
    path = tiny_disk / "file"
    with ReservedFile(path, reserve_bytes=1 << 20) as file:
        written = file.write(b"before")
        _fill(tiny_disk)
        while not file.full:
            written += file.write(bytes(1 << 16))
        free = file.free_bytes or 0
        assert free >= (1 << 20) - (1 << 16)
        written += file.write(bytes(free))
        with pytest.raises(OSError, match="No space") as error:
            file.write(b"more")
        assert error.value.errno == errno.ENOSPC
        assert file.tell() == written
    assert path.stat().st_size == written


def test_a_reserved_file_can_be_written_on_a_full_disk(tiny_disk: Path) -> None:
    reserve_file(tiny_disk / "summary.json", 4096)
    _fill(tiny_disk)
    write_atomically(tiny_disk / "summary.json", b"{}")
    assert (tiny_disk / "summary.json").read_bytes() == b"{}"
    with pytest.raises(OSError, match="No space"):
        reserve_file(tiny_disk / "other.json", 1 << 20)
    assert _names(tiny_disk) == {"neighbour", "summary.json"}


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(b"old")
    (tmp_path / "summary.json.partial").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
