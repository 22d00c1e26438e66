"""The script of examples/trace-replay/nightly-aa-pair.yaml: which nights enter the history."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from goodput_replay.arguments import make_parser as replay_parser
from goodput_replay.compare.ab import make_parser

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/trace-replay/nightly-aa-pair.yaml"


def command() -> list[str]:
    job = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["spec"]["jobTemplate"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    words: list[str] = container["command"]
    return words


def test_the_pair_has_valid_options_and_one_server_as_both_builds() -> None:
    line = command()[2].partition("\ncode=")[0].replace("\\\n", " ")
    words = shlex.split(line)
    assert words[:3] == ["goodput", "replay", "ab"]
    given, options = make_parser().parse_known_args(words[3:])
    assert given.pairs == 1
    assert len(set(given.target)) == 1 < len(given.target)
    replay_parser().parse_args([*options, "--target", given.target[0]])


@pytest.mark.parametrize(
    ("code", "exit_code", "kept"),
    [
        pytest.param(0, 0, True, id="PASS"),
        pytest.param(1, 0, True, id="FAIL"),
        pytest.param(2, 0, True, id="INCONCLUSIVE"),
        pytest.param(3, 3, False, id="INVALID"),
        pytest.param(64, 64, False, id="usage"),
    ],
)
def test_a_night_enters_the_history_whatever_its_verdict_unless_it_is_invalid(
    tmp_path: Path, code: int, exit_code: int, kept: bool
) -> None:
    shell, option, script = command()
    recorder = tmp_path / "goodput"
    recorder.write_text(
        '#!/bin/sh\nfor word; do case "$word" in --out=*) mkdir -p "${word#--out=}";; esac; done\n'
        f"exit {code}\n",
        encoding="utf-8",
    )
    recorder.chmod(0o755)
    claim = tmp_path / "claim"
    claim.mkdir()
    for night in ("night-1", "night-2"):
        done = subprocess.run(
            [shell, option, script.replace("/claim", str(claim))],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "POD_NAME": night},
            check=False,
            timeout=30,
        )
        assert done.returncode == exit_code
    folder = claim / ("history" if kept else "running")
    assert sorted(path.name for path in folder.iterdir()) == ["night-1", "night-2"]
