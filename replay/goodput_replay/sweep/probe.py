"""One probe of a capacity search: a replay at one rate in a child process."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from goodput_core.errors import ExitCode
from goodput_core.slo.targets import parse_objective
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.child import ChildReplays, child_replays
from goodput_replay.runs.summary import Summary, read_summary
from goodput_replay.sweep.search import Probe, RateLevel

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence

__all__ = ["PlannedClass", "ProbePlan", "ProbeRun", "Replays", "replays"]


class PlannedClass(msgspec.Struct, frozen=True):
    """An SLO class of a plan.

    Args:
        name: its name.
        objective: its objective; None if it has none.
    """

    name: str
    objective: str | None = None


class ProbePlan(msgspec.Struct, frozen=True):
    """The plan of a replay, as `--dry-run` prints it.

    Args:
        duration_s: length of the replay.
        classes: requests by class.
        promises: the SLO classes.
        sessions: counts of requests of sessions; None if all arrivals are independent.
    """

    duration_s: float
    classes: dict[str, int] = {}
    promises: tuple[PlannedClass, ...] = ()
    sessions: dict[str, int] | None = None

    @property
    def has_objective(self) -> bool:
        """True if a class with requests has an objective."""
        return any(c.objective is not None and self.classes.get(c.name) for c in self.promises)

    @property
    def causal(self) -> bool:
        """True if requests wait for the responses before them."""
        return self.sessions is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRun(Probe):
    """A probe and its run.

    Args:
        summary: summary of the run.
        folder: folder of the run.
    """

    summary: Summary
    folder: Path


class Replays:
    """Replays of one trace at different rates.

    Args:
        children: runs the replays.
        arguments: arguments of `replay`, without a rate, a folder or an output format.
    """

    def __init__(self, children: ChildReplays, arguments: Sequence[str]) -> None:
        self._children = children
        self._arguments = arguments

    def plan(self) -> ProbePlan:
        """Check the arguments and return the plan of a replay, without sending.

        Raises:
            UsageError: the replay rejected its arguments.
            Interrupted: by a signal.
            InternalError: the replay failed.
        """
        completed = self._run("--dry-run", "--json")
        if completed.returncode != ExitCode.PASS:
            raise self._children.error(completed, "")
        return msgspec.json.decode(completed.stdout, type=ProbePlan)

    def try_rate(self, scale: Fraction, folder: Path) -> ProbeRun:
        """Replay at a rate.

        Args:
            scale: factor of the trace's rate.
            folder: folder of the run; must not exist.

        Raises:
            UsageError: the replay rejected its arguments or could not reach its target.
            Interrupted: by a signal.
            InternalError: the replay failed.
        """
        completed = self._run(*_rate(scale), "--out", str(folder), "--json", "--no-report")
        if completed.returncode not in (ExitCode.PASS, ExitCode.INVALID):
            raise self._children.error(completed, f"at {float(scale):g} times the trace's rate: ")
        summary = read_summary(folder)
        return ProbeRun(scale=scale, level=_level(summary), summary=summary, folder=folder)

    def can_send(self, scale: Fraction) -> bool:
        """True if the plan at this rate has rows, and at most `--max-rate` rows per second.

        Raises:
            Interrupted: by a signal.
        """
        return self._run(*_rate(scale), "--dry-run").returncode == ExitCode.PASS

    def _run(self, *options: str) -> subprocess.CompletedProcess[bytes]:
        return self._children.run(*self._arguments, *options)


@contextmanager
def replays(arguments: Sequence[str]) -> Iterator[Replays]:
    """Yield replays that end on Ctrl-C, SIGTERM and a closed terminal; main thread only."""
    with child_replays() as children:
        yield Replays(children, arguments)


def _level(summary: Summary) -> RateLevel:
    """Return how well the rate of a valid run meets the objectives."""
    if summary.verdict.kind is VerdictKind.PASS:
        return RateLevel.SHOWN
    if summary.verdict.kind is VerdictKind.FAIL:
        return RateLevel.FAILED
    judged = [c for c in summary.classes if c.objective is not None and c.total]
    reached = [Fraction(c.good, c.total) >= parse_objective(c.objective or "") for c in judged]
    return RateLevel.SEEMS if reached and all(reached) else RateLevel.BELOW


def _rate(scale: Fraction) -> list[str]:
    # A fraction, so that the replay's rate is exactly that of the result.
    return ["--rate-scale", str(scale)]
