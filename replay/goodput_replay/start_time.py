"""The start of a run at a given instant, at which several machines start together.

Machines agree on the instant only as well as their wall clocks do. The kernel knows a bound on the
error of its clock if a time service disciplines it; the bound is recorded.
"""

from __future__ import annotations

import ctypes
import re
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final

from goodput_core.errors import UsageError
from goodput_core.units import NS_PER_S, NS_PER_US, format_duration

__all__ = ["format_instant", "parse_instant", "read_clock_error_ns", "require_ahead"]

_EPOCH: Final = re.compile(r"\d{1,10}(?:\.\d{1,9})?", re.ASCII)
_RFC_3339: Final = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
)
_MAX_AHEAD_NS: Final = 7 * 86_400 * NS_PER_S
_START: Final = datetime(1970, 1, 1, tzinfo=UTC)
# `struct timex` of Linux on 64-bit machines.
_TIMEX_BYTES: Final = 208
_MAX_ERROR_AT: Final = 24
_STATUS_AT: Final = 40
_UNSYNCHRONISED: Final = 0x40


def parse_instant(text: str) -> int:
    """Return an instant, nanoseconds since the Unix epoch.

    Args:
        text: RFC 3339 with a zone, such as `2026-03-04T05:06:07Z`, or seconds since the epoch.

    Raises:
        ValueError: the text is neither.
    """
    text = text.strip()
    if _EPOCH.fullmatch(text):
        return int(Decimal(text) * NS_PER_S)
    try:
        if not _RFC_3339.fullmatch(text):
            raise ValueError
        instant = datetime.fromisoformat(text.upper())
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not an instant; write for example 2026-03-04T05:06:07Z, or seconds since "
            "1970"
        ) from error
    return (instant - _START) // timedelta(microseconds=1) * NS_PER_US


def require_ahead(start_ns: int, now_ns: int, *, option: str = "--start-at") -> None:
    """Reject a start that has passed, or that is more than a week ahead.

    Args:
        start_ns: start of the run, nanoseconds since the Unix epoch.
        now_ns: current time on the wall clock.
        option: name of the option or field that gave the start, for errors.

    Raises:
        UsageError: the start cannot be kept.
    """
    ahead_ns = start_ns - now_ns
    if ahead_ns <= 0:
        raise UsageError(
            f"{option}: {format_instant(start_ns)} passed {format_duration(-ahead_ns)} ago; "
            "choose a later instant, at which all shards are ready"
        )
    if ahead_ns > _MAX_AHEAD_NS:
        raise UsageError(
            f"{option}: {format_instant(start_ns)} is more than a week ahead; check the date, or "
            "the unit of the seconds since 1970"
        )


def format_instant(at_ns: int) -> str:
    """Format nanoseconds since the Unix epoch as ISO 8601 in UTC, with microseconds."""
    instant = _START + timedelta(microseconds=at_ns // NS_PER_US)
    return instant.isoformat(timespec="microseconds")


def read_clock_error_ns() -> int | None:
    """Return the kernel's bound on the error of the wall clock; None if it does not know one."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    if ctypes.CDLL(None, use_errno=True).adjtimex(timex) < 0:
        return None
    status = ctypes.c_int.from_buffer(timex, _STATUS_AT).value
    if status & _UNSYNCHRONISED:
        return None
    return ctypes.c_long.from_buffer(timex, _MAX_ERROR_AT).value * NS_PER_US
