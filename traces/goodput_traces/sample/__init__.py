"""The sample trace shipped with Goodput: synthetic, one minute, two classes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["SAMPLE", "sample_path", "trace_path"]

SAMPLE: Final = "sample"
"""Name of the sample trace on command lines."""


def sample_path() -> Path:
    """Return the path of the sample trace."""
    return Path(__file__).parent / "sample.parquet"


def trace_path(name: str) -> Path:
    """Return the path of a trace on a command line: a file, or `sample`."""
    return sample_path() if name == SAMPLE else Path(name)
