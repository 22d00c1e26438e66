"""Bad input of an emulation: one sentence with the field and the remedy, and no run folder."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.builders.manifests import write_manifest
from tests.builders.traces import trace_row, write_rows

from goodput_core.dispatch import run_command
from goodput_engine.device.load import load_profile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace of two requests, with 200 and with 50 prompt tokens."""
    rows = (
        trace_row(n, at_s=n, input_tokens=tokens, output_tokens=10, ttft_target_ms=500.0)
        for n, tokens in enumerate((200, 50))
    )
    return write_rows(tmp_path / "t.parquet", rows)


def _device(folder: Path, **numbers: int) -> Path:
    """Return the file of the unit device with other numbers."""
    profile = load_profile("unit")
    lines = ["name: small", "description: for a test", "form: unit", "overlap: add", "numbers:"]
    for name, value in (dict(profile.numbers) | numbers).items():
        lines.append(f"  {name}: {{value: {value}, from: a test}}")
    path = folder / "small.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def error_of(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a replay that must fail before it starts, and return its sentence."""

    def run(*options: object, **changes: object) -> str:
        path, out = write_manifest(tmp_path, "emulated", **changes), tmp_path / "run"
        arguments = ("--trace", trace, "--emulate", path, "--out", out, *options)
        assert run_command(["replay", *map(str, arguments)]) == 64
        assert not out.exists(), "nothing was started"
        printed = capsys.readouterr()
        assert printed.out == ""
        lines = printed.err.strip().splitlines()
        assert len(lines) == 1
        return lines[0]

    return run


def test_kv_memory_that_is_too_small_for_every_request(
    error_of: Callable[..., str], tmp_path: Path
) -> None:
    error = error_of("--device", _device(tmp_path, kv_blocks=3))
    assert "no request fits on the device profile small: the shortest has 51 tokens" in error
    assert "the KV memory (kv_blocks) holds 48" in error
    assert error.endswith("choose another device with --device")


def test_a_context_that_is_too_short_for_every_request(
    error_of: Callable[..., str], tmp_path: Path
) -> None:
    error = error_of("--device", _device(tmp_path, max_model_tokens=50))
    assert "and the context (max_model_tokens) 50" in error


def test_kv_memory_that_is_too_small_is_found_before_a_service_is_started(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write_manifest(tmp_path, "emulated"), tmp_path / "run"
    device = _device(tmp_path, kv_blocks=3)
    options = ("--trace", trace, "-f", path, "--device", device, "--out", out)
    assert run_command(["replay", *map(str, options)]) == 64
    assert not out.exists()
    assert "no request fits on the device profile small" in capsys.readouterr().err


def test_kv_memory_for_one_of_the_requests_suffices(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write_manifest(tmp_path, "emulated"), tmp_path / "run"
    device = _device(tmp_path, kv_blocks=4)
    options = ("--trace", trace, "--emulate", path, "--device", device, "--out", out)
    assert run_command(["replay", *map(str, options), "--no-report"]) != 64
    printed = " ".join(capsys.readouterr().out.split())
    assert "HTTP 400: the prompt is too long; this model's context of 65 must hold" in printed


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        pytest.param({"min": 8, "max": 8, "initial": 8}, "is 8, less than", id="fixed"),
        pytest.param({"min": 15}, "set at least 16", id="minimum"),
    ],
)
def test_a_token_budget_below_one_block(
    error_of: Callable[..., str], budget: dict[str, int], words: str
) -> None:
    error = error_of(engine__tokenBudget=budget)
    assert "chat.yaml: spec.engine.tokenBudget.min: " in error
    assert words in error


def test_a_token_budget_of_a_pool_below_one_block(
    error_of: Callable[..., str], tmp_path: Path
) -> None:
    topology = tmp_path / "two.yaml"
    topology.write_text("prefill: {replicas: 1, tokenBudget: 8}\ndecode: {replicas: 1}\n")
    error = error_of("--topology", topology)
    assert "--topology: prefill.tokenBudget: is 8, less than one KV block" in error


def test_a_token_budget_of_a_comparison_below_one_block(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_manifest(tmp_path, "emulated")
    options = ("--trace", trace, "-f", path, "--budgets", "512,8", "--illustrative")
    assert run_command(["policies", *map(str, options)]) == 64
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--budgets: is 8, less than one KV block" in printed.err


@pytest.mark.parametrize("column", ["ttft_target_ms", "tpot_target_ms", "e2e_target_ms"])
@pytest.mark.parametrize("value", [0.0, -5.0, float("nan"), float("inf")])
def test_a_target_of_a_row_that_is_not_positive(
    error_of: Callable[..., str], trace: Path, column: str, value: float
) -> None:
    table = pq.read_table(trace)
    values = pa.array([500.0, value], pa.float64())
    others = table.drop_columns([c for c in [column] if c in table.column_names])
    pq.write_table(others.append_column(column, values), trace)
    assert f"t.parquet: row 2, column {column}: " in error_of()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        pytest.param("weight", 0, "must lie in 1 to 1000000, not 0", id="zero weight"),
        pytest.param("weight", math.nan, "must be a whole number, not nan", id="NaN"),
        pytest.param("weight", -1, "must lie in", id="negative weight"),
        pytest.param("weight", 1.5, "must be a whole number", id="fraction"),
        pytest.param("priority", 1.5, "must be a whole number", id="priority"),
        pytest.param("priority", 3_000_000_000, "must lie in", id="large priority"),
        pytest.param("e2eMs", 0, "must lie in 1 to", id="target of zero"),
        pytest.param("e2eMs", -5, "must lie in 1 to", id="deadline in the past"),
    ],
)
def test_a_class_with_an_invalid_field(
    error_of: Callable[..., str], field: str, value: float, words: str
) -> None:
    error = error_of(slo={"classes": [{"name": "a", "ttftMs": 5, "tpotMs": 5, field: value}]})
    assert f"spec.slo.classes[0].{field}: {words}" in error


def test_a_file_of_classes_is_checked_in_the_same_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slo, out = tmp_path / "slo.yaml", tmp_path / "run"
    slo.write_text("classes: [{name: a, ttftMs: 5, tpotMs: 5, weight: .nan}]\n")
    target = ("--target", "http://127.0.0.1:1", "--out", out)
    assert run_command(["replay", "--trace", "sample", "--slo", str(slo), *map(str, target)]) == 64
    assert not out.exists()
    assert "classes[0].weight: must be a whole number, not nan" in capsys.readouterr().err


def test_a_class_without_targets(error_of: Callable[..., str]) -> None:
    error = error_of(slo={"classes": [{"name": "a"}]})
    words = "spec.slo.classes[0].ttftMs: is required; write ttftMs: NUMBER, in milliseconds"
    assert error.endswith(words)
