"""A clock that jumps never leads to a PASS that the records cannot carry."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import DEVNULL
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.traces import steady_rows
from tests.replay.sending.stand_ins import DONE, StandIn, finish, running, tokens, usage

from goodput_core.errors import UsageError
from goodput_core.slo.verdict import VerdictKind
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.clock_changes import ClockReading, describe_clock_changes
from goodput_replay.runs.summary import read_summary
from goodput_replay.sending.process import wait_for_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.replay.sending.builders import WriteTrace

HOUR_NS = 3600 * NS_PER_S
START = ClockReading(monotonic_ns=5 * NS_PER_S, elapsed_ns=7 * NS_PER_S, wall_ns=HOUR_NS)


def later(after_ns: int, *, suspended_ns: int = 0, stepped_ns: int = 0) -> ClockReading:
    return ClockReading(
        monotonic_ns=START.monotonic_ns + after_ns,
        elapsed_ns=START.elapsed_ns + after_ns + suspended_ns,
        wall_ns=START.wall_ns + after_ns + suspended_ns + stepped_ns,
    )


SUSPENDED = "because this machine was suspended for 3 s"
SET = "because the clock of this machine was set by 10 s, so the shards did not start together"
CASES = {
    "nothing": ({}, False, ""),
    "a suspended machine": ({"suspended_ns": 3 * NS_PER_S}, False, SUSPENDED),
    "a suspended machine of a shard": ({"suspended_ns": 3 * NS_PER_S}, True, SUSPENDED),
    "clocks that were not read at once": ({"suspended_ns": NS_PER_MS}, False, ""),
    "a step forwards": ({"stepped_ns": 10 * NS_PER_S}, False, ""),
    "a step backwards": ({"stepped_ns": -10 * NS_PER_S}, False, ""),
    "a step forwards of a shard": ({"stepped_ns": 10 * NS_PER_S}, True, SET),
    "a step backwards of a shard": ({"stepped_ns": -10 * NS_PER_S}, True, SET),
    "a slow correction": ({"stepped_ns": 2 * NS_PER_S}, True, ""),
}


@pytest.mark.parametrize(("changes", "is_shard", "problem"), CASES.values(), ids=CASES)
def test_only_changes_that_matter_are_named(
    changes: dict[str, int], is_shard: bool, problem: str
) -> None:
    assert describe_clock_changes(START, later(HOUR_NS, **changes), is_shard=is_shard) == problem


@given(st.integers(0, 10 * HOUR_NS), st.integers(-HOUR_NS, HOUR_NS))
def test_the_wall_clock_does_not_matter_for_one_machine(after_ns: int, stepped_ns: int) -> None:
    end = later(after_ns, stepped_ns=stepped_ns)
    assert describe_clock_changes(START, end, is_shard=False) == ""


class _Wall:
    """A wall clock, and sleep that passes its time and then sets it by the next step."""

    def __init__(self, steps: Iterator[int]) -> None:
        self.now_ns = 1_000 * NS_PER_S
        self.slept_s = 0.0
        self._steps = steps

    def time_ns(self) -> int:
        return self.now_ns

    async def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.now_ns += round(seconds * NS_PER_S) + next(self._steps, 0) * NS_PER_S


@pytest.mark.parametrize(
    ("steps", "slept_s"),
    [([], 59), ([0, -30], 89), ([0, 20], 39), ([10, -10, 5], 54)],
    ids=["none", "backwards", "forwards", "both"],
)
async def test_a_start_follows_a_wall_clock_that_is_set_while_it_waits(
    steps: list[int], slept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = _Wall(iter(steps))
    monkeypatch.setattr(time, "time_ns", wall.time_ns)
    monkeypatch.setattr(asyncio, "sleep", wall.sleep)
    start_ns = wall.now_ns + 60 * NS_PER_S
    assert await wait_for_start(start_ns) == start_ns - wall.now_ns
    assert wall.slept_s == pytest.approx(slept_s)


async def test_a_start_that_a_step_of_the_clock_skips_is_missed_and_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall = _Wall(iter([0, 100]))
    monkeypatch.setattr(time, "time_ns", wall.time_ns)
    monkeypatch.setattr(asyncio, "sleep", wall.sleep)
    with pytest.raises(UsageError, match=r"passed 42\.1 s ago; choose a later instant"):
        await wait_for_start(wall.now_ns + 60 * NS_PER_S)


# The wall clock jumps by an hour five times a second.
JUMPING = """
read = time.time_ns
time.time_ns = lambda: read() + time.monotonic_ns() // 200_000_000 % 2 * 3_600_000_000_000
"""
# The machine is suspended for 3 s after the first reading in the run.
SUSPENDING = """
now, read = ClockReading.now, []
def suspended():
    read.append(now())
    return replace(read[-1], elapsed_ns=read[-1].elapsed_ns + 3_000_000_000 * (len(read) > 2))
ClockReading.now = suspended
"""


@pytest.mark.parametrize(
    ("patch", "kind", "problem"),
    [
        pytest.param(JUMPING, VerdictKind.INCONCLUSIVE, "", id="wall"),
        pytest.param(SUSPENDING, VerdictKind.INVALID, "was suspended for 3 s", id="suspended"),
    ],
)
async def test_a_run_in_which_clocks_change(
    patch: str, kind: VerdictKind, problem: str, trace_of: WriteTrace, tmp_path: Path
) -> None:
    trace = trace_of(steady_rows(40, input_tokens=8, output_tokens=4))
    answer = lambda count: [*tokens(count), finish(), usage(count), DONE]  # noqa: E731
    async with running(StandIn(answer=answer)) as url:
        command = ["replay", "--trace", trace, "--target", url, "--out", tmp_path / "run"]
        command += ["--ttft", "5s", "--tpot", "5s", "--objective", "90%", "--gate", "--no-report"]
        arguments = [str(one) for one in command]
        program = (
            "import sys, time\nfrom dataclasses import replace\n"
            "from goodput_replay.clock_changes import ClockReading\n"
            f"from goodput_core.dispatch import run_command\n{patch}\n"
            f"sys.exit(run_command({arguments}))"
        )
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=DEVNULL, stderr=DEVNULL
        )
        code = await child.wait()
    summary = read_summary(tmp_path / "run")
    assert (code, summary.verdict.kind) == (kind.exit_code, kind)
    assert problem in summary.verdict.sentence
    assert summary.overall.good == 40
    assert summary.overall.e2e_ms is not None
    assert 0 < summary.overall.e2e_ms.max < 5000
