"""The operator as a process: how `goodput operator` and `kopf run` report a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KOPF = str(Path(sys.executable).with_name("kopf"))
LOSES_LEASE = str(Path(__file__).parents[1] / "children" / "loses_lease.py")
OPTIONS = "--engine-image engine:1 --router-image router:1 --namespace team-a"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_failed_start_is_reported_in_one_sentence() -> None:
    options = f"{OPTIONS} --key-file /nowhere/key"
    ended = run(sys.executable, "-m", "goodput_core", "operator", *options.split())
    assert ended.returncode == 64
    (sentence,) = ended.stderr.splitlines()
    assert sentence.startswith("error: /nowhere/key: ")


def test_kopf_run_starts_the_operator_with_the_options_of_the_environment() -> None:
    options = f"{OPTIONS} --key-file /nowhere/key"
    module = "goodput_operator.manager.kopf_run"
    ended = run(KOPF, "run", "-n", "team-a", "-m", module, GOODPUT_OPERATOR_OPTIONS=options)
    assert ended.returncode != 0
    assert "/nowhere/key: " in ended.stderr


def test_kopf_run_rejects_an_invalid_option() -> None:
    module = "goodput_operator.manager.kopf_run"
    options = f"{OPTIONS} --workers 0"
    ended = run(KOPF, "run", "-A", "-m", module, GOODPUT_OPERATOR_OPTIONS=options)
    assert ended.returncode != 0
    assert "'0' is not a number of workers" in ended.stderr


def test_losing_the_lease_ends_the_operator_with_70_and_json_logs() -> None:
    ended = run(sys.executable, LOSES_LEASE, *OPTIONS.split())
    assert ended.returncode == 70, ended.stderr
    *logged, last = ended.stderr.splitlines()
    assert last == "error: the Lease is another's"
    assert [line for line in logged if "event" not in json.loads(line)] == []
