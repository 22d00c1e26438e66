"""Making a run's folder. Signatures first; the bodies follow within the hour."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from goodput_core.record import RequestRecord
    from goodput_replay.run.facts import Promise, RunFacts
    from goodput_replay.run.summary import Summary

__all__ = ["RunWriter", "default_folder"]


def default_folder(started: datetime, trace: str, target: str) -> Path:
    """`runs/<UTC time>-<trace>-<service or host>`."""
    raise NotImplementedError


class RunWriter:
    """Owns a run's folder while the run lasts; a context manager."""

    @classmethod
    def create(
        cls, path: Path, *, promise: Promise, force: bool = False, keep_gaps: bool = True
    ) -> RunWriter:
        """Make the folder; InputError when it holds something and `force` is not set."""
        raise NotImplementedError

    def append(self, record: RequestRecord, *, warmup: bool = False) -> None:
        """Keep one request; InternalError once the disk is full."""
        raise NotImplementedError

    def finish(self, facts: RunFacts) -> Summary:
        """Judge, write summary.json and report.html; InternalError when the disk was full."""
        raise NotImplementedError

    @property
    def path(self) -> Path:
        """The folder."""
        raise NotImplementedError
