"""Command lines of `goodput engine` and `goodput router`, and the files that they read."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.contract import ENV_CONTROL_TOKEN, ENV_LLMSERVICE, ENV_REPLICA
from goodput_core.files import write_atomically
from goodput_core.units import NS_PER_MS

if TYPE_CHECKING:
    from goodput_operator.local.decide import RoutedReplica

__all__ = ["HOST", "Command", "Commands", "Workspace", "open_workspace"]

HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Files of one running fleet, in a private folder.

    Args:
        manifest: copy of the manifest, since a restarted process must not read a changed file.
        upstreams: the router's file of upstreams.
    """

    manifest: Path
    upstreams: Path

    def publish(self, upstreams: tuple[RoutedReplica, ...]) -> None:
        """Replace the router's file of upstreams."""
        write_atomically(self.upstreams, json.dumps([asdict(u) for u in upstreams]).encode())


@contextmanager
def open_workspace(service: str, manifest_name: str, manifest_text: str) -> Iterator[Workspace]:
    """Create a folder that only this user can read, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix=f"goodput-{service}-") as folder:
        root = Path(folder)
        workspace = Workspace(manifest=root / manifest_name, upstreams=root / ".upstreams.json")
        workspace.manifest.write_text(manifest_text, encoding="utf-8")
        workspace.publish(())
        yield workspace


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
        workspace: files that the processes read.
        token: bearer token of the admin ports.
        device: device profile that replaces the model's source; None to use the source.
        model_path: path of a model that replaces the model's source; None to use the source.
        engine_options: further options of the replicas.
        grace_ns: time for running requests to finish after SIGTERM.
        environment: environment variables that the processes inherit.
        api_key_file: file of the keys that clients must send; None if no key is required.
        tenants: file of the tenants, whose keys the router requires; None without tenants.
    """

    service: str
    workspace: Workspace
    token: str = field(repr=False)
    device: str | None
    model_path: str | None = None
    engine_options: tuple[str, ...] = ()
    grace_ns: int
    environment: Mapping[str, str] = field(repr=False)
    api_key_file: Path | None = None
    tenants: Path | None = None

    def fetch(self) -> Command:
        """Return the command that fetches the weights of a real model before replicas start."""
        program = (sys.executable, "-m", "goodput_core", "engine", "fetch")
        argv = (*program, "-f", str(self.workspace.manifest), "--exit-with-parent")
        return Command(argv=(*argv, *self._model()), env=self.environment)

    def replica(self, name: str) -> Command:
        """Return the command of a replica."""
        device = () if self.device is None else ("--device", self.device)
        options = (*device, *self._model(), *self.engine_options)
        return self._command("engine", name, "--port", "0", "--admin-port", "0", *options)

    def router(self, name: str, *, port: int, admin_port: int) -> Command:
        """Return the command of the router on these ports; 0 stands for any free port."""
        tenants = () if self.tenants is None else ("--tenants", str(self.tenants.absolute()))
        options = ("--port", str(port), "--admin-port", str(admin_port), *tenants)
        return self._command("router", name, "--upstreams", str(self.workspace.upstreams), *options)

    def _model(self) -> tuple[str, ...]:
        """Return the option with the model's path."""
        return () if self.model_path is None else ("--model-path", self.model_path)

    def _command(self, command: str, name: str, *options: str) -> Command:
        program = (
            sys.executable,
            "-m",
            "goodput_core",
            command,
            "-f",
            str(self.workspace.manifest),
        )
        grace = f"{max(1, self.grace_ns // NS_PER_MS)}ms"
        always = ("--host", HOST, "--grace", grace, "--json", "--exit-with-parent")
        if self.api_key_file is not None:
            options = (*options, "--api-key-file", str(self.api_key_file.absolute()))
        names = {
            ENV_LLMSERVICE: self.service,
            ENV_REPLICA: name,
            ENV_CONTROL_TOKEN: self.token,
        }
        return Command(argv=(*program, *options, *always), env={**self.environment, **names})
