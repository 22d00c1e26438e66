"""`kopf run` ends as `goodput operator` does: one sentence, the same code, the same logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from goodput_operator.manager.under_kopf import register

KOPF = Path(sys.executable).with_name("kopf")
SHORT = Path(__file__).parents[1] / "children" / "under_kopf.py"
IMAGES = "--engine-image engine:1 --router-image router:1"


def kopf_run(*words: str, options: str = IMAGES) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KOPF, "run", *words],
        env={**os.environ, "GOODPUT_OPERATOR_OPTIONS": options},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("watched", "options", "said"),
    [
        pytest.param(
            (),
            "--namespace team-a",
            "kopf run watches all namespaces and GOODPUT_OPERATOR_OPTIONS names the namespaces "
            "team-a;",
            id="one of all",
        ),
        pytest.param(
            ("team-b", "team-a"),
            "--namespace team-a",
            "kopf run watches the namespaces team-a, team-b and",
            id="one of two",
        ),
        pytest.param(("team-a",), "", "names all namespaces;", id="all, where one is watched"),
        pytest.param((), "--workers 0", "'0' is not a number of workers", id="no option"),
    ],
)
def test_what_cannot_be_is_refused(
    watched: tuple[str, ...], options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with click.Context(click.Command("run")) as context:
        context.params["namespaces"] = watched
        with pytest.raises(click.exceptions.Exit) as refused:
            register([*IMAGES.split(), *options.split()], lambda *_: pytest.fail("it is made"))
    assert said in capsys.readouterr().err
    assert refused.value.exit_code == 64


def goodput_operator(options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "goodput_core", "operator", *options.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("how", ["kopf run", "goodput operator"])
def test_an_operator_that_cannot_start_says_why_in_one_sentence(how: str) -> None:
    options = f"{IMAGES} --namespace team-a --key-file /nowhere/key"
    if how == "kopf run":
        module = ["-m", "goodput_operator.manager.kopf_run"]
        ended = kopf_run("-n", "team-a", *module, options=options)
    else:
        ended = goodput_operator(options)
    assert ended.returncode == 64
    (sentence,) = ended.stderr.splitlines()
    assert sentence.startswith("error: /nowhere/key: ")


def test_an_operator_that_lost_the_lease_ends_with_70_and_logs_json() -> None:
    ended = kopf_run("-A", str(SHORT))
    assert ended.returncode == 70, ended.stderr
    *logged, last = ended.stderr.splitlines()
    assert last == "error: the Lease is another's"
    assert [line for line in logged if "event" not in json.loads(line)] == []
