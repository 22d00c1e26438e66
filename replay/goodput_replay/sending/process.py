"""What would disturb the send loop, kept away from it for the length of a run.

Measured at 2,000 sends a second, the garbage collector alone moved the p99 of lateness from
3 ms to 76 ms: it is frozen, and then run on the young objects now and then, so that cycles left
by failed requests do not grow a long run's memory.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.sending.sketch import DurationSketch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LoopWatch", "cpu_ns", "cpus", "open_file_limit", "quiet"]

_WATCH_NS: Final = 10 * NS_PER_MS
_COLLECT_EVERY: Final = 1000  # wake-ups of the watch: every ten seconds
_SWITCH_S: Final = 0.0005


@contextmanager
def quiet() -> Iterator[None]:
    """No automatic collection, and threads that hand the interpreter back soon."""
    enabled, interval = gc.isenabled(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
        if enabled:
            gc.enable()


class LoopWatch:
    """Measures how late the event loop wakes: whatever holds it, holds sends and stamps too."""

    def __init__(self) -> None:
        self.lateness = DurationSketch()

    async def run(self) -> None:
        """Watch until cancelled; collects young garbage now and then, which counts as well."""
        loop = asyncio.get_running_loop()
        wake_ups = 0
        while True:
            due_ns = time.monotonic_ns() + _WATCH_NS
            await asyncio.sleep(_WATCH_NS / NS_PER_S)
            self.lateness.add(time.monotonic_ns() - due_ns)
            wake_ups += 1
            if wake_ups % _COLLECT_EVERY == 0:
                loop.call_soon(gc.collect, 1)


def open_file_limit() -> int:
    """Raise the number of files this process may open to what the system allows; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # macOS refuses "unlimited"
            return soft
    return hard


def cpu_ns() -> int:
    """Processor time of this process so far, all threads."""
    return time.process_time_ns()


def cpus() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux knows it, macOS does not
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
