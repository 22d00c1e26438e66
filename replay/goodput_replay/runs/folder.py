"""Write a run's folder: records during the run, then the summary and the report.

A file gets its final name only when it is complete, so a killed run never looks finished. Real
time and virtual time use the same writer. The caller passes in the function that writes the report,
because this package must not import `report`.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from goodput_core.errors import AbortedRun, ExitCode, InputError, Interrupted
from goodput_core.files import is_disk_full, partial_path, publish
from goodput_core.signals import StopCause, handle_stop_signals
from goodput_core.slo.judging import judge, targets_for
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.text import printable
from goodput_replay.runs.files import (
    DECISIONS_FILE,
    RECORDS_FILE,
    RUN_FILES,
    SERVER_METRICS_FILE,
    SUMMARY_FILE,
    DiskFullError,
    ReservedFile,
    reserve_file,
)
from goodput_replay.runs.records import RecordWriter
from goodput_replay.runs.summary import Summary, write_summary
from goodput_replay.runs.summary_builder import RunInfo, build_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from goodput_core.slo.judging import Judgement
    from goodput_replay.runs.slo import SLOClasses

__all__ = ["FinishedRun", "RunWriter", "default_folder", "stop_on_signals"]

_SUMMARY_BYTES: Final = 1 << 18  # a few kilobytes for each class
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run whose folder is complete.

    Args:
        summary: summary of the recorded requests.
        ended_by: cause of an early end; None if the run is complete.
    """

    summary: Summary
    ended_by: AbortedRun | Interrupted | None = None


def default_folder(started: datetime, trace: str, target: str) -> Path:
    """Return `runs/<UTC time>-<trace>-<service or host>`, safe as a file name.

    Args:
        started: an aware wall-clock time.
        trace: the trace's name; a `.parquet` suffix is removed.
        target: the service's name, or the host of a `--target`.
    """
    stamp = started.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    parts = (trace.removesuffix(".parquet"), target)
    words = [_UNSAFE.sub("-", part).strip("-.")[:_MAX_NAME] for part in parts]
    return Path("runs", "-".join([stamp, *filter(None, words)]))


class RunWriter:
    """Records one run into its folder; a context manager.

    The folder and its parents are created immediately. Without `finish`, the records are closed and
    kept, but no summary is written. If nothing was recorded, a new folder is removed, and an
    earlier run in the folder stays unchanged.

    Args:
        path: the folder, which must not exist or must be empty, unless `force` is True.
        slo: SLO classes for judging.
        force: replace an earlier run in `path` once this one is recorded; other files stay.
        keep_gaps: if False, record only the p99 of each request's gaps.
        write_report: writes the report of the finished run into the folder; None for no report.

    Raises:
        InputError: the folder is not empty or cannot be created.
        DiskFullError: the disk has no space for a short run.
    """

    def __init__(
        self,
        path: Path,
        *,
        slo: SLOClasses,
        force: bool = False,
        keep_gaps: bool = True,
        write_report: Callable[[Path], object] | None = None,
    ) -> None:
        self._path = path
        self._slo = slo
        self._classes = slo.by_name()
        self._write_report = write_report
        self._rows = 0
        self._finishing = False
        self._created = False
        try:
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                self._created = True
            if not force and any(path.iterdir()):
                raise InputError(
                    f"{path}: the folder is not empty; choose another with --out, or replace the "
                    "run in it with --force"
                )
            reserve_file(path / SUMMARY_FILE, _SUMMARY_BYTES)
            self._file = ReservedFile(partial_path(path / RECORDS_FILE))
        except OSError as error:
            self._remove()
            if is_disk_full(error):
                raise DiskFullError(
                    f"{path}: the disk was full before the run began; free some space"
                ) from error
            why = error.strerror or type(error).__name__
            raise InputError(
                f"{path}: the run's folder cannot be created ({why}); name another with --out"
            ) from error
        self._records = RecordWriter(
            self._file, keep_gaps=keep_gaps, free_bytes=lambda: self._file.free_bytes
        )
        _load_writer()

    @property
    def path(self) -> Path:
        """Run folder."""
        return self._path

    @property
    def rows(self) -> int:
        """Number of recorded requests, including warm-up rows."""
        return self._rows

    @property
    def content_clause(self) -> str:
        """Clause of a message: the number of recorded requests and their folder."""
        if not self._rows:
            return "nothing was recorded"
        return f"{self._path} holds the records of {self._rows} request{'s' * (self._rows != 1)}"

    @property
    def _has_content(self) -> bool:
        """True if the folder must be kept."""
        return self._finishing or self._rows > 0

    def append(self, record: RequestRecord, *, warmup: bool = False) -> Judgement | None:
        """Judge and record one request; writes to the disk every 512 requests.

        Args:
            record: record of the request.
            warmup: True to exclude the request from all results.

        Returns:
            The judgement, None for a warm-up row.

        Raises:
            DiskFullError: the disk is full. The record is kept if it fits into the reserve; the
                caller must stop sending and call `finish`.
        """
        judgement = None if warmup else judge(record, targets_for(record, self._classes))
        self._rows += 1
        self._records.append(record, judgement)
        if self._file.full:
            raise self._disk_full()
        return judgement

    def finish(self, info: RunInfo) -> Summary:
        """Close the records, judge the run, write the summary and the report.

        Args:
            info: run information from the sender; its classes must be those of the writer.

        Raises:
            DiskFullError: the disk was full during the run; the records that fitted are kept,
                and the run is marked incomplete.
        """
        assert info.slo == self._slo, "the classes must be those of the writer"
        self._finishing = True
        self._close()
        if self._file.full and info.run.complete:
            info = info.incomplete("because the disk was full")
        summary = build_summary(self._path, info)
        write_summary(self._path, summary)
        self._report()
        if self._file.full:
            raise self._disk_full()
        return summary

    def finish_failed(self, info: RunInfo, failure: Exception) -> None:
        """Judge a run that `failure` ended; the summary marks the run as incomplete.

        Raises:
            DiskFullError: the disk is full; the message states how many records are kept.
        """
        full = isinstance(failure, DiskFullError)
        reason = "because the disk was full" if full else f"because it failed: {failure}"
        try:
            self.finish(info.incomplete(reason))
        except DiskFullError:
            raise
        except Exception:  # noqa: BLE001, S110 - the first failure is the one to report
            pass

    def abandon(self) -> None:
        """Close the records without a summary; does nothing after `finish`, never raises."""
        # An error on closing must not hide the error that ended the run.
        with suppress(Exception):
            self._close()
        if not self._has_content:
            self._remove()
        with suppress(OSError):
            partial_path(self._path / SUMMARY_FILE).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _close(self) -> None:
        """Close the records, and let them replace an earlier run if they are complete."""
        if self._file.closed:
            return
        try:
            self._records.close()
        finally:
            self._file.close()
            if self._records.complete and self._has_content:
                for name in RUN_FILES:
                    (self._path / name).unlink(missing_ok=True)
                publish(self._path / RECORDS_FILE)
                for name in (DECISIONS_FILE, SERVER_METRICS_FILE):
                    with suppress(FileNotFoundError):
                        publish(self._path / name)

    def _remove(self) -> None:
        """Remove the folder if it is new, else the new files in it."""
        if self._created:
            shutil.rmtree(self._path, ignore_errors=True)
        for name in (RECORDS_FILE, SUMMARY_FILE, DECISIONS_FILE, SERVER_METRICS_FILE):
            with suppress(OSError):
                partial_path(self._path / name).unlink()

    def _report(self) -> None:
        if self._write_report is None:
            return
        try:
            self._write_report(self._path)
        except OSError as error:
            if not is_disk_full(error):
                raise
            if not self._file.full:
                raise DiskFullError(
                    f"{self._path}: the run is recorded and judged, but the disk has no space for "
                    f"its report; free some space and run `replay report {self._path}`"
                ) from error

    def _disk_full(self) -> DiskFullError:
        lost = self._records.lost
        return DiskFullError(
            f"{self._path}: the disk is full; the {self._rows - lost} requests recorded until "
            f"then are kept{f', {lost} more did not fit' if lost else ''}; free some space and "
            "replay again"
        )


@contextmanager
def stop_on_signals(writer: RunWriter, stop: Callable[[str], object]) -> Iterator[None]:
    """Call `stop` on the first signal and end the process on the second; main thread only.

    The second signal also works while a long run is judged. The records are closed and kept.

    Args:
        writer: keeps its records if the process ends.
        stop: called with "interrupted by Ctrl-C" or the like, between any two instructions.
    """
    stopping = False

    def received(cause: StopCause) -> None:
        nonlocal stopping
        if stopping and cause is StopCause.HANG_UP:
            return  # the terminal may be closed after Ctrl-C, before the run is judged
        if stopping:
            # An exception would first wait until the service has stopped, or be lost in a callback.
            writer.abandon()
            with suppress(OSError):
                # Unbuffered: the signal may have interrupted a write to stderr.
                sentence = printable(f"ended immediately by {cause}; {writer.content_clause}")
                os.write(2, f"error: {sentence}\n".encode())
            os._exit(ExitCode.INTERRUPTED)
        stopping = True
        stop(f"interrupted by {cause}")

    with handle_stop_signals(received):
        yield


def _load_writer() -> None:
    """Write one row to memory, because the first row imports modules, which takes 30 ms."""
    writer = RecordWriter(io.BytesIO())
    writer.append(
        RequestRecord(request_id="", slo_class="", scheduled_ns=0, outcome=Outcome.UNSENT), None
    )
    writer.close()
