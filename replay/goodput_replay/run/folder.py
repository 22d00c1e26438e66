"""Making a run's folder: records as the run goes, then the judgement, the summary, the report.

The writer owns the folder while the run lasts. Files get their final names only when they are
whole, so a killed run leaves nothing that looks finished. How requests were sent is not known
here: the same writer serves real time and virtual time.
"""

from __future__ import annotations

import io
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from goodput_core.errors import InputError
from goodput_core.slo.judging import judge, targets_for
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_replay.run.files import (
    DECISIONS_FILE,
    PARTIAL_SUFFIX,
    RECORDS_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    DiskFullError,
    SurvivingFile,
    is_disk_full,
    set_aside,
)
from goodput_replay.run.records import RecordWriter
from goodput_replay.run.summarise import summarise
from goodput_replay.run.summary import write_summary

if TYPE_CHECKING:
    from datetime import datetime
    from types import TracebackType

    from goodput_core.slo.judging import Judgement
    from goodput_replay.run.facts import Promise, RunFacts
    from goodput_replay.run.summary import Summary

__all__ = ["RunWriter", "default_folder"]

_OURS: Final = (RECORDS_FILE, SUMMARY_FILE, REPORT_FILE, DECISIONS_FILE)
_SUMMARY_BYTES: Final = 1 << 18  # a few kilobytes for each class
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME: Final = 40


def default_folder(started: datetime, trace: str, target: str) -> Path:
    """`runs/<UTC time>-<trace>-<service or host>`, safe as a file name.

    Args:
        started: an aware wall-clock time.
        trace: the trace's name; a `.parquet` at its end is dropped.
        target: the service's name, or the host of a bare target.
    """
    stamp = started.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    parts = (trace.removesuffix(".parquet"), target)
    words = [_UNSAFE.sub("-", part).strip("-.")[:_LONGEST_NAME] for part in parts]
    return Path("runs", "-".join([stamp, *filter(None, words)]))


class RunWriter:
    """Records one run into its folder; a context manager.

    Left without `finish`, the records are closed and kept, and no summary is written: the folder
    is readable but marked by its absence as unfinished. Left without a record, it leaves nothing
    behind, and an earlier run in the folder stays.
    """

    def __init__(self, path: Path, promise: Promise, *, keep_gaps: bool, made: bool) -> None:
        """Use `create`."""
        self._path = path
        self._promise = promise
        self._classes = promise.by_name()
        self._made = made
        self._rows = 0
        self._finishing = False
        self._partial = path / (RECORDS_FILE + PARTIAL_SUFFIX)
        self._file = SurvivingFile(self._partial)
        self._records = RecordWriter(self._file, keep_gaps=keep_gaps, room=lambda: self._file.room)

    @classmethod
    def create(
        cls, path: Path, *, promise: Promise, force: bool = False, keep_gaps: bool = True
    ) -> Self:
        """Make the folder and its parents, ready for the first record.

        Args:
            path: the folder; must not exist, or be empty, unless `force`.
            promise: what requests are judged by.
            force: replace an earlier run in `path` once this one is recorded; files that are
                not a run's stay.
            keep_gaps: False keeps the p99 of each request's gaps instead of the gaps.

        Raises:
            InputError: the folder holds something, or cannot be made.
            DiskFullError: there is no room for even a short run.
        """
        made = False
        try:
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                made = True
            if not force and any(path.iterdir()):
                raise InputError(
                    f"{path}: the folder is not empty; choose another with --out, or replace the "
                    "run in it with --force"
                )
            set_aside(path / SUMMARY_FILE, _SUMMARY_BYTES)
            writer = cls(path, promise, keep_gaps=keep_gaps, made=made)
        except OSError as error:
            _clear(path, made=made)
            if is_disk_full(error):
                raise DiskFullError(
                    f"{path}: the disk is full before the run began; free some space"
                ) from error
            why = error.strerror or type(error).__name__
            raise InputError(f"{path}: cannot be made a run's folder ({why})") from error
        _rehearse()
        return writer

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def rows(self) -> int:
        """Requests recorded so far, warm-up rows too."""
        return self._rows

    @property
    def holds(self) -> str:
        """What became of the run so far, as the end of a sentence."""
        if not self._rows:
            return "nothing was recorded"
        return f"{self._path} holds the records of {self._rows} request{'s' * (self._rows != 1)}"

    @property
    def _began(self) -> bool:
        """Whether there is something to keep."""
        return self._finishing or self._rows > 0

    def append(self, record: RequestRecord, *, warmup: bool = False) -> Judgement | None:
        """Judge and keep one request; every 512 requests this writes to the disk.

        Args:
            record: what happened.
            warmup: keep it outside every figure.

        Returns:
            The judgement, None for a warm-up row.

        Raises:
            DiskFullError: the disk is full. This record is kept if it fits into what was set
                aside; stop, then call `finish`.
        """
        judgement = None if warmup else judge(record, targets_for(record, self._classes))
        self._rows += 1
        self._records.append(record, judgement)
        if self._file.full:
            raise self._full()
        return judgement

    def finish(self, facts: RunFacts, *, report: bool = True) -> Summary:
        """Close the records, judge the run, write the summary and the report.

        Args:
            facts: what the sender knows; its promise must be the one given to `create`.
            report: False leaves the report out; `replay report` can write it later.

        Raises:
            DiskFullError: the disk filled during the run; what could be written is there, and
                the run is marked incomplete.
        """
        assert facts.promise == self._promise, "a run is judged by one promise"
        self._finishing = True
        self._close()
        if self._file.full and facts.complete:
            facts = replace(facts, complete=False, abort_reason="because the disk was full")
        summary = summarise(self._path, facts)
        write_summary(self._path, summary)
        if report:
            self._write_report()
        if self._file.full:
            raise self._full()
        return summary

    def abandon(self) -> None:
        """Close the records and leave the rest undone; nothing after `finish`, raises nothing."""
        # Whatever ended the run may have been the disk: closing must not hide it.
        with suppress(Exception):
            self._close()
        if not self._began:
            _clear(self._path, made=self._made)
        with suppress(OSError):
            (self._path / (SUMMARY_FILE + PARTIAL_SUFFIX)).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()

    def _close(self) -> None:
        """End the records; an earlier run gives way to them only now."""
        if self._file.closed:
            return
        try:
            self._records.close()
        finally:
            self._file.close()
            if self._records.whole and self._began:
                for name in _OURS:
                    (self._path / name).unlink(missing_ok=True)
                self._partial.replace(self._path / RECORDS_FILE)
                decisions = self._path / (DECISIONS_FILE + PARTIAL_SUFFIX)
                if decisions.exists():
                    decisions.replace(self._path / DECISIONS_FILE)

    def _write_report(self) -> None:
        # Drawing needs matplotlib, which takes half a second to load: not before the run.
        from goodput_replay.report.page import write_report  # noqa: PLC0415

        try:
            write_report(self._path)
        except OSError as error:
            if not is_disk_full(error):
                raise
            if not self._file.full:
                raise DiskFullError(
                    f"{self._path}: the run is recorded and judged, and the disk has no room for "
                    f"its report; free some space and run `replay report {self._path}`"
                ) from error

    def _full(self) -> DiskFullError:
        lost = self._records.lost
        return DiskFullError(
            f"{self._path}: the disk is full; the {self._rows - lost} requests recorded until "
            f"then are kept{f', {lost} more did not fit' if lost else ''}; free some space and "
            "replay again"
        )


def _clear(path: Path, *, made: bool) -> None:
    """Take back what `create` did."""
    if made:
        shutil.rmtree(path, ignore_errors=True)
    for name in (RECORDS_FILE, SUMMARY_FILE):
        with suppress(OSError):
            (path / (name + PARTIAL_SUFFIX)).unlink()


def _rehearse() -> None:
    """Write one row to nowhere: the first costs 30 ms of imports that no run should pay."""
    writer = RecordWriter(io.BytesIO())
    writer.append(
        RequestRecord(request_id="", slo_class="", scheduled_ns=0, outcome=Outcome.UNSENT), None
    )
    writer.close()
