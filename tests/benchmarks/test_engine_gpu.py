"""The short form of the benchmark for GPUs, on a CPU and from a bare checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from benchmarks.engine_gpu import break_even_tokens
from tests.engine.executor.torch.test_loading import WrongAttention

from benchmarks import engine_gpu

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
# A machine with a GPU may have torch, transformers and msgspec only.
BARE = """\
import runpy, sys
for name in ("aiohttp", "goodput_replay", "prometheus_client", "pyarrow", "rich", "uvloop"):
    sys.modules[name] = None
sys.argv = ["engine_gpu.py", "--quick", "--transformers"]
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
    for depth in ("", ", one plan ahead"):
        assert rows[f"outputs in float32{depth}"]["value"] == "384 tokens equal, 0 ties"
    for model in ("the small model", "the measured model"):
        row = rows[f"logits of {model} in float32"]
        assert (row["value"], row["met"]) == ("those of its own attention", True)
    same = rows["the same outputs with one plan ahead"]["value"]
    assert same == "24 of 24 greedy and 24 of 24 sampled ones"
    assert " tokens; at 256: " in rows["break-even of swap and recompute"]["value"]
    (replayed,) = (row for name, row in rows.items() if name.startswith("replay of 1 s"))
    assert " of 12 requests attained; TTFT p50 " in replayed["value"]
    beside = rows["ragged, transformers' continuous batching"]
    assert "output tokens/s; ours is " in beside["value"]
    assert isinstance(beside["met"], bool)
    assert {name.partition(",")[0].partition(" of ")[0] for name in rows} >= {
        *("device", "attention", "limits", "decode", "prefill", "swap", "ragged"),
    }


def test_a_failure_of_transformers_is_a_row_with_its_reason_and_a_missed_aim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its continuous batching runs in a thread, whose error is that of each request."""
    make_model, measured = engine_gpu.make_model, "goodput_paged"

    def fail(model: Any, _: object) -> None:
        if model.config._attn_implementation not in {measured, "eager"}:
            raise RuntimeError("no kernel | for\nthis device")

    def make_failing(*arguments: Any) -> Any:
        model = make_model(*arguments)
        model.register_forward_pre_hook(fail)
        return model

    for name in ("measure_steps", "measure_flash_attn", "measure_swap", "measure_replay"):
        monkeypatch.setattr(engine_gpu, name, lambda *_: None)
    monkeypatch.setattr(engine_gpu, "make_model", make_failing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert engine_gpu.main(["--quick", "--transformers"]) == 0
    *table, document = capsys.readouterr().out.splitlines()
    name, reason = "ragged, transformers' continuous batching", "no kernel {} for this device"
    (row,) = (row for row in json.loads(document) if row["name"] == name)
    assert row["value"] == f"failed: RuntimeError: {reason.format('|')}"
    assert (row["aim"], row["met"]) == ("1.5 times", False)
    escaped = reason.format("\\|")
    assert f"| {name} | failed: RuntimeError: {escaped} | 1.5 times | no |" in table


def test_nothing_is_measured_if_the_measured_model_has_wrong_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack, packed = engine_gpu.pack, []

    def pack_wrongly(model: Any) -> Any:
        packed.append(pack(model))
        if len(packed) == 2:  # the first one is the small model
            packed[-1].adapter = WrongAttention(lambda queries, keys: queries == 1 and keys > 10)
        return packed[-1]

    def measure(*_: object) -> None:
        raise AssertionError("a wrong model is measured")

    for name in ("measure_steps", "measure_flash_attn", "measure_swap", "measure_replay"):
        monkeypatch.setattr(engine_gpu, name, measure)
    monkeypatch.setattr(engine_gpu, "pack", pack_wrongly)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^the measured model: paged .* nothing is measured$"):
        engine_gpu.main(["--quick"])
    assert len(packed) == 2


@pytest.mark.parametrize(
    ("swap_s", "compute_s", "tokens"),
    [
        pytest.param([1.0, 2.0, 4.0], [3.0, 6.0, 12.0], 16, id="a copy is always faster"),
        pytest.param([1.0, 2.0, 4.0], [0.5, 1.0, 2.0], None, id="a copy is never faster"),
        pytest.param([2.0, 2.0, 2.0], [1.0, 4.0, 16.0], 32, id="between two lengths"),
        pytest.param([2.0, 2.0, 2.0], [3.0, 1.0, 5.0], 112, id="from the last change on"),
    ],
)
def test_the_break_even_is_the_length_from_which_a_copy_is_faster(
    swap_s: list[float], compute_s: list[float], tokens: int | None
) -> None:
    assert break_even_tokens([16, 64, 256], swap_s, compute_s) == tokens
