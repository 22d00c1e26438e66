"""The number of examples that hypothesis tries."""

from __future__ import annotations

import os

__all__ = ["examples"]

_SHARE_IN_CI = 3
_LEAST = 5


def examples(count: int) -> int:
    """Return `count`, or a third of it in CI, where the same examples are tried in every run."""
    if not os.environ.get("CI"):
        return count
    return max(min(count, _LEAST), count // _SHARE_IN_CI)
