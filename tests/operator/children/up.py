"""`goodput up` over stand-in children: behaviours by process name as JSON in $STAND_INS."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from goodput_core.errors import GoodputError
from goodput_operator.local.cli import run_up
from goodput_operator.local.commands import Command, Commands
from goodput_operator.local.options import parse_options
from goodput_operator.local.reporter import Reporter


class StandIns(Commands):
    """Command lines of `stand_in.py`."""

    def replica(self, name: str) -> Command:
        return self._stand_in("engine", name, 0, 0)

    def router(self, name: str, *, port: int, admin_port: int) -> Command:
        return self._stand_in("router", name, port, admin_port)

    def _stand_in(self, role: str, name: str, port: int, admin_port: int) -> Command:
        script = str(Path(__file__).with_name("stand_in.py"))
        behaviour = json.loads(os.environ.get("STAND_INS", "{}")).get(name, "well")
        # "once-crashes" crashes at the first start and behaves well from then on;
        # "once-crashes then silent" is silent from then on.
        once = Path(os.environ["STAND_IN_DIR"]) / name
        if behaviour.startswith("once-"):
            first, _, later = behaviour.partition(" then ")
            behaviour = (later or "well") if once.exists() else first
            once.touch()
        python = sys.executable if "missing" not in behaviour else "/no/such/program"
        ports = (str(port), str(admin_port))
        files = (str(self.workspace.upstreams), str(self.workspace.manifest))
        return Command(
            argv=(python, script, role, name, behaviour, *ports, *files), env=self.environment
        )


def break_down(*_: object) -> None:
    raise RuntimeError("a bug in the supervisor")


if __name__ == "__main__":
    if os.environ.get("UP_BREAKS"):
        setattr(Reporter, "report_ready", break_down)  # noqa: B010 - a bug, for a test
    try:
        sys.exit(run_up(parse_options(sys.argv[1:]), StandIns))
    except GoodputError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
