"""The sample trace shipped with Goodput: synthetic, one minute, two classes."""

from __future__ import annotations

from pathlib import Path

__all__ = ["sample_path"]


def sample_path() -> Path:
    """Return the path of the sample trace, which `--trace sample` names."""
    return Path(__file__).parent / "sample.parquet"
