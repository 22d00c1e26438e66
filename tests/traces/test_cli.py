"""`goodput trace` on the command line: help, usage errors, results on stdout, notes on stderr."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.traces.conftest import RunTrace


COMMANDS = ("import", "export", "describe", "synthesize")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_ends_in_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from goodput_traces.cli import main

    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "examples:\n  goodput trace" in text


@pytest.mark.parametrize("command", ["export", "describe", "synthesize"])
def test_the_examples_of_the_help_work_as_written(
    command: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_trace: RunTrace,
) -> None:
    from goodput_traces.cli import main

    with pytest.raises(SystemExit):
        main([command, "--help"])
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    monkeypatch.chdir(tmp_path)
    assert run_trace("synthesize", "--out", "prod.parquet").code == 0
    for line in examples:
        argv = shlex.split(line)
        assert argv[:2] == ["goodput", "trace"]
        assert run_trace(*argv[2:]).code == 0


@pytest.mark.parametrize(
    "argv",
    [[], ["frobnicate"], ["describe"], ["import", "x"], ["export", "sample", "--out", "x"],
     ["export", "sample", "--out", "x", "--format", "csv"], ["describe", "sample", "--colour"],
     ["import", "x", "--out", "y", "--block-size", "0"]],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_is_one_sentence_that_points_to_help(
    argv: list[str], run_trace: RunTrace
) -> None:
    outcome = run_trace(*argv)
    assert outcome.code == 64
    assert outcome.err.count("\n") == 1
    assert "--help" in outcome.err
    assert outcome.out == ""


def test_arguments_are_parsed_without_pyarrow() -> None:
    script = (
        "import sys\n"
        "from goodput_traces.cli import make_parser\n"
        "make_parser()\n"
        "print([name for name in ('numpy', 'pyarrow', 'rich', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"[]\n"


def test_out_has_a_short_form(tmp_path: Path, run_trace: RunTrace) -> None:
    out = tmp_path / "t.parquet"
    assert run_trace("synthesize", "-o", out, "--duration", "2s").code == 0
    assert out.is_file()
