"""The short form of the benchmark for GPUs, on a CPU and from a bare checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
# A machine with a GPU may have torch, transformers and msgspec only.
BARE = """\
import runpy, sys
for name in ("aiohttp", "goodput_replay", "prometheus_client", "pyarrow", "rich", "uvloop"):
    sys.modules[name] = None
sys.argv = ["engine_gpu.py", "--quick"]
runpy.run_path("benchmarks/engine_gpu.py", run_name="__main__")
"""


def test_a_bare_checkout_compares_outputs_and_measures_everything() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", BARE],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert finished.returncode == 0
    rows = {row["name"]: row for row in json.loads(finished.stdout.splitlines()[-1])}
    assert rows["outputs in float32"]["value"] == "384 tokens equal, 0 ties"
    (replayed,) = (row for name, row in rows.items() if name.startswith("replay of 1 s"))
    assert " of 12 requests attained; TTFT p50 " in replayed["value"]
    assert {name.partition(",")[0].partition(" of ")[0] for name in rows} >= {
        *("device", "attention", "limits", "decode", "prefill", "swap", "ragged"),
    }
