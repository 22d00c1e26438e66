"""How dates are written in an object: to the second, in UTC."""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["date_of"]


def date_of(unix_s: int) -> str:
    """A time in seconds since 1970 as the API server writes it."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
