"""Command lines and environments of the processes: `goodput engine` and `goodput router`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from goodput_core.contract import ENV_CONTROL_TOKEN, ENV_LLMSERVICE, ENV_REPLICA
from goodput_core.units import NS_PER_MS

__all__ = ["HOST", "Command", "Commands"]

HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command line and environment of one process.

    Args:
        argv: program and arguments.
        env: the complete environment.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Commands of a service's processes, run from this installation.

    Args:
        service: the service's name.
        manifest: manifest that engines and router read.
        upstreams: the router's file of upstreams.
        token: bearer token of the admin ports.
        device: device profile that replaces the model's source; None to use the source.
        grace_ns: time for running requests to finish after SIGTERM.
        environment: environment variables that the processes inherit.
    """

    service: str
    manifest: Path
    upstreams: Path
    token: str = field(repr=False)
    device: str | None
    grace_ns: int
    environment: Mapping[str, str] = field(repr=False)

    def replica(self, name: str) -> Command:
        """Return the command of a replica."""
        device = () if self.device is None else ("--device", self.device)
        return self._command("engine", name, "--port", "0", "--admin-port", "0", *device)

    def router(self, name: str, *, port: int, admin_port: int) -> Command:
        """Return the command of the router on these ports, 0 for any free one."""
        ports = ("--port", str(port), "--admin-port", str(admin_port))
        return self._command("router", name, "--upstreams", str(self.upstreams), *ports)

    def _command(self, command: str, name: str, *options: str) -> Command:
        program = (sys.executable, "-m", "goodput_core", command, "-f", str(self.manifest))
        grace = f"{max(1, self.grace_ns // NS_PER_MS)}ms"
        always = ("--host", HOST, "--grace", grace, "--json", "--exit-with-parent")
        names = {
            ENV_LLMSERVICE: self.service,
            ENV_REPLICA: name,
            ENV_CONTROL_TOKEN: self.token,
        }
        return Command(argv=(*program, *options, *always), env={**self.environment, **names})
