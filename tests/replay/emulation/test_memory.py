"""The memory of a fleet does not grow with the length of the trace."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

from tests.builders.fleets import make_fleet, plan

from goodput_replay.emulation.emulate import emulate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_replay.plan import PlannedRequest


def test_a_trace_eight_times_as_long_needs_no_more_memory() -> None:
    settings = make_fleet(timeout_s=2, profile={"kv_blocks": 200})

    def requests(count: int) -> Iterator[PlannedRequest]:
        for number in range(count):
            yield plan(f"r{number}", number * 20, 40, 1 + number % 60)

    def peak_bytes(count: int) -> int:
        tracemalloc.start()
        outcome = emulate(requests(count), settings, lambda *_: None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert outcome.requests == count
        return peak

    peak_bytes(100)  # one-off allocations, such as caches of imports
    # At least 8,000 steps, so that the list of their times is trimmed.
    once, eight_times = peak_bytes(400), peak_bytes(3200)
    # Peaks of equal runs differ by 65,000.
    assert eight_times < once + 100_000, "eight bytes for each further step alone would be 448,000"
