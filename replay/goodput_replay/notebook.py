"""Run replays from Python, and read runs as Arrow tables.

`run` and `open_run` are for notebooks and scripts. A replay runs in a process of its own, because
it needs an event loop with little else in it, and so that Ctrl-C in a notebook ends it in order.

    result = goodput_replay.run(trace="sample", emulate="examples/chat.yaml")
    result.classes["attainment"]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from goodput_core.errors import (
    AbortedRun,
    ExitCode,
    GoodputError,
    InternalError,
    Interrupted,
    UsageError,
)
from goodput_replay.report.timeline import cut_timeline
from goodput_replay.runs.columns import ColumnParts
from goodput_replay.runs.files import SUMMARY_FILE, require_digest
from goodput_replay.runs.records import open_records
from goodput_replay.runs.server_metrics import read_server_metrics
from goodput_replay.runs.summary import ClassSummary, Summary, VerdictSummary, read_summary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["NotebookRun", "open_run", "run"]

_ERRORS: Mapping[int, type[GoodputError]] = {
    ExitCode.INVALID: AbortedRun,
    ExitCode.USAGE: UsageError,
    ExitCode.INTERRUPTED: Interrupted,
}
_PRINTING: Final = frozenset({"dry_run", "help"})
"""Options that print, and make no run."""


@dataclass(frozen=True)
class NotebookRun:
    """A finished run.

    Args:
        folder: folder of the run. A temporary folder is deleted together with this object.
        summary: content of its `summary.json`.
    """

    folder: Path
    summary: Summary

    @property
    def verdict(self) -> VerdictSummary:
        """Verdict of the run."""
        return self.summary.verdict

    @cached_property
    def records(self) -> Any:
        """All requests as a `pyarrow.Table` with the columns of docs/run-folder.md."""
        with open_records(self.folder) as opened:
            return opened.read()

    @cached_property
    def server_metrics(self) -> Any:
        """Metrics of the server as a `pyarrow.Table`; None if no page was scraped."""
        metrics = read_server_metrics(self.folder)
        return None if metrics is None else metrics.table()

    @property
    def classes(self) -> Any:
        """One row for each class as a `pyarrow.Table`: counts, bounds, goodput and latencies.

        Latencies are columns such as `ttft_p99_ms`, null if the class has none.
        """
        return pa.Table.from_pylist([_make_class_row(one) for one in self.summary.classes])

    @property
    def timeline(self) -> Any:
        """One row for each interval and class as a `pyarrow.Table`."""
        window = self.summary.window
        timeline = cut_timeline(
            ColumnParts(self.folder),
            tuple(one.name for one in self.summary.classes),
            start_s=window.start_s,
            length_s=window.length_s,
        )
        return pa.Table.from_pylist(
            [
                {
                    "start_s": float(start_s),
                    "length_s": float(length_s),
                    "slo_class": one.name,
                    "good": int(good),
                    "total": int(total),
                }
                for one in timeline.classes
                for start_s, length_s, good, total in zip(
                    timeline.edges_s, timeline.widths_s, one.good, one.total, strict=False
                )
            ]
        )


def run(**options: object) -> NotebookRun:
    """Replay a trace and return the run.

    Args:
        options: options of `replay` without their dashes, such as `trace="prod.parquet"`,
            `rate_scale=2` or `no_report=True`; a list repeats an option. `file` is the manifest of
            a service to start. Without `out`, the run is in a temporary folder, which is deleted
            together with the returned object.

    Raises:
        UsageError: the options only print, such as `dry_run`.
        GoodputError: the run could not start, or ended early.
    """
    for name in _PRINTING & options.keys():
        if options[name]:
            raise UsageError(
                f"{name}: prints, and makes no run to return; use `replay --{_dashed(name)}` on "
                "the command line"
            )
    if "out" in options:
        return _replay(Path(str(options.pop("out"))), options)
    parent = tempfile.mkdtemp(prefix="goodput-run-")
    try:
        found = _replay(Path(parent) / "run", options)
    except BaseException:
        if not (Path(parent) / "run" / SUMMARY_FILE).exists():  # otherwise, the error names it
            shutil.rmtree(parent, ignore_errors=True)
        raise
    weakref.finalize(found, shutil.rmtree, parent, ignore_errors=True)
    return found


def open_run(folder: str | Path) -> NotebookRun:
    """Return the run in a folder.

    Raises:
        InputError: the folder has no readable run, or the records of another one.
    """
    path = Path(folder)
    summary = read_summary(path)
    require_digest(path, summary.records_digest)
    return NotebookRun(folder=path, summary=summary)


def _replay(folder: Path, options: Mapping[str, object]) -> NotebookRun:
    command = [sys.executable, "-m", "goodput_core", "replay", "--out", str(folder)]
    ended = subprocess.run(
        [*command, *_arguments(options)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = ended.stderr.strip().splitlines()
    if lines and lines[-1].startswith("error: "):
        kind = _ERRORS.get(ended.returncode, InternalError)
        raise kind(lines[-1].removeprefix("error: "))
    return open_run(folder)


def _arguments(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        option = f"--{_dashed(name)}"
        if value is True:
            yield option
        elif isinstance(value, list | tuple):
            yield from (f"{option}={one}" for one in value)
        elif value is not None and value is not False:
            yield f"{option}={value}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _make_class_row(one: ClassSummary) -> dict[str, object]:
    interval = one.interval
    row: dict[str, object] = {
        "slo_class": one.name,
        "requests": one.requests,
        "good": one.good,
        "total": one.total,
        "attainment": one.attainment,
        "lower": None if interval is None else interval.lower,
        "upper": None if interval is None else interval.upper,
        "objective": one.objective,
        "verdict": None if one.verdict is None else one.verdict.value,
        "goodput_per_s": one.goodput_per_s,
        "offered_per_s": one.offered_per_s,
        "served_per_s": one.served_per_s,
        "input_tokens": one.input_tokens,
        "output_tokens": one.output_tokens,
    }
    latencies = {"ttft": one.ttft_ms, "tpot": one.tpot_ms, "tbt": one.tbt_ms, "e2e": one.e2e_ms}
    for name, values in latencies.items():
        for level in ("p50", "p90", "p95", "p99", "max"):
            row[f"{name}_{level}_ms"] = None if values is None else getattr(values, level)
    return row
