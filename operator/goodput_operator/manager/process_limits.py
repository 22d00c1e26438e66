"""What a process that looks after a thousand services needs otherwise than Python starts it.

Both are settings of the whole process, so the operator makes them once, when it starts.
"""

from __future__ import annotations

import gc
from typing import Final

__all__ = ["collect_garbage_seldom"]

_YOUNG: Final = 100_000
"""Several turns' worth of objects. With Python's 700, what a turn holds while it waits for answers
counts as old before it is over, and the millions of objects that are cached are searched through
every few seconds."""


def collect_garbage_seldom() -> None:
    """Look for garbage among young objects only after many of them were made."""
    _, *older = gc.get_threshold()
    gc.set_threshold(_YOUNG, *older)
