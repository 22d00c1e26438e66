"""The step log: shape and device time of each step, to fit a device profile.

The log is a Parquet file of integers. pyarrow is not a dependency of the engine: it is imported
only to write or read a log. If pyarrow is missing, the error names the extra to install.
"""

from __future__ import annotations

import logging
from array import array
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import InputError, UsageError, install_hint
from goodput_core.files import partial_path, publish
from goodput_core.steptime import StepShape
from goodput_core.steptime.fitting import StepSample

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from goodput_engine.scheduler.plan import StepOutcome

__all__ = ["MAX_STEPS", "STEP_COLUMNS", "StepLog", "read_host_gaps", "read_step_log"]

_log = logging.getLogger(__name__)

_SHAPE: Final = StepShape._fields
_shape_of: Final = attrgetter(*_SHAPE)
STEP_COLUMNS: Final = ("at_ns", "step_ns", *_SHAPE)
"""The columns, all int64: end of the step (monotonic clock), its device time, and its shape."""

MAX_STEPS: Final = 1_000_000
"""Maximum number of steps in a log. They cover hours of serving and take at most 72 MB."""

_FLUSH_STEPS: Final = 1024


class StepLog:
    """Writes steps to a hidden file, and renames the file when the log is closed or full.

    Rows are collected in memory and written in batches of 1,024. If a write fails, the
    file is deleted and the engine continues. A log without steps leaves no file.

    Args:
        path: the final name of the file, which must not exist.
        max_steps: maximum number of steps.

    Raises:
        InputError: the file exists, or its folder cannot be written.
        UsageError: pyarrow is not installed.
    """

    def __init__(self, path: Path, *, max_steps: int = MAX_STEPS) -> None:
        if path.exists():
            raise InputError(f"--step-log: {path} exists; name another file")
        self._path = path
        self._partial = partial_path(path, private=True)
        self._rows = array("q")
        self._remaining = max_steps
        self._unwritten = 0
        self._arrow, parquet = _import_arrow("writing")
        int64 = self._arrow.int64()
        try:
            self._writer: Any = parquet.ParquetWriter(
                self._partial,
                self._arrow.schema([(name, int64) for name in STEP_COLUMNS]),
                use_dictionary=False,  # values seldom repeat
            )
        except OSError as error:
            raise InputError(
                f"--step-log: {path} cannot be written: {error.strerror or error}"
            ) from error
        self._empty = True

    def add(self, outcome: StepOutcome) -> None:
        """Add a step. Skip a step that copied blocks: its time may be that of the copies."""
        if not self._remaining or outcome.plan.copies:
            return
        result = outcome.result
        self._rows.extend((result.at_ns, result.step_ns, *_shape_of(outcome.plan.shape)))
        self._remaining -= 1
        self._unwritten += 1
        if not self._remaining:
            self.close()
            _log.info("step log full", extra={"path": str(self._path)})
        elif self._unwritten == _FLUSH_STEPS:
            self._write()

    def close(self) -> None:
        """Write the remaining steps and rename the file to its final name; ignore later steps."""
        self._remaining = 0
        self._write()
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
            if self._empty:
                self._partial.unlink()
            else:
                publish(self._path, private=True)
        except OSError as error:
            self._abort(error)

    def _write(self) -> None:
        count, rows = self._unwritten, self._rows
        self._unwritten, self._rows = 0, array("q")
        if self._writer is None or not count:
            return
        self._empty = False
        arrow, width = self._arrow, len(STEP_COLUMNS)
        columns = [
            arrow.Array.from_buffers(
                arrow.int64(), count, [None, arrow.py_buffer(rows[column::width])]
            )
            for column in range(width)
        ]
        try:
            self._writer.write_batch(arrow.record_batch(columns, names=list(STEP_COLUMNS)))
        except OSError as error:
            self._abort(error)

    def _abort(self, error: OSError) -> None:
        self._writer = None
        self._remaining = 0
        self._partial.unlink(missing_ok=True)
        _log.warning("step log ended", extra={"path": str(self._path), "error": str(error)})


def read_step_log(path: Path) -> list[StepSample]:
    """Return the steps of a log, in order.

    Raises:
        InputError: the file cannot be read, or is not a step log.
        UsageError: pyarrow is not installed.
    """
    arrow, parquet = _import_arrow("reading")
    try:
        with parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            for name in STEP_COLUMNS[1:]:
                if name not in schema.names or schema.field(name).type != arrow.int64():
                    raise InputError(
                        f"{path}: is not a step log: it has no column {name} of type int64"
                    )
            if not 1 <= rows <= MAX_STEPS:
                raise InputError(f"{path}: has {rows:,} steps; a fit takes 1 to {MAX_STEPS:,}")
            table = file.read(columns=list(STEP_COLUMNS[1:]))
    except (OSError, arrow.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"{path}: cannot be read as Parquet: {reason}") from error
    columns = table.to_pydict()
    for name, values in columns.items():
        minimum = 1 if name == "step_ns" else 0
        if any(value is None or value < minimum for value in values):
            raise InputError(f"{path}: {name}: every step must have a value of at least {minimum}")
    shapes = zip(*(columns[name] for name in _SHAPE), strict=True)
    return [
        StepSample(StepShape(*shape), step_ns)
        for step_ns, shape in zip(columns["step_ns"], shapes, strict=True)
    ]


def read_host_gaps(path: Path) -> list[tuple[int, int]]:
    """Return the pauses of the device before steps that decode, each with the step's requests.

    A request that decodes was in the step before, so the engine was not idle: the pause is the
    host's time for the result of that step and the plan of this one. The list is empty if the log
    does not have the ends of the steps.

    Args:
        path: a log that `read_step_log` accepts.
    """
    arrow, parquet = _import_arrow("reading")
    names = ("at_ns", "step_ns", "num_requests", "num_decodes")
    with parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        if "at_ns" not in schema.names or schema.field("at_ns").type != arrow.int64():
            return []
        columns = file.read(columns=list(names)).to_pydict()
    rows = zip(*(columns[name] for name in names), strict=True)
    return [
        (requests, at_ns - step_ns - previous_ns)
        for (previous_ns, *_), (at_ns, step_ns, requests, decodes) in pairwise(rows)
        if previous_ns is not None and at_ns is not None
        if decodes and at_ns - step_ns > previous_ns
    ]


def _import_arrow(action: str) -> tuple[ModuleType, ModuleType]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{action} a step log needs the package {error.name!r}; {install_hint('replay')}"
        ) from error
