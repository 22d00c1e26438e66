"""Output of `goodput up`: logs with a prefix, messages for users, and JSON lines for programs.

Stdout gets the message that the service is ready. With `--json`, it gets only events instead, one
JSON object per line. All other output goes to stderr. `docs/local.md` documents the output.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections import deque
from dataclasses import asdict
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import msgspec

from goodput_core.contract import EVENT_DECISION, EVENT_FETCHING, EVENT_READY, PATH_COMPLETIONS
from goodput_core.control.decision import decision_summary, json_value
from goodput_core.units import NS_PER_MS, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_core.control import ControlStep
    from goodput_operator.local.decide import Address, ProcessView, RoutedReplica

__all__ = ["LineWriter", "Reporter"]

_COLOURS: Final = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_SUPERVISOR: Final = "up"
_JSON_HEADER: Final = "-H 'Content-Type: application/json'"
_MAX_QUEUED_BYTES: Final = 1 << 20


class Reporter:
    """Reports the events of a running fleet.

    Args:
        out: stdout.
        err: stderr.
        json_events: True to write JSON events to stdout.
        colour: True if prefixes on stderr are coloured.
        names: names of the processes, to align and colour their lines.
        model: name of the model in the example request.
        ui: stdin of the live page, which gets the JSON events too; None without a page.
    """

    def __init__(
        self,
        *,
        out: LineWriter,
        err: LineWriter,
        json_events: bool,
        colour: bool,
        names: Iterable[str],
        model: str,
        ui: LineWriter | None = None,
    ) -> None:
        self._out = out
        self._err = err
        self._json_events = json_events
        self._ui = ui
        self._model = model
        self._colours = dict(zip(names, cycle(_COLOURS), strict=False))
        self._width = max(map(len, [_SUPERVISOR, *self._colours]))
        if not colour:
            self._colours.clear()

    def log(self, name: str, line: str) -> None:
        """Write a line of a process's output after its name."""
        prefix = f"{name:<{self._width}} |"
        if (code := self._colours.get(name)) is not None:
            prefix = f"\x1b[{code}m{prefix}\x1b[0m"
        self._err.write(f"{prefix} {line}")

    def log_message(self, message: str) -> None:
        """Write a message of the supervisor."""
        self.log(_SUPERVISOR, message)

    def report_fetching(self, line: str) -> None:
        """Report the progress of weights that are fetched, as a line of a log."""
        self.log("fetch", line)
        self._event(EVENT_FETCHING, line=line)

    def report_ready(
        self, service: str, router: Address, replicas: tuple[RoutedReplica, ...]
    ) -> None:
        """Report that the service is ready."""
        self._event(EVENT_READY, **asdict(router), replicas=[asdict(r) for r in replicas])
        if self._json_events:
            return
        body = {"model": self._model, "prompt": "Hello", "max_tokens": 16, "stream": True}
        data = shlex.quote(json.dumps(body))
        lines = [
            f"{service} is ready at {router.url}",
            f"  admin     {router.admin_url}",
            *(f"  replica   {r.name}  {r.url}  admin {r.admin_url}" for r in replicas),
            f"  try       curl -N {router.url}{PATH_COMPLETIONS} {_JSON_HEADER} -d {data}",
            "Press Ctrl-C to stop.",
        ]
        for line in lines:
            self._out.write(line)

    def report_exit(self, process: ProcessView, restart_in_ns: int) -> None:
        """Report that a process ended without a stop request."""
        code = process.exit_code
        if code is None:
            end = "could not be started"
        else:
            end = f"ended with signal {-code}" if code < 0 else f"ended with code {code}"
        self.log_message(f"{process.name} {end}; it restarts in {format_duration(restart_in_ns)}")
        self._event(
            f"{process.role}_exited",
            name=process.name,
            exit_code=code,
            restart_in_ms=restart_in_ns // NS_PER_MS,
        )

    def report_start(self, process: ProcessView, *, again: bool) -> None:
        """Report that a restarted process or an added replica is ready."""
        assert process.address is not None
        self.log_message(
            f"{process.name} is ready{' again' if again else ''} at {process.address.url}"
        )
        event = f"{process.role}_{'restarted' if again else 'started'}"
        self._event(event, name=process.name, **asdict(process.address))

    def report_removal(self, process: ProcessView) -> None:
        """Report the end of a replica that is no longer desired."""
        drained = process.terminated_ns is not None and process.exit_code == 0
        end = "has drained" if drained else "does not restart: fewer replicas are desired"
        self.log_message(f"{process.name} {end}")
        self._event("replica_left", name=process.name)

    def report_step(self, step: ControlStep) -> None:
        """Report a control step: changes in the log, and the decision as an event."""
        # These are the inputs that the operator logs, too.
        inputs = json.dumps(decision_summary(step.decision)) if step.changes else ""
        for change in step.changes:
            self.log_message(change.message)
            self.log_message(f"{EVENT_DECISION} {change.knob} {change.reason}: {inputs}")
            self._event(
                "change",
                knob=change.knob,
                reason=change.reason,
                message=change.message,
                applied=change.applied,
            )
        if self._json_events:
            decision = msgspec.json.encode(step.decision, enc_hook=json_value).decode()
            self._out.write(f'{{"event": "{EVENT_DECISION}", "decision": {decision}}}')

    def report_kill(self, name: str, reason: str) -> None:
        """Report that a process is killed."""
        self.log_message(f"{name} is killed: {reason}")

    def report_stop(self, reason: str, grace_ns: int | None) -> None:
        """Report a shutdown.

        Args:
            reason: reason for the stop.
            grace_ns: time for running requests to finish; None if there are none.
        """
        grace = f": running requests have {format_duration(grace_ns)} to finish" if grace_ns else ""
        self.log_message(f"stopping ({reason}){grace}")
        self._event("stopping", reason=reason)

    def close(self) -> None:
        """Write the queued lines, waiting at most one second per stream."""
        self._out.close()
        self._err.close()

    def _event(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields})
        if self._json_events:
            self._out.write(line)
        if self._ui is not None:
            self._ui.write(line)


class LineWriter:
    """Writes lines to one file descriptor without waiting for its reader.

    A thread writes the lines, because a terminal stopped by Ctrl-S, or a parent that does not read,
    must not block the supervisor. Lines that do not fit into the bounded queue are dropped and
    counted.

    Args:
        fd: file descriptor to write to; it stays open.
        max_queued_bytes: size of the queue.
    """

    def __init__(self, fd: int, *, max_queued_bytes: int = _MAX_QUEUED_BYTES) -> None:
        self._fd = fd
        self._max_queued_bytes = max_queued_bytes
        self._lines: deque[bytes] = deque()
        self._queued_bytes = 0
        self._dropped = 0
        self._closed = False
        self._changed = threading.Condition()
        # The thread is a daemon and uses no buffered stream, so that a reader that has stopped
        # reading cannot delay the exit.
        self._thread = threading.Thread(
            target=self._write_all, name=f"line-writer-{fd}", daemon=True
        )
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue one line."""
        data = f"{line}\n".encode("utf-8", "replace")
        with self._changed:
            if self._queued_bytes + len(data) > self._max_queued_bytes:
                self._dropped += 1
                return
            self._report_dropped()
            self._push(data)

    def close(self, timeout_s: float = 1.0) -> None:
        """Write the queued lines, waiting at most `timeout_s`."""
        with self._changed:
            self._report_dropped()
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _report_dropped(self) -> None:
        if self._dropped:
            self._push(f"… {self._dropped} lines dropped: they were not read in time\n".encode())
            self._dropped = 0

    def _push(self, data: bytes) -> None:
        self._lines.append(data)
        self._queued_bytes += len(data)
        self._changed.notify()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                batch = b"".join(self._lines)
                self._lines.clear()
            try:
                self._write(batch)
            except OSError:
                pass  # the pipe is closed or the disk is full; the service continues without a log
            with self._changed:
                self._queued_bytes -= len(batch)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
