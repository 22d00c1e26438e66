"""Arguments are parsed before heavy packages are imported, so help and errors are fast."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("numpy", "pyarrow", "aiohttp", "matplotlib", "uvloop", "yaml")
LIMIT = 4
"""Processor time, in multiples of that of two modules of the standard library."""
ATTEMPTS = 3
"""A busy machine also costs processor time, so the fastest of some attempts counts."""


@pytest.fixture(scope="module")
def limit_s() -> float:
    script = "import argparse, asyncio, time; print(time.process_time())"
    starts = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for _ in range(ATTEMPTS)
    ]
    return LIMIT * min(float(start.stdout) for start in starts)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["replay", "--help"], 0),
        (["replay", "--no-such-option"], 64),
        (["replay", "--trace", "sample"], 64),
        (["replay", "report", "--help"], 0),
        (["replay", "report"], 64),
        (["replay", "capacity", "--help"], 0),
        (["policies", "--help"], 0),
        (["policies", "--budgets", "none"], 64),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_help_and_usage_errors_import_nothing_heavy(
    arguments: list[str], code: int, limit_s: float
) -> None:
    script = (
        "import sys, time\n"
        "from goodput_core.dispatch import run_command\n"
        f"code = run_command({arguments!r})\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(code, heavy, time.process_time(), file=sys.stderr)\n"
    )
    times = []
    for _ in range(ATTEMPTS):
        ended = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        found, heavy, cpu_s = ended.stderr.splitlines()[-1].split(" ", 2)
        assert int(found) == code, ended.stderr
        assert heavy == "[]"
        times.append(float(cpu_s))
        if times[-1] < limit_s:
            break
    assert min(times) < limit_s
