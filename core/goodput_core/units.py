"""Units: integer nanoseconds in the code, and durations as users read and write them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

__all__ = [
    "BYTES_PER_GIB",
    "NS_PER_MS",
    "NS_PER_S",
    "NS_PER_US",
    "format_duration",
    "format_estimate",
    "format_number",
    "ms_to_ns",
    "parse_duration",
    "parse_size",
    "parse_some_duration",
]

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
BYTES_PER_GIB: Final = 1 << 30

_MINUTE_NS: Final = 60 * NS_PER_S
_UNITS: Final = {
    "ns": 1, "us": NS_PER_US, "ms": NS_PER_MS, "s": NS_PER_S,
    "m": _MINUTE_NS, "h": 60 * _MINUTE_NS, "d": 1440 * _MINUTE_NS,
}  # fmt: skip
_PART: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|ms|s|m|h|d)")
_MAX_DAYS: Final = 3650
_SIZE: Final = re.compile(r"(\d{1,6})(MiB|GiB|TiB)", re.ASCII)
_SIZE_SHIFTS: Final = {"MiB": 20, "GiB": 30, "TiB": 40}


def parse_duration(text: str) -> int:
    """Return the nanoseconds of a duration such as `250ms`, `90s`, `10m`, `1h30m` or `1.5s`.

    Raises:
        ValueError: the text has no unit or an unknown one, is negative, or exceeds ten years.
    """
    stripped = text.strip()
    total, at = Decimal(0), 0
    for match in _PART.finditer(stripped):
        if match.start() != at:
            break
        total += Decimal(match[1]) * _UNITS[match[2]]
        at = match.end()
    if re.match(r"-\.?\d", stripped):
        raise ValueError(f"{text!r} is negative; a duration is at least 0s")
    if at == 0 or at != len(stripped):
        raise ValueError(f"{text!r} is not a duration; write for example 250ms, 90s, 10m or 1h30m")
    if total > _MAX_DAYS * _UNITS["d"]:
        raise ValueError(f"{text!r} is longer than ten years")
    return int(total)


def parse_some_duration(text: str) -> int:
    """Return the nanoseconds of a duration that must not be zero, such as a time-out.

    Raises:
        ValueError: the text is not a duration, or is zero.
    """
    duration_ns = parse_duration(text)
    if duration_ns == 0:
        raise ValueError(f"{text!r} is zero; give at least 1ms")
    return duration_ns


def parse_size(text: str) -> int:
    """Parse a number of bytes with a binary unit: `512MiB`, `4GiB`.

    Raises:
        ValueError: the text has no unit or an unknown one.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 4GiB")
    return int(match[1]) << _SIZE_SHIFTS[match[2]]


def format_duration(ns: int) -> str:
    """Format a duration with three significant digits: `0.42 ms`, `12.3 s`, `5 min 00 s`."""
    if ns < 0:
        return f"-{format_duration(-ns)}"
    if ns < NS_PER_MS:
        return f"{ns / NS_PER_US:.3g} µs"
    if ns < NS_PER_S:
        return f"{ns / NS_PER_MS:.3g} ms"
    if ns < 100 * NS_PER_S:
        return f"{ns / NS_PER_S:.3g} s"
    minutes, seconds = divmod(round(ns / NS_PER_S), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_estimate(ns: int) -> str:
    """Format an estimated duration, rounded up to one or two digits: `40 s`, `9 min`, `2.5 h`."""
    seconds = -(-ns // NS_PER_S)
    if seconds <= 90:
        return f"{-(-seconds // 10) * 10} s"
    if seconds <= 90 * 60:
        return f"{-(-seconds // 60)} min"
    return f"{-(-seconds // 1800) / 2:g} h"


def format_number(value: float) -> str:
    """Format a number with three significant digits or all before the point: `0.42`, `1234`."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ms_to_ns(ms: float) -> int:
    """Return milliseconds in nanoseconds, rounded to the nearest."""
    return round(ms * NS_PER_MS)
