"""The dispatcher: commands by name, errors as sentences, exit codes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from goodput_core.contract import ENV_DEBUG
from goodput_core.dispatch import run_command
from goodput_core.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = """
import errno
from goodput_core.errors import AbortedRun, InputError, Interrupted

def echo(argv):
    print(*argv)
    return 2

def bad_input(argv):
    raise InputError("trace.parquet: no column 'input_tokens'; import it first")

def aborted(argv):
    raise AbortedRun("more than 5% of requests failed")

def interrupted(argv):
    raise Interrupted("interrupted after 20 s; 100 records kept in run/")

def ctrl_c(argv):
    raise KeyboardInterrupt

def full_disk(argv):
    raise OSError(errno.ENOSPC, "No space left on device", "/runs/records.parquet")

def few_files(argv):
    raise OSError(errno.EMFILE, "Too many open files")

def broken_file(argv):
    raise OSError(errno.EIO, "Input/output error", "/runs/records.parquet")

def out_of_memory(argv):
    raise MemoryError

def bug(argv):
    return 1 / 0

def broken_pipe(argv):
    raise BrokenPipeError

def rich_on_a_broken_pipe(argv):
    raise SystemExit(1)

def asked_for_help(argv):
    raise SystemExit(0)

def quotes(argv):
    from goodput_core.errors import UsageError
    raise UsageError("the target serves \\x1b]0;owned\\x07\\nerror: nothing")

def lazy(argv):
    import a_package_that_is_not_installed

def broken(argv):
    import goodput_core.a_module_that_is_missing
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real distribution on the path, whose entry points are the functions above."""
    (tmp_path / "planted_commands.py").write_text(COMMANDS)
    names = [line[4:].split("(")[0] for line in COMMANDS.splitlines() if line.startswith("def ")]
    info = tmp_path / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    entries = "".join(f"{name} = planted_commands:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(
        f"[goodput.commands]\n{entries}uninstalled = planted_commands_that_need:numpyy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(ENV_DEBUG, raising=False)


def test_a_command_receives_its_arguments_and_returns_its_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["echo", "--a", "b"]) == 2
    assert capsys.readouterr().out == "--a b\n"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        pytest.param("bad_input", 64, "no column 'input_tokens'", id="bad-input"),
        pytest.param("aborted", 3, "more than 5%", id="aborted-run"),
        pytest.param("interrupted", 130, "100 records kept", id="interrupted-and-kept"),
        pytest.param("ctrl_c", 130, "interrupted", id="ctrl-c"),
        pytest.param("full_disk", 70, "disk is full at /runs/records.parquet", id="full-disk"),
        pytest.param("few_files", 70, "raise the limit with `ulimit -n`", id="file-limit"),
        pytest.param("broken_file", 70, "Input/output error", id="another-file-error"),
        pytest.param("out_of_memory", 70, "--window or --limit", id="out-of-memory"),
        pytest.param("bug", 70, "internal error: ZeroDivisionError", id="a-bug"),
        pytest.param("nonsense", 64, "no command 'nonsense'; commands are up,", id="unknown"),
        pytest.param("relpay", 64, "no command 'relpay'; did you mean replay?;", id="misspelt"),
        pytest.param("uninstalled", 64, "pip install '.[all]'", id="missing-extra"),
        pytest.param("lazy", 64, "pip install '.[all]'", id="missing-extra-later"),
        pytest.param("broken", 70, "internal error: ModuleNotFoundError", id="our-module-missing"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    command: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([command]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_control_characters_of_an_error_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["quotes"]) == ExitCode.USAGE
    expected = r"error: the target serves \x1b]0;owned\x07\nerror: nothing"
    assert capsys.readouterr().err == f"{expected}\n"


def test_the_traceback_of_a_bug_is_shown_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_DEBUG, "1")
    assert run_command(["bug"]) == ExitCode.INTERNAL
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["broken_pipe", "rich_on_a_broken_pipe"])
def test_a_broken_pipe_has_no_exit_code_of_a_verdict(command: str) -> None:
    assert run_command([command]) == ExitCode.CLOSED_OUTPUT


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_an_output_on_a_full_disk_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "goodput_core", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == ExitCode.INTERNAL
    assert done.stderr == "error: the disk is full; free some space and run again\n"


WAITS = """
import time

def wait(argv):
    try:
        print("waiting", flush=True)
        time.sleep(3600)
    finally:
        print("cleaned up")
"""
RUN = "import sys; from goodput_core.dispatch import main; sys.argv[1:] = ['wait']; main()"


@pytest.fixture
def waiting(tmp_path: Path) -> list[str]:
    """Return a command that reports when it waits and when it has cleaned up."""
    (tmp_path / "planted_commands.py").write_text(WAITS)
    entry_points = tmp_path / "planted-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text("[goodput.commands]\nwait = planted_commands:wait\n")
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {RUN}"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_signal_interrupts_a_command_after_its_cleanup(waiting: list[str], number: int) -> None:
    with subprocess.Popen(
        waiting, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "waiting\n"
        command.send_signal(number)
        output, message = command.communicate(timeout=30)
    assert (command.returncode, output, message) == (130, "cleaned up\n", "error: interrupted\n")


def test_a_closed_terminal_is_not_written_to(waiting: list[str]) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(waiting, stdout=subprocess.PIPE, stderr=theirs, text=True) as command:
        assert command.stdout is not None
        command.stdout.readline()
        os.close(theirs)
        os.close(ours)
        command.send_signal(signal.SIGHUP)
        assert command.wait(30) == 130


def test_a_command_under_nohup_survives_the_hang_up(waiting: list[str]) -> None:
    with subprocess.Popen(
        ["nohup", *waiting], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        command.stdout.readline()
        command.send_signal(signal.SIGHUP)
        command.send_signal(signal.SIGTERM)
        _, message = command.communicate(timeout=30)
    assert message.endswith("error: interrupted\n")


@pytest.mark.parametrize(("arguments", "code"), [("--version", 0), ("nothing", ExitCode.USAGE)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_does_not_change_the_exit_code(
    arguments: str, code: int, closed: str
) -> None:
    command = f"{sys.executable} -m goodput_core {arguments} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_help_of_a_command_exits_0() -> None:
    assert run_command(["asked_for_help"]) == 0


@pytest.mark.parametrize(
    ("argv", "code"),
    [(["--help"], 0), (["help"], 0), (["help", "help"], 0), ([], 64)],
    ids=["--help", "help", "help help", "none"],
)
def test_usage_lists_every_command(
    argv: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(argv) == code
    printed = capsys.readouterr().out
    for name in ("up", "operator", "replay", "trace", "engine", "router", "device"):
        assert f"  {name} " in printed


@pytest.mark.parametrize(
    ("argv", "passed"),
    [
        pytest.param(["help", "echo"], "--help", id="command"),
        pytest.param(["help", "echo", "sub"], "sub --help", id="subcommand"),
    ],
)
def test_help_is_passed_on_to_the_command(
    argv: list[str], passed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(argv) == 2
    assert capsys.readouterr().out == f"{passed}\n"


def test_help_of_an_unknown_command_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help", "trce"]) == 64
    assert "did you mean trace?" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out.startswith("goodput ")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_help_into_a_closed_pipe_prints_no_error(unbuffered: str) -> None:
    script = "from goodput_core.dispatch import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, "--help"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONUNBUFFERED": unbuffered},
    )
    assert child.stdout is not None
    child.stdout.close()
    child.stdout = None
    _, complaint = child.communicate(timeout=30)
    assert complaint == b""


def test_ctrl_c_while_the_modules_are_loaded_prints_no_traceback() -> None:
    script = (
        "import os, signal, sys\n"
        "class InterruptedFinder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'goodput_core.dispatch': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, InterruptedFinder())\n"
        "from goodput_core.entry import replay; replay()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_only_the_typed_command_is_imported() -> None:
    script = (
        "import sys; from goodput_core.dispatch import run_command; run_command(['--help']);"
        "print([m for m in sys.modules if m.startswith('goodput_') and 'core' not in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.endswith("[]\n")
