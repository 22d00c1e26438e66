"""A replay in a child process, for commands that run several.

Each replay leaves a complete run folder and cleans up after itself, in virtual time, with a started
service and with a running server. Each child leads its own process group. Otherwise it would
receive Ctrl-C twice: from the terminal, and from this process, which forwards each signal once
(SIGTERM reaches only this process). After a signal, the command ends when the child has ended. If
this process is killed, the child ends, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from goodput_core.errors import ExitCode, GoodputError, InternalError, Interrupted, UsageError
from goodput_core.signals import StopCause, handle_stop_signals

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ChildReplays", "child_replays"]

_SIGNALS: Final = {
    StopCause.CTRL_C: signal.SIGINT,
    StopCause.SIGTERM: signal.SIGTERM,
    StopCause.HANG_UP: signal.SIGHUP,
}


class ChildReplays:
    """Runs replays one at a time and forwards signals to the running one.

    Attributes:
        interrupted: True after a signal.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._child: subprocess.Popen[bytes] | None = None
        self._pending: signal.Signals | None = None

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run one replay to its end.

        Raises:
            Interrupted: a signal was received before the replay started.
        """
        if self.interrupted:
            raise Interrupted("interrupted")
        # -P: a module in the working directory must not replace a module of Goodput.
        command = [sys.executable, "-P", "-m", "goodput_replay.child_process", *arguments]
        with (
            _pipe_of_this_process() as stdin,
            subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            ) as child,
        ):
            self._child = child
            if self._pending is not None:  # received while the child was being created
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

    def error(self, completed: subprocess.CompletedProcess[bytes], where: str) -> GoodputError:
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
def _pipe_of_this_process() -> Iterator[int]:
    """Yield the end of a pipe that a child can read to its end when this process has ended."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


@contextmanager
def child_replays() -> Iterator[ChildReplays]:
    """Yield replays that end on Ctrl-C, SIGTERM and a closed terminal; main thread only."""
    children = ChildReplays()
    with handle_stop_signals(children.interrupt):
        yield children
