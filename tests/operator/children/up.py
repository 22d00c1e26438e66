"""`goodput up` over stand-in children: behaviours by process name as JSON in $STAND_INS."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_core.errors import GoodputError
from goodput_operator.local.cli import run_up
from goodput_operator.local.commands import Command
from goodput_operator.local.options import UpOptions, parse_options
from goodput_operator.local.reporter import Reporter
from goodput_operator.local.supervisor import Workspace

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService


@dataclass(frozen=True)
class StandIns:
    workspace: Workspace
    behaviours: dict[str, str]
    token: str = "none"

    def replica(self, name: str) -> Command:
        return self._command("engine", name, 0, 0)

    def router(self, name: str, *, port: int, admin_port: int) -> Command:
        return self._command("router", name, port, admin_port)

    def _command(self, role: str, name: str, port: int, admin_port: int) -> Command:
        script = str(Path(__file__).with_name("stand_in.py"))
        behaviour = self.behaviours.get(name, "well")
        # "once-crashes" crashes at the first start and behaves well from then on;
        # "once-crashes then silent" is silent from then on.
        once = Path(os.environ["STAND_IN_DIR"]) / name
        if behaviour.startswith("once-"):
            first, _, later = behaviour.partition(" then ")
            behaviour = (later or "well") if once.exists() else first
            once.touch()
        upstreams, manifest = str(self.workspace.upstreams), str(self.workspace.manifest)
        python = sys.executable if "missing" not in behaviour else "/no/such/program"
        ports = (str(port), str(admin_port))
        argv = (python, script, role, name, behaviour, *ports, upstreams, manifest)
        return Command(argv=argv, env=os.environ.copy())


def stand_ins(workspace: Workspace, service: LLMService, options: UpOptions) -> StandIns:
    return StandIns(workspace, json.loads(os.environ.get("STAND_INS", "{}")))


def break_down(*_: object) -> None:
    raise RuntimeError("a bug in the supervisor")


if __name__ == "__main__":
    if os.environ.get("UP_BREAKS"):
        setattr(Reporter, "ready", break_down)  # noqa: B010 - a bug, for a test
    try:
        sys.exit(run_up(parse_options(sys.argv[1:]), stand_ins))
    except GoodputError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
