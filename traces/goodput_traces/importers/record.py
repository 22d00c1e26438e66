"""One record of a source file, with typed access to its values.

Importers read a column by name and kind. The error for an invalid value names the file, the line
and the column. Whole numbers are never converted to floats, because nanoseconds since the epoch
would lose their last digits.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from goodput_core.units import NS_PER_S
from goodput_traces.errors import RowError
from goodput_traces.format.schema import (
    FLOAT_BOUNDS,
    INT_BOUNDS,
    MAX_HASHES,
    TEXT_BOUNDS,
    ColumnBounds,
)

__all__ = ["Record"]

_WHOLE: Final = re.compile(r"-?\d{1,20}(\.0{1,9})?", re.ASCII)
_HASH_MASK: Final = 2**63 - 1
_CORRECT: Final = "correct or remove the record"
_TIME_S: Final = ColumnBounds(lowest=0, highest=10**9)
_DURATION_S: Final = ColumnBounds(lowest=0, highest=366 * 86_400)
_MISSING: Final = "the value is missing; every record needs one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record and its place in the source.

    Args:
        path: the file, as the user named it.
        number: number of the line or row, counted from 1.
        unit: `line` or `row`.
        values: values by column.
        prefix: precedes column names in errors, for records nested in others.
        namespace: label of the file if several are imported at once; empty otherwise.
    """

    path: Path
    number: int
    unit: str
    values: dict[str, Any]
    prefix: str = ""
    namespace: str = ""

    def reject(self, column: str, problem: str) -> NoReturn:
        """Raise a `RowError` for a column of this record."""
        raise RowError(self.path, self.number, self.prefix + column, problem, unit=self.unit)

    def nested(self, prefix: str, values: Any) -> Record:
        """Return a record nested in this one.

        Raises:
            RowError: the value is not an object.
        """
        if not isinstance(values, dict):
            self.reject(prefix, f"the value is not an object; {_CORRECT}")
        return replace(self, values=values, prefix=f"{self.prefix}{prefix}.")

    def optional_integer(self, column: str, kind: str) -> int | None:
        """Return a whole number, or None if absent.

        Args:
            column: the source's column.
            kind: the column of the trace format whose bounds apply.
        """
        value = self.values.get(column)
        if value is None:
            return None
        number = self._parse_whole(column, value)
        self.check_bounds(column, number, INT_BOUNDS[kind])
        return number

    def integer(self, column: str, kind: str) -> int:
        """Return a required whole number."""
        number = self.optional_integer(column, kind)
        if number is None:
            self.reject(column, _MISSING)
        return number

    def optional_number(self, column: str, kind: str | None = None) -> float | None:
        """Return a finite number, or None if absent; `kind` sets the bounds, if it is given."""
        value = self.values.get(column)
        if value is None:
            return None
        try:
            number = float(value) if not isinstance(value, bool | list | dict) else math.nan
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            self.reject(column, f"{_shorten(value)} is not a number; correct or remove the value")
        if kind is not None:
            self.check_bounds(column, number, FLOAT_BOUNDS[kind])
        return number

    def check_bounds(self, column: str, number: float, bounds: ColumnBounds) -> None:
        """Raise a `RowError` if a number is out of bounds."""
        if not bounds.allow(number):
            shown = number if isinstance(number, int) else f"{number:g}"
            self.reject(column, f"{shown} is out of bounds, it must be {bounds}; {_CORRECT}")

    def time_ns(self, column: str) -> int:
        """Return a required time in seconds since a session's start, as nanoseconds."""
        ns = self._seconds_ns(column, _TIME_S)
        if ns is None:
            self.reject(column, _MISSING)
        return ns

    def duration_ns(self, column: str) -> int | None:
        """Return a duration in seconds, as nanoseconds, or None if absent; at most 366 days."""
        return self._seconds_ns(column, _DURATION_S)

    def _seconds_ns(self, column: str, bounds: ColumnBounds) -> int | None:
        number = self.optional_number(column)
        if number is None:
            return None
        self.check_bounds(column, number, bounds)
        return round(number * NS_PER_S)

    def optional_text(self, column: str, kind: str) -> str | None:
        """Return text, or None if absent; numbers become text, because ids often are numbers."""
        value = self.values.get(column)
        if value is None:
            return None
        if isinstance(value, bool | float | list | dict | bytes):
            self.reject(column, f"expected text, not {_shorten(value)}")
        text = str(value)
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            self.reject(column, "half a surrogate pair is not valid Unicode; correct the text")
        if size > TEXT_BOUNDS[kind]:
            self.reject(column, f"the text is longer than {TEXT_BOUNDS[kind]:,} bytes")
        return text

    def hashes(self, column: str) -> tuple[int, ...]:
        """Return block hashes, given as numbers or text, as 63-bit numbers; empty if absent."""
        value = self.values.get(column)
        if value is None:
            return ()
        if isinstance(value, str):
            value = value.strip("[] ").replace(",", " ").split()
        if not isinstance(value, list):
            self.reject(column, f"expected a list of hashes, not {_shorten(value)}")
        if len(value) > MAX_HASHES:
            self.reject(column, f"the list is longer than {MAX_HASHES:,}")
        # A request may have a thousand hashes: no loop in Python.
        are_whole = {*map(type, value)} <= {int}
        if are_whole and min(value, default=0) >= 0 and max(value, default=0) <= _HASH_MASK:
            return tuple(value)
        # Some exporters write unsigned 64-bit numbers. The format has signed numbers, and AIPerf
        # rejects negative ones.
        return tuple(self._parse_whole(column, block) & _HASH_MASK for block in value)

    def _parse_whole(self, column: str, value: Any) -> int:
        if type(value) is int:
            return value
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return int(value)
        if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
            return int(value.strip().partition(".")[0])
        return self.reject(column, f"{_shorten(value)} is not a whole number; correct it")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
