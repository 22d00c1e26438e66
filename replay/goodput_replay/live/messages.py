"""Messages from the sending process to the observing one, besides records and progress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from goodput_replay.live.tally import LiveWindow
from goodput_replay.runs.summary_builder import RunInfo
from goodput_replay.scraping.settings import ScrapeSettings

__all__ = ["Begin", "End", "StopScraping"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A run begins.

    Args:
        window: judged window.
        info: information about the run, known before it starts.
        scrape: metrics pages to scrape; None for none.
    """

    window: LiveWindow
    info: RunInfo
    scrape: ScrapeSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopScraping:
    """All requests have ended: write the server's metrics, and report that on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A run was judged; its folder is complete."""

    folder: Path
