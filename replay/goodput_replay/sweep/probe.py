"""One probe of a capacity search: a replay at one rate in a child process.

Each probe leaves a complete run folder. A child process treats virtual time, a service that is
started and a running server alike, and cleans up as any replay does. A child leads its own
process group: Ctrl-C would otherwise reach it twice, and SIGTERM not at all. Each signal is
forwarded once, and the search ends after the child.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.errors import ExitCode, GoodputError, InternalError, Interrupted, UsageError
from goodput_core.signals import StopCause, handle_stop_signals
from goodput_core.slo.targets import parse_objective
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.run.summary import Summary, read_summary
from goodput_replay.sweep.search import Probe, RateLevel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "PlanLength",
    "ProbeRun",
    "Replays",
    "can_be_sent",
    "level_of",
    "replays",
    "survey_plan",
    "try_rate",
]


_SIGNALS: Final = {
    StopCause.CTRL_C: signal.SIGINT,
    StopCause.SIGTERM: signal.SIGTERM,
    StopCause.HANG_UP: signal.SIGHUP,
}


class PlanLength(msgspec.Struct, frozen=True):
    """The part of `--dry-run --json` that a search needs."""

    requests: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRun:
    """A probe and its run.

    Args:
        probe: the rate and its level.
        summary: of the run.
        folder: of the run.
    """

    probe: Probe
    summary: Summary
    folder: Path


def level_of(summary: Summary) -> RateLevel:
    """Return what a valid run says of its rate."""
    if summary.verdict.kind is VerdictKind.PASS:
        return RateLevel.SHOWN
    if summary.verdict.kind is VerdictKind.FAIL:
        return RateLevel.FAILED
    judged = [c for c in summary.classes if c.objective is not None and c.total]
    reached = [Fraction(c.good, c.total) >= parse_objective(c.objective or "") for c in judged]
    return RateLevel.SEEMS if reached and all(reached) else RateLevel.BELOW


def survey_plan(replays: Replays, arguments: Sequence[str]) -> PlanLength:
    """Check all arguments and return the length of one replay, without sending anything.

    Args:
        replays: starts the child process.
        arguments: of `replay`.

    Raises:
        UsageError: the replay refused the arguments.
        Interrupted: by a signal.
        InternalError: the replay failed.
    """
    done = replays.run([*arguments, "--dry-run", "--json"])
    if done.returncode != ExitCode.PASS:
        raise _error(replays, done, "")
    return msgspec.json.decode(done.stdout, type=PlanLength)


def try_rate(replays: Replays, arguments: Sequence[str], scale: Fraction, folder: Path) -> ProbeRun:
    """Replay at a rate.

    Args:
        replays: starts the child process.
        arguments: of `replay`, without a rate, a folder or an output format.
        scale: of the trace's rate.
        folder: of the run; must not exist.

    Raises:
        UsageError: the replay refused its arguments or could not reach its target.
        Interrupted: by a signal.
        InternalError: the replay failed.
    """
    ours = [*_at(scale), "--out", str(folder), "--json", "--no-report"]
    done = replays.run([*arguments, *ours])
    if done.returncode not in (ExitCode.PASS, ExitCode.INVALID):
        raise _error(replays, done, f"at {float(scale):g} times the trace's rate: ")
    summary = read_summary(folder)
    return ProbeRun(
        probe=Probe(scale=scale, level=level_of(summary)), summary=summary, folder=folder
    )


def can_be_sent(replays: Replays, arguments: Sequence[str], scale: Fraction) -> bool:
    """True if the plan at that rate has rows, and at most `--max-rate` of them a second.

    Args:
        replays: runs `--dry-run`.
        arguments: as for `try_rate`.
        scale: of the trace's rate.

    Raises:
        Interrupted: by a signal.
    """
    return replays.run([*arguments, *_at(scale), "--dry-run"]).returncode == ExitCode.PASS


def _at(scale: Fraction) -> list[str]:
    # As a fraction: exactly the rate that the answer names.
    return ["--rate-scale", str(scale)]


def _error(replays: Replays, done: subprocess.CompletedProcess[bytes], where: str) -> GoodputError:
    """Return the last line of the replay's stderr as an error of the same kind."""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    if replays.interrupted:
        sentence = lines[-1] if lines else "interrupted"
        return Interrupted(f"{where}{sentence.removeprefix('error: ')}")
    sentence = lines[-1] if lines else f"replay ended with {done.returncode}"
    kind = UsageError if done.returncode == ExitCode.USAGE else InternalError
    return kind(f"{where}{sentence.removeprefix('error: ')}")


class Replays:
    """Runs replays one at a time and forwards signals to the running one.

    Attributes:
        interrupted: True after a signal.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._child: subprocess.Popen[bytes] | None = None
        self._pending: signal.Signals | None = None

    def run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        """Run one replay to its end.

        Args:
            arguments: of `replay`.

        Raises:
            Interrupted: a signal came before the start.
        """
        if self.interrupted:
            raise Interrupted("interrupted")
        command = [sys.executable, "-m", "goodput_core", "replay", *arguments]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        ) as child:
            self._child = child
            if self._pending is not None:  # it came while the child was being created
                child.send_signal(self._pending)
            out, err = child.communicate()
        self._child = None
        return subprocess.CompletedProcess(command, child.returncode, out, err)

    def interrupt(self, cause: StopCause) -> None:
        """Forward a signal to the running replay."""
        self.interrupted = True
        if self._child is None:
            self._pending = _SIGNALS[cause]
        else:
            self._child.send_signal(_SIGNALS[cause])


@contextmanager
def replays() -> Iterator[Replays]:
    """Yield a `Replays` that Ctrl-C, SIGTERM and a closed terminal end; main thread only."""
    run = Replays()
    with handle_stop_signals(run.interrupt):
        yield run
