"""Shell completion knows every command and option, and runs without Python."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from goodput_core.dispatch import run_command

if TYPE_CHECKING:
    from pathlib import Path

BASH = shutil.which("bash") or ""
# The steps of bash when a user presses the tab key after these words.
PRESS_TAB = """
source "$1"; shift
function=$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
PATH=/nowhere
$function
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.mark.skipif(not BASH, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["goodput", "tr"], ["trace"], id="command"),
        pytest.param(["goodput", "trace", "d"], ["describe"], id="subcommand"),
        pytest.param(["goodput", "trace", "import", "--so"], ["--sort", "--source"], id="option"),
        pytest.param(["goodput", "replay", "cap"], ["capacity"], id="subcommand of its own parser"),
        pytest.param(["goodput", "completion", "z"], ["zsh"], id="choice"),
        pytest.param(["replay", "--emu"], ["--emulate"], id="replay"),
        pytest.param(["replay", "capacity", "--prec"], ["--precision"], id="replay's subcommand"),
        pytest.param(["goodput", "up", "-f", "man"], ["manifest.yaml"], id="file"),
    ],
)
def test_bash_completes(
    words: list[str],
    expected: list[str],
    scripts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = scripts / f"{words[0]}.bash"
    if not script.exists():
        assert run_command(["completion", "bash", words[0]]) == 0
        script.write_text(capsys.readouterr().out, encoding="utf-8")
    (tmp_path / "manifest.yaml").touch()
    done = subprocess.run(
        [BASH, "-c", PRESS_TAB, "bash", script, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.stdout.split() == expected, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
@pytest.mark.parametrize("program", ["goodput", "replay"])
def test_each_shell_gets_a_script_for_the_program(
    shell: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["completion", shell, program]) == 0
    script = capsys.readouterr().out
    assert "capacity" in script
    assert "python" not in script.lower()


def test_an_unknown_shell_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["completion", "zhs"]) == 64
    assert "did you mean zsh?" in capsys.readouterr().err
