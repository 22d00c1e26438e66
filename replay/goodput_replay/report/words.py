"""Numbers as people read them; the template calls these and formats nothing by itself."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["FILTERS", "count", "duration_s", "milliseconds", "percent", "rate"]


def count(value: int) -> str:
    """`12,031`."""
    return f"{value:,}"


def percent(share: float | None) -> str:
    """Two decimals, cut off, so that a missed objective never looks met; `–` for None."""
    if share is None:
        return "–"
    # A share arrives with six decimals; this undoes the binary fraction below them.
    return f"{math.floor(round(share * 1_000_000) / 100) / 100:.2f}%"


def milliseconds(value: float | None) -> str:
    """Three significant digits, and seconds from ten of them on; `–` for None."""
    if value is None:
        return "–"
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    if value >= 100:
        return f"{value:,.0f} ms"
    return f"{value:.3g} ms" if value else "0 ms"


def rate(per_s: float) -> str:
    """`8.48/s`."""
    return f"{per_s:,.1f}/s" if per_s >= 100 else f"{per_s:.3g}/s"


def duration_s(seconds: float) -> str:
    """`45 s`, `5 min`, `1 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


FILTERS: Final = {
    "count": count,
    "duration_s": duration_s,
    "ms": milliseconds,
    "percent": percent,
    "rate": rate,
}
