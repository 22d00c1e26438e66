"""The metrics pages to scrape during a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from goodput_core.units import NS_PER_S

__all__ = ["ScrapeSettings", "choose_interval"]

_SCRAPES: Final = 600
_MIN_INTERVAL_NS: Final = 2 * NS_PER_S
_MAX_INTERVAL_NS: Final = 60 * NS_PER_S
_CLOSED_LOOP_INTERVAL_NS: Final = 5 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeSettings:
    """Pages to scrape during a run.

    Args:
        urls: metrics pages that the user named.
        service_url: metrics page of the router that was started for this run; None without one.
        metrics: metrics to record besides the known ones.
        token: bearer token for `urls`; empty for none.
        ca_file: certificates to trust, PEM; None for those of the system.
        every_ns: interval between scrapes.
        zero_ns: time zero of the run on the monotonic clock of this machine.
        file: file for the values.
    """

    urls: tuple[str, ...]
    service_url: str | None
    metrics: tuple[str, ...]
    token: str
    ca_file: Path | None
    every_ns: int
    zero_ns: int
    file: Path


def choose_interval(duration_ns: int | None) -> int:
    """Return the interval between scrapes: 2 s to 60 s, so that a long run has 600 or more.

    Args:
        duration_ns: length of the run; None if it is not known in advance.
    """
    if duration_ns is None:
        return _CLOSED_LOOP_INTERVAL_NS
    return min(max(duration_ns // _SCRAPES, _MIN_INTERVAL_NS), _MAX_INTERVAL_NS)
