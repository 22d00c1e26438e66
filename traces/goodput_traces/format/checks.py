"""Rules for the rows of a trace; reader and writer share them.

The rules are checked for complete batches, so that a valid trace costs little. The first invalid
row of a batch is located only after a rule failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow.compute as pc

from goodput_core.units import NS_PER_S
from goodput_traces.errors import RowError
from goodput_traces.format.schema import (
    COLUMN_MS,
    COLUMN_NS,
    FLOAT_BOUNDS,
    INT_BOUNDS,
    MAX_HASHES,
    REQUIRED_COLUMNS,
    TEXT_BOUNDS,
    Clock,
    ColumnBounds,
)

__all__ = ["OrderCheck", "check_columns"]


def check_columns(columns: Mapping[str, Any], *, path: Path | str, first_row: int) -> None:
    """Check one batch of columns.

    Args:
        columns: Arrow arrays by column name, of the types of `TRACE_SCHEMA`; absent columns are
            not checked.
        path: the file, for errors.
        first_row: the number of the batch's first row, from 1.

    Raises:
        RowError: the first value of a column that breaks a rule.
    """
    batch = _Batch(columns=columns, path=path, first_row=first_row)
    for name in (*REQUIRED_COLUMNS, COLUMN_NS, COLUMN_MS):
        if name in columns and columns[name].null_count:
            batch.reject(
                pc.is_null(columns[name]), name, "the value is missing; every row needs one"
            )
    for name, bounds in (*INT_BOUNDS.items(), *FLOAT_BOUNDS.items()):
        if name in columns:
            _check_bounds(batch, name, bounds)
    for name, longest in TEXT_BOUNDS.items():
        if name in columns:
            _check_text(batch, name, longest)
    if "request_id" in columns and pc.any(pc.equal(columns["request_id"], "")).as_py():
        batch.reject(
            pc.equal(columns["request_id"], ""),
            "request_id",
            "the id is empty; give every row its own",
        )
    if "total_hashes" in columns:
        _check_hashes(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    columns: Mapping[str, Any]
    path: Path | str
    first_row: int

    def reject(self, mask: Any, name: str, problem: str) -> NoReturn:
        """Raise for the first row of a mask; `{value}` in the problem becomes the row's value."""
        at = int(pc.index(pc.fill_null(mask, False), True).as_py())
        if "{value}" in problem:
            problem = problem.replace("{value}", str(self.columns[name][at].as_py()))
        self.reject_row(at, name, problem)

    def reject_row(self, at: int, name: str, problem: str) -> NoReturn:
        """Raise for a row of the batch, counted from 0."""
        raise RowError(self.path, self.first_row + at, name, problem)


def _check_bounds(batch: _Batch, name: str, bounds: ColumnBounds) -> None:
    column = batch.columns[name]
    if name in FLOAT_BOUNDS and pc.any(pc.is_nan(column)).as_py():
        batch.reject(
            pc.is_nan(column), name, "NaN is not a number of milliseconds; leave the value empty"
        )
    extremes = pc.min_max(column)
    low, high = extremes["min"].as_py(), extremes["max"].as_py()
    if low is None or (bounds.allow(low) and bounds.allow(high)):
        return
    below = pc.less_equal if bounds.above else pc.less
    batch.reject(
        pc.or_(below(column, bounds.lowest), pc.greater(column, bounds.highest)),
        name,
        f"{{value}} is out of bounds, it must be {bounds}; correct or remove the row",
    )


def _check_text(batch: _Batch, name: str, longest: int) -> None:
    column = batch.columns[name]
    if column.nbytes <= longest:  # then no value can be too long
        return
    lengths = pc.binary_length(column)
    if (pc.max(lengths).as_py() or 0) > longest:
        batch.reject(
            pc.greater(lengths, longest),
            name,
            f"the text is longer than {longest:,} bytes; shorten it",
        )


def _check_hashes(batch: _Batch) -> None:
    hashes = batch.columns["total_hashes"]
    lengths = pc.fill_null(pc.list_value_length(hashes), 0)
    if (pc.max(lengths).as_py() or 0) > MAX_HASHES:
        batch.reject(
            pc.greater(lengths, MAX_HASHES),
            "total_hashes",
            f"the list is longer than {MAX_HASHES:,}; shorten it",
        )
    if pc.list_flatten(hashes).null_count:
        at = next(at for at, row in enumerate(hashes.to_pylist()) if row and None in row)
        batch.reject_row(at, "total_hashes", "a hash is null; every block needs one")
    without_size = pc.greater(lengths, 0)
    if "block_size" in batch.columns:
        without_size = pc.and_(without_size, pc.is_null(batch.columns["block_size"]))
    if pc.any(without_size).as_py():
        batch.reject(
            without_size,
            "block_size",
            "the value is missing although the row has total_hashes; give the tokens per hash",
        )


class OrderCheck:
    """Check that rows are sorted by arrival, or by session and arrival for session clocks.

    Only the last row is stored, so memory stays constant.

    Args:
        clock: origin of the arrivals.
        path: the file, for errors.
        remedy: the way to sort the file, for errors.
        column: the column of the arrivals, for errors.
    """

    def __init__(
        self, clock: Clock, path: Path | str, remedy: str, *, column: str = COLUMN_NS
    ) -> None:
        self._by_session = clock is Clock.SESSION_RELATIVE
        self._path = path
        self._remedy = remedy
        self._column = column
        self._last_ns = -1
        self._last_session = ""

    def check(
        self, arrivals_ns: np.ndarray[Any, np.dtype[np.int64]], sessions: Any, first_row: int
    ) -> None:
        """Check one batch.

        Args:
            arrivals_ns: arrivals of the batch, nanoseconds, `[rows]`.
            sessions: session ids of the batch; used only for a session-relative clock.
            first_row: the number of the batch's first row, from 1.

        Raises:
            RowError: a row belongs before the previous row.
        """
        if len(arrivals_ns) == 0:
            return
        if self._by_session:
            self._check_sessions(arrivals_ns.tolist(), sessions, first_row)
            return
        previous_ns = np.concatenate(([self._last_ns], arrivals_ns[:-1]))
        misplaced = np.flatnonzero(arrivals_ns < previous_ns)
        if len(misplaced):
            at = int(misplaced[0])
            early_s = (previous_ns[at] - arrivals_ns[at]) / NS_PER_S
            self._reject(
                first_row + at,
                f"this row arrives {early_s:.9g} s before the row above it",
            )
        self._last_ns = int(arrivals_ns[-1])

    def _check_sessions(self, arrivals_ns: list[int], sessions: Any, first_row: int) -> None:
        rows = zip(arrivals_ns, sessions, strict=True)
        for row, (arrival_ns, session) in enumerate(rows, first_row):
            if session is None:
                raise RowError(
                    self._path,
                    row,
                    "provided_session_id",
                    "the value is missing although the clock is session-relative; name the session",
                )
            if (session, arrival_ns) < (self._last_session, self._last_ns):
                self._reject(
                    row,
                    "this row belongs before the row above it (rows are sorted by session, then by "
                    "arrival)",
                )
            self._last_session, self._last_ns = session, arrival_ns

    def _reject(self, row: int, problem: str) -> NoReturn:
        raise RowError(self._path, row, self._column, f"{problem}; {self._remedy}")
