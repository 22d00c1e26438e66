"""Changes of this machine's clocks during a run, which its records cannot show.

Records are stamped by the monotonic clock, which steps of the wall clock do not change. On Linux,
that clock stops while the machine is suspended, although the service continues: responses seem
faster than they were. The wall clock only matters for shards, which start at one instant of it: a
clock that is corrected during the run was wrong at the start.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Self

from goodput_core.replay_job import MAX_START_SKEW_NS
from goodput_core.units import NS_PER_MS, format_duration

__all__ = ["ClockReading", "describe_clock_changes"]

_MAX_SUSPENDED_NS: Final = 10 * NS_PER_MS
# Time services correct a clock slowly by up to 0.05 %.
_SLOW_DIVISOR: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """The clocks of this machine at one moment, in nanoseconds.

    Args:
        monotonic_ns: clock of the records.
        elapsed_ns: the same, with the time in which the machine was suspended.
        wall_ns: nanoseconds since the Unix epoch.
    """

    monotonic_ns: int
    elapsed_ns: int
    wall_ns: int

    @classmethod
    def now(cls) -> Self:
        """Read the clocks; without a clock that includes suspensions, none is found."""
        monotonic_ns = time.monotonic_ns()
        elapsed_ns = monotonic_ns
        if hasattr(time, "CLOCK_BOOTTIME"):
            elapsed_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return cls(monotonic_ns=monotonic_ns, elapsed_ns=elapsed_ns, wall_ns=time.time_ns())


def describe_clock_changes(start: ClockReading, end: ClockReading, *, is_shard: bool) -> str:
    """Return why the records of a run cannot be trusted, as a clause; empty if they can be.

    Args:
        start: the clocks at the start of the run.
        end: the clocks at its end.
        is_shard: True if the run started at an instant together with other machines.
    """
    elapsed_ns = end.elapsed_ns - start.elapsed_ns
    suspended_ns = elapsed_ns - (end.monotonic_ns - start.monotonic_ns)
    if suspended_ns > _MAX_SUSPENDED_NS:
        return f"because this machine was suspended for {format_duration(suspended_ns)}"
    stepped_ns = abs(end.wall_ns - start.wall_ns - elapsed_ns)
    if is_shard and stepped_ns > MAX_START_SKEW_NS + elapsed_ns // _SLOW_DIVISOR:
        return (
            f"because the clock of this machine was set by {format_duration(stepped_ns)}, so the "
            "shards did not start together"
        )
    return ""
