"""What `goodput up` says: logs with a prefix, sentences for people, JSON lines for machines.

Stdout carries the announcement, or with `--json` nothing but events, one object a line; all
else goes to stderr. `docs/local.md` documents both.
"""

from __future__ import annotations

import json
import shlex
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import msgspec

from goodput_core.contract import EVENT_DECISION, EVENT_READY, PATH_COMPLETIONS
from goodput_core.control.decision import json_value
from goodput_core.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_core.control import ControlStep, ServiceDecision
    from goodput_operator.local.outlet import Outlet
    from goodput_operator.local.snapshot import Address, ProcessView, Upstream

__all__ = ["Reporter"]

_COLOURS: Final = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_SUPERVISOR: Final = "up"
_JSON_HEADER: Final = "-H 'Content-Type: application/json'"


class Reporter:
    """Everything that a running fleet tells.

    Args:
        out: stdout.
        err: stderr.
        machine: whether stdout carries JSON events.
        colour: whether prefixes on stderr are coloured.
        names: of the processes, to align and to colour their lines.
        model: the model's name in requests, for the line to try.
    """

    def __init__(
        self,
        *,
        out: Outlet,
        err: Outlet,
        machine: bool,
        colour: bool,
        names: Iterable[str],
        model: str,
    ) -> None:
        self._out = out
        self._err = err
        self._machine = machine
        self._model = model
        self._colours = dict(zip(names, cycle(_COLOURS), strict=False))
        self._width = max(map(len, [_SUPERVISOR, *self._colours]))
        if not colour:
            self._colours.clear()

    def log(self, name: str, line: str) -> None:
        """One line of a child's output, behind its name."""
        prefix = f"{name:<{self._width}} |"
        if (code := self._colours.get(name)) is not None:
            prefix = f"\x1b[{code}m{prefix}\x1b[0m"
        self._err.write(f"{prefix} {line}")

    def say(self, sentence: str) -> None:
        """A sentence of the supervisor itself."""
        self.log(_SUPERVISOR, sentence)

    def ready(self, service: str, router: Address, replicas: tuple[Upstream, ...]) -> None:
        """The fleet is ready: traffic may start."""
        if self._machine:
            listed = [{"name": r.name, "url": r.url, "admin_url": r.admin_url} for r in replicas]
            self._event(EVENT_READY, url=router.url, admin_url=router.admin_url, replicas=listed)
            return
        body = {"model": self._model, "prompt": "Hello", "max_tokens": 16, "stream": True}
        data = shlex.quote(json.dumps(body))
        lines = [
            f"{service} is ready at {router.url}",
            f"  admin     {router.admin_url}",
            *(f"  replica   {r.name}  {r.url}  admin {r.admin_url}" for r in replicas),
            f"  try       curl -N {router.url}{PATH_COMPLETIONS} {_JSON_HEADER} -d {data}",
            "Ctrl-C stops it.",
        ]
        for line in lines:
            self._out.write(line)

    def exited(self, process: ProcessView, restart_in_ns: int) -> None:
        """A process ended and nobody had asked it to."""
        how = "could not be started"
        if process.exit_code is not None:
            killed = process.exit_code < 0
            kind = f"signal {-process.exit_code}" if killed else f"code {process.exit_code}"
            how = f"ended with {kind}"
        self.say(f"{process.name} {how}; it is started again in {format_duration(restart_in_ns)}")
        self._event(
            f"{process.role}_exited",
            name=process.name,
            exit_code=process.exit_code,
            restart_in_ms=restart_in_ns // 1_000_000,
        )

    def serves(self, process: ProcessView, *, again: bool) -> None:
        """A process that had ended is ready again, or a replica that was added is ready."""
        assert process.address is not None
        address = process.address
        self.say(f"{process.name} is ready{' again' if again else ''} at {address.url}")
        self._event(
            f"{process.role}_{'restarted' if again else 'started'}",
            name=process.name,
            url=address.url,
            admin_url=address.admin_url,
        )

    def left(self, process: ProcessView) -> None:
        """A replica that is not wanted any more has ended."""
        drained = process.terminated_ns is not None and process.exit_code == 0
        how = "has drained" if drained else "is not started again: fewer replicas are wanted"
        self.say(f"{process.name} {how}")
        self._event("replica_left", name=process.name)

    def decided(self, step: ControlStep) -> None:
        """Report a step of control: changes to people, the decision to a parent process."""
        for change in step.changes:
            self.say(change.message)
            self._event(
                "change",
                knob=change.knob,
                reason=change.reason,
                message=change.message,
                applied=change.applied,
            )
        if self._machine:
            self._out.write(f'{{"event": "{EVENT_DECISION}", "decision": {_line(step.decision)}}}')

    def killed(self, name: str, reason: str) -> None:
        """A process is killed rather than asked to end."""
        self.say(f"{name} is killed: {reason}")

    def stopping(self, reason: str, grace_ns: int | None) -> None:
        """The fleet was asked to stop or gave up; running requests have this long, if any run."""
        grace = f": running requests have {format_duration(grace_ns)} to finish" if grace_ns else ""
        self.say(f"stopping ({reason}){grace}")
        self._event("stopping", reason=reason)

    def close(self) -> None:
        """Let what was said be written, for a short while at most."""
        self._out.close()
        self._err.close()

    def _event(self, event: str, **fields: Any) -> None:
        if self._machine:
            self._out.write(json.dumps({"event": event, **fields}))


def _line(decision: ServiceDecision) -> str:
    """A decision and all that it was made from."""
    return msgspec.json.encode(decision, enc_hook=json_value).decode()
