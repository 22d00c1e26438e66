"""The sample trace shipped with Goodput: synthetic, one minute, two classes."""

from __future__ import annotations

from pathlib import Path

__all__ = ["sample_path"]


def sample_path() -> Path:
    """The path of the sample trace; `--trace sample` names this file."""
    return Path(__file__).parent / "sample.parquet"
