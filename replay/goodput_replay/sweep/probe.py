"""One probe: a replay at one rate in a process of its own, and what its verdict says.

Each probe leaves a whole run folder, so that every figure of the search can be looked at. A
process of its own makes no difference between virtual time, a service that is started and a
server elsewhere, and ends what it has started as any replay does.
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
from goodput_core.signals import Terminals
from goodput_core.slo.targets import parse_objective
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.run.summary import Summary, read_summary
from goodput_replay.sweep.search import Level, Probe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

__all__ = [
    "PlanLength",
    "Replays",
    "Tried",
    "can_be_sent",
    "level_of",
    "replays",
    "survey_plan",
    "try_rate",
]


class PlanLength(msgspec.Struct, frozen=True):
    """What `--dry-run --json` says of a plan, as far as a search needs it."""

    requests: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A probe and the run behind it.

    Args:
        probe: the rate and what it says.
        summary: of the run.
        folder: the run's.
    """

    probe: Probe
    summary: Summary
    folder: Path


def level_of(summary: Summary) -> Level:
    """What a valid run says of its rate."""
    if summary.verdict.kind is VerdictKind.PASS:
        return Level.SHOWN
    judged = [c for c in summary.classes if c.objective is not None and c.total]
    if not judged or summary.verdict.kind is VerdictKind.FAIL:
        return Level.BROKEN
    enough = (Fraction(c.good, c.total) >= parse_objective(c.objective or "") for c in judged)
    return Level.SEEMS if all(enough) else Level.BROKEN


def survey_plan(replays: Replays, arguments: Sequence[str]) -> PlanLength:
    """What one replay would send, without sending it; every wrong argument is found here.

    Args:
        replays: runs it.
        arguments: of `replay`.

    Raises:
        UsageError: the replay refused them.
        Interrupted: by a signal.
        InternalError: it failed.
    """
    done = replays.run([*arguments, "--dry-run", "--json"])
    if done.returncode != ExitCode.PASS:
        raise _error(replays, done, "")
    return msgspec.json.decode(done.stdout, type=PlanLength)


def try_rate(replays: Replays, arguments: Sequence[str], scale: Fraction, folder: Path) -> Tried:
    """Replay at a rate.

    Args:
        replays: runs it.
        arguments: of `replay`, without a rate, a folder or an output format.
        scale: of the trace's rate.
        folder: the run's, which must not exist.

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
    return Tried(probe=Probe(scale=scale, level=level_of(summary)), summary=summary, folder=folder)


def can_be_sent(replays: Replays, arguments: Sequence[str], scale: Fraction) -> bool:
    """Whether the plan itself stands at that rate: it has rows, and not more than are allowed.

    Args:
        replays: runs `--dry-run`.
        arguments: as of `try_rate`.
        scale: of the trace's rate.

    Raises:
        Interrupted: by a signal.
    """
    return replays.run([*arguments, *_at(scale), "--dry-run"]).returncode == ExitCode.PASS


def _at(scale: Fraction) -> list[str]:
    # As a fraction: exactly the rate that the answer names.
    return ["--rate-scale", str(scale)]


def _error(replays: Replays, done: subprocess.CompletedProcess[bytes], where: str) -> GoodputError:
    """The replay's last sentence, as an error of its kind."""
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    if replays.interrupted:
        sentence = said[-1] if said else "interrupted"
        return Interrupted(f"{where}{sentence.removeprefix('error: ')}")
    sentence = said[-1] if said else f"replay ended with {done.returncode}"
    kind = UsageError if done.returncode == ExitCode.USAGE else InternalError
    return kind(f"{where}{sentence.removeprefix('error: ')}")


_ASKING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Replays:
    """Runs replays and passes signals on to the one that runs.

    Attributes:
        interrupted: whether a signal came.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting: int | None = None

    def run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        """Run one to its end, whatever ends it.

        Args:
            arguments: of `replay`.

        Raises:
            Interrupted: a signal came before it was started.
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
            if self._waiting is not None:  # it came while the child was being created
                child.send_signal(self._waiting)
            out, err = child.communicate()
        self._child = None
        return subprocess.CompletedProcess(command, child.returncode, out, err)

    def interrupt(self, number: int) -> None:
        """Pass a signal on, at any time."""
        self.interrupted = True
        if self._child is None:
            self._waiting = number
        else:
            self._child.send_signal(number)


@contextmanager
def replays() -> Iterator[Replays]:
    """Replays that Ctrl-C, SIGTERM and a closed terminal end; the main thread only."""
    run = Replays()
    terminals = Terminals()

    def received(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            terminals.closed()
            # A shell repeats to its jobs the hang-up that the system has sent them.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        run.interrupt(number)

    before = {
        number: signal.signal(number, received)
        for number in _ASKING
        if signal.getsignal(number) is not signal.SIG_IGN  # as `nohup` leaves SIGHUP
    }
    try:
        yield run
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
