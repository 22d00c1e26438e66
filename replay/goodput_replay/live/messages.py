"""Messages from the sending process to the observing one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from goodput_replay.frames import MessageCodec
from goodput_replay.live.tally import LiveWindow, RunProgress
from goodput_replay.runs.summary_builder import RunInfo
from goodput_replay.scraping.settings import ScrapeSettings

__all__ = ["OBSERVED", "Begin", "End", "StopScraping"]


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


OBSERVED: Final = MessageCodec(Begin, RunProgress, StopScraping, End)
"""Codec of the pipe to the observing process."""
