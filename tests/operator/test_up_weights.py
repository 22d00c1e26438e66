"""Weights are fetched by a command, whose progress is logged and reported as events."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from goodput_core.errors import InputError, InternalError, Interrupted
from goodput_operator.local.commands import Command
from goodput_operator.local.reporter import LineWriter, Reporter
from goodput_operator.local.weights import fetch_weights

if TYPE_CHECKING:
    from pathlib import Path


def fetch(tmp_path: Path, code: str) -> tuple[str, str]:
    """Run a command; return what was written to stdout and to stderr."""
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as out_file, err.open("wb") as err_file:
        reporter = Reporter(
            out=LineWriter(out_file.fileno()),
            err=LineWriter(err_file.fileno()),
            json_events=True,
            colour=False,
            names=(),
            model="chat",
        )
        command = Command(argv=(sys.executable, "-c", code), env=os.environ)
        try:
            fetch_weights(command, reporter, exit_with_parent=False)
        finally:
            reporter.close()
    return out.read_text(), err.read_text()


def test_each_line_is_logged_and_reported(tmp_path: Path) -> None:
    code = "import sys; print('half', file=sys.stderr); print('/folder')"
    out, err = fetch(tmp_path, code)
    assert json.loads(out) == {"event": "fetching", "line": "half"}
    assert err.split("|")[1].strip() == "half"


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("sys.stderr.write('error: no such model\\n'); sys.exit(64)", InputError, "no such model"),
        ("sys.stderr.write('error: full\\n'); sys.exit(70)", InternalError, "full"),
        ("sys.exit(70)", InternalError, "goodput engine fetch ended with code 70"),
        ("sys.exit(130)", Interrupted, "stopped while"),
        ("sys.exit(0)", Interrupted, "stopped while"),
    ],
    ids=["input", "disk", "no reason", "Ctrl-C", "SIGTERM"],
)
def test_the_error_of_the_command_ends_the_start(
    tmp_path: Path, code: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        fetch(tmp_path, f"import sys; {code}")
