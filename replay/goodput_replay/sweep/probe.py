"""One probe of a capacity search: a replay at one rate in a child process.

Each probe leaves a complete run folder. With a child process, virtual time, a started service and a
running server need no separate code, and each replay cleans up after itself. Each child leads its
own process group. Otherwise it would receive Ctrl-C twice: from the terminal, and from this
process, which forwards each signal once (SIGTERM reaches only this process). After a signal, the
search ends when the child has ended.
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

__all__ = ["ProbeRun", "Replays", "replays"]

_SIGNALS: Final = {
    StopCause.CTRL_C: signal.SIGINT,
    StopCause.SIGTERM: signal.SIGTERM,
    StopCause.HANG_UP: signal.SIGHUP,
}


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
    """Runs replays one at a time and forwards signals to the running one.

    Args:
        arguments: arguments of `replay`, without a rate, a folder or an output format.

    Attributes:
        interrupted: True after a signal.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.interrupted = False
        self._arguments = arguments
        self._child: subprocess.Popen[bytes] | None = None
        self._pending: signal.Signals | None = None

    def plan_s(self) -> float:
        """Check the arguments and return the length of one replay in seconds, without sending.

        Raises:
            UsageError: the replay rejected its arguments.
            Interrupted: by a signal.
            InternalError: the replay failed.
        """
        completed = self._run("--dry-run", "--json")
        if completed.returncode != ExitCode.PASS:
            raise self._error(completed, "")
        duration_s: float = msgspec.json.decode(completed.stdout)["duration_s"]
        return duration_s

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
            raise self._error(completed, f"at {float(scale):g} times the trace's rate: ")
        summary = read_summary(folder)
        return ProbeRun(scale=scale, level=_level(summary), summary=summary, folder=folder)

    def can_send(self, scale: Fraction) -> bool:
        """True if the plan at this rate has rows, and at most `--max-rate` rows per second.

        Raises:
            Interrupted: by a signal.
        """
        return self._run(*_rate(scale), "--dry-run").returncode == ExitCode.PASS

    def interrupt(self, cause: StopCause) -> None:
        """Forward a signal to the running replay."""
        self.interrupted = True
        if self._child is None:
            self._pending = _SIGNALS[cause]
        else:
            self._child.send_signal(_SIGNALS[cause])

    def _run(self, *options: str) -> subprocess.CompletedProcess[bytes]:
        """Run one replay to its end.

        Raises:
            Interrupted: a signal was received before the replay started.
        """
        if self.interrupted:
            raise Interrupted("interrupted")
        command = [sys.executable, "-m", "goodput_core", "replay", *self._arguments, *options]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        ) as child:
            self._child = child
            if self._pending is not None:  # received while the child was being created
                child.send_signal(self._pending)
            out, err = child.communicate()
        self._child = None
        return subprocess.CompletedProcess(command, child.returncode, out, err)

    def _error(self, completed: subprocess.CompletedProcess[bytes], where: str) -> GoodputError:
        """Return the last line of the replay's stderr as an error of the same kind.

        Args:
            completed: the replay.
            where: beginning of the error message.
        """
        lines = completed.stderr.decode("utf-8", "replace").strip().splitlines()
        if self.interrupted:
            kind: type[GoodputError] = Interrupted
            fallback = "interrupted"
        else:
            kind = UsageError if completed.returncode == ExitCode.USAGE else InternalError
            fallback = f"replay ended with exit code {completed.returncode}"
        sentence = lines[-1] if lines else fallback
        return kind(f"{where}{sentence.removeprefix('error: ')}")


@contextmanager
def replays(arguments: Sequence[str]) -> Iterator[Replays]:
    """Yield a `Replays` that ends on Ctrl-C, SIGTERM and a closed terminal; main thread only."""
    run = Replays(arguments)
    with handle_stop_signals(run.interrupt):
        yield run


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
