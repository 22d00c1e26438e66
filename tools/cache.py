"""The folder of downloads and builds that all checkouts share."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return the folder of downloads and builds; `GOODPUT_CACHE` overrides it."""
    return Path(os.environ.get("GOODPUT_CACHE") or Path.home() / ".cache" / "goodput")
