"""Arrival times of a source: ISO 8601, the common log format, and numbers since an epoch.

A time without a zone is read as UTC, which shifts all arrivals alike. All digits of a time are
kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from goodput_core.units import NS_PER_MS, NS_PER_S, NS_PER_US
from goodput_traces.format.schema import COLUMN_NS, INT_BOUNDS, Clock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_traces.importers.record import Record

__all__ = ["UNITS_NS", "ArrivalReader"]

UNITS_NS: Final[Mapping[str, int]] = {"s": NS_PER_S, "ms": NS_PER_MS, "us": NS_PER_US, "ns": 1}
"""Units of times and durations in a source, in nanoseconds."""

_UNIT_NAMES: Final = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}
_ISO: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2})[ Tt](\d{2}:\d{2}:\d{2})(?:[.,](\d{1,9}))?"
    r"\s*(Z|z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)?",
    re.ASCII,
)
_LOG: Final = re.compile(
    r"(\d{2})/([A-Z][a-z]{2})/(\d{4}):(\d{2}:\d{2}:\d{2})(?:[.,](\d{1,9}))?\s*([+-]\d{4})?",
    re.ASCII,
)
_MONTHS: Final = (
    "Jan",
    "Feb",
    "Mar",
    "Apr",
    "May",
    "Jun",
    "Jul",
    "Aug",
    "Sep",
    "Oct",
    "Nov",
    "Dec",
)
_NUMBER: Final = re.compile(r"-?\d{1,20}(\.\d{1,12})?(?:[eE][+-]?\d{1,2})?", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# A number of a unit is a time since 1970 if it is after 1973 and before 5138 in that unit. The
# ranges of the four units touch each other and do not overlap.
_FIRST_EPOCH_S: Final = 10**8
_FIRST_OF_UNIT: Final = {
    unit: _FIRST_EPOCH_S * (NS_PER_S // UNITS_NS[unit]) for unit in ("ns", "us", "ms", "s")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instant:
    """A parsed time.

    Args:
        ns: nanoseconds since the Unix epoch.
        digits: number of fractional digits of the second.
        has_zone: True if the time names its zone; otherwise, it was read as UTC.
    """

    ns: int
    digits: int
    has_zone: bool


def _parse_instant(value: Any) -> _Instant | None:
    """Parse a time of day with a date, or return None if the value has no such form.

    Args:
        value: a `datetime`, ISO 8601 text, or text in the common log format, such as
            `16/Nov/2023:18:15:46 +0000`.

    Raises:
        ValueError: the value has the form of a time, but such a time does not exist.
    """
    if isinstance(value, datetime):  # a Parquet column of timestamps
        has_zone = value.tzinfo is not None
        moment = value if has_zone else value.replace(tzinfo=UTC)
        return _Instant(ns=(moment - _EPOCH) // _MICROSECOND * 1000, digits=6, has_zone=has_zone)
    if not isinstance(value, str):
        return None
    text = value.strip()
    if match := _ISO.fullmatch(text):
        day, clock, fraction, zone = match.groups(default="")
    elif match := _LOG.fullmatch(text):
        number, month, year, clock, fraction, zone = match.groups(default="")
        if month not in _MONTHS:
            return None
        day = f"{year}-{_MONTHS.index(month) + 1:02d}-{number}"
    else:
        return None
    utc = zone in {"", "Z", "z", "UTC", "GMT"}
    moment = datetime.fromisoformat(f"{day}T{clock}{'Z' if utc else zone}")
    # A datetime has microseconds, so the digits of the fraction are parsed separately.
    seconds = (moment - _EPOCH) // timedelta(seconds=1)
    return _Instant(
        ns=seconds * NS_PER_S + int(fraction.ljust(9, "0")),
        digits=len(fraction),
        has_zone=bool(zone),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """Form of a time; times of two forms in one column cannot be compared.

    Args:
        has_zone: True if the time names its zone; None for a number.
        unit: unit of a number, a key of `UNITS_NS`; None for other times.
        since_epoch: False for a number that is too small for a time since 1970.
    """

    has_zone: bool | None = None
    unit: str | None = None
    since_epoch: bool = True

    def __str__(self) -> str:
        if self.unit is None:
            return "times with a zone" if self.has_zone else "times without a zone"
        origin = "since 1970" if self.since_epoch else "since the start of the trace"
        return f"{_UNIT_NAMES[self.unit]} {origin}"


class ArrivalReader:
    """Reader of one column of times; all must have the form of the first one.

    Args:
        unit: a key of `UNITS_NS` for a column with numbers; None to derive the unit of each time
            since 1970 from its size.

    Attributes:
        resolution_ns: tick of the times read so far.
    """

    def __init__(self, unit: str | None = None) -> None:
        self.resolution_ns = NS_PER_S
        self._unit = unit
        self._form: _Form | None = None

    @property
    def clock(self) -> Clock:
        """Origin of the times, from the first one."""
        relative = self._form is not None and not self._form.since_epoch
        return Clock.TRACE_RELATIVE if relative else Clock.ABSOLUTE

    def describe(self) -> str:
        """Return the form of the times, and the assumption about it; empty before the first."""
        form = self._form
        if form is None:
            return ""
        if form.unit is None:
            return str(form) if form.has_zone else f"{form}, read as UTC"
        return str(form) if self._unit else f"{form}, guessed from their size"

    def read_ns(self, record: Record, column: str) -> int:
        """Return a required time in nanoseconds.

        Raises:
            RowError: the value is missing, is not a time, or has another form than those before it.
        """
        value = record.values.get(column)
        if value is None:
            record.reject(column, "the value is missing; every request needs a time")
        try:
            instant = _parse_instant(value)
        except ValueError as error:
            record.reject(column, f"{_shorten(value)} is not a time ({error}); correct it")
        if instant is None:
            form, ns, tick_ns = self._parse_number(record, column, value)
        else:
            form, ns = _Form(has_zone=instant.has_zone), instant.ns
            tick_ns = 10 ** (9 - instant.digits)
        if self._form is None:
            self._form = form
        if form != self._form:
            record.reject(
                column,
                f"{_shorten(value)} belongs to {form}, but the rows before it have {self._form}; "
                "write all times in one form",
            )
        self.resolution_ns = min(self.resolution_ns, tick_ns)
        return _check_arrival(record, column, ns, form)

    def _parse_number(self, record: Record, column: str, value: Any) -> tuple[_Form, int, int]:
        """Return the form of a number, its nanoseconds, and its tick."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # `repr` gives the shortest digits of a float, which are those of the source.
        text = repr(value) if is_number else str(value).strip()
        if not _NUMBER.fullmatch(text):
            record.reject(
                column,
                f"{_shorten(value)} is not a time; write it like 2023-11-16T18:15:46.680Z, or as a "
                "number since 1970",
            )
        number = Decimal(text)
        unit = self._unit or _find_unit(number)
        if unit is None:
            record.reject(
                column,
                f"{text} is too small for a time since 1970; if times count from the start of the "
                f"trace, name their unit, for example --map arrival={column}:s",
            )
        unit_ns = UNITS_NS[unit]
        exponent = number.as_tuple().exponent
        digits = max(0, -exponent) if isinstance(exponent, int) else 0
        since_epoch = abs(number) * unit_ns >= _FIRST_EPOCH_S * NS_PER_S
        form = _Form(unit=unit, since_epoch=since_epoch)
        return form, int(number * unit_ns), max(1, unit_ns // 10**digits)


def _check_arrival(record: Record, column: str, arrival_ns: int, form: _Form) -> int:
    """Return an arrival that the trace format can hold.

    Raises:
        RowError: the time is before 1970 or the start of the trace, or after 2262.
    """
    if not INT_BOUNDS[COLUMN_NS].allow(arrival_ns):
        origin = "1970" if form.since_epoch else "the start of the trace"
        side = f"before {origin}" if arrival_ns < 0 else "after 2262"
        record.reject(column, f"{_shorten(record.values[column])} is {side}; correct it")
    return arrival_ns


def _find_unit(number: Decimal) -> str | None:
    """Return the unit in which a number is a time between 1973 and 5138; None if it is smaller."""
    size = abs(number)
    for unit, first in _FIRST_OF_UNIT.items():
        if size >= first:
            return unit
    return None


def _shorten(value: Any) -> str:
    return repr(str(value)[:60])
