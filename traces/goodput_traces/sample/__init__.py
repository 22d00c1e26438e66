"""The sample trace that comes with Goodput: synthetic, one minute, two classes."""

from __future__ import annotations

from pathlib import Path

__all__ = ["sample_path"]


def sample_path() -> Path:
    """Where the sample trace lies; `--trace sample` means this file."""
    return Path(__file__).parent / "sample.parquet"
