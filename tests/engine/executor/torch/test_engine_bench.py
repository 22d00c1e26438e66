"""`goodput engine bench` counts the work of a model and measures its steps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.manifests import write_manifest
from tests.builders.torch_models import make_folder

from goodput_core.dispatch import run_command
from goodput_core.errors import UsageError
from goodput_core.steptime.forms import StepShape
from goodput_engine import bench as bench_module
from goodput_engine.executor.roofline import StepRoofline
from goodput_engine.executor.torch import start_up
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.roofline import measure_roofline
from goodput_engine.messages import Rejected

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_engine.executor.torch.model import PackedModel

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"), "Llama", tie_word_embeddings=False)


def test_the_work_of_a_model_is_that_of_its_shape(folder: Path) -> None:
    roofline = measure_roofline(load_model(folder))
    # By layer: queries and outputs of 4 heads, keys and values of 2, and three products of the MLP.
    attention, mlp = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48
    matrices, norms, head = 2 * (attention + mlp), 2 * 2 * 32 + 32, 97 * 32
    assert roofline.flops_per_token == 2 * matrices
    assert roofline.flops_per_sample == 2 * head
    assert roofline.flops_per_pair == 2 * 4 * 4 * 8
    assert roofline.weight_bytes == 4 * (matrices + norms + head)
    assert roofline.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert roofline.bytes_per_s > 1e8
    assert roofline.flops_per_s > 1e8


def test_a_shared_embedding_is_read_for_the_logits(tmp_path: Path) -> None:
    tied = measure_roofline(load_model(make_folder(tmp_path, "Llama", tie_word_embeddings=True)))
    assert tied.weight_bytes == 4 * (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 160 + 97 * 32)


def test_the_least_time_is_that_of_reading_or_of_computing() -> None:
    roofline = StepRoofline(
        weight_bytes=1_000,
        kv_bytes_per_token=10,
        flops_per_token=200,
        flops_per_sample=50,
        flops_per_pair=4,
        bytes_per_s=1e3,
        flops_per_s=1e4,
    )
    decodes = StepShape.of(decodes=2, decode_context_tokens=60)
    assert roofline.least_ns(decodes, 2) == pytest.approx((1_000 + 10 * 60) / 1e3 * 1e9)
    prompt = StepShape(
        num_requests=1,
        num_tokens=100,
        context_tokens=100,
        max_chunk_tokens=100,
        num_decodes=0,
        decode_context_tokens=0,
        prefill_squares=10_000,
    )
    flops = 200 * 100 + 50 + 4 * 5_000
    assert roofline.least_ns(prompt, 1) == pytest.approx(flops / 1e4 * 1e9)


def test_the_higher_of_two_measurements_of_each_rate_counts() -> None:
    one = StepRoofline(
        weight_bytes=1,
        kv_bytes_per_token=2,
        flops_per_token=3,
        flops_per_sample=4,
        flops_per_pair=5,
        bytes_per_s=100.0,
        flops_per_s=900.0,
    )
    # Other work slowed one of the two operations in each measurement.
    other = replace(one, bytes_per_s=300.0, flops_per_s=200.0)
    best = replace(one, bytes_per_s=300.0)
    assert one.with_higher_rates(other) == other.with_higher_rates(one) == best


def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, *options: str
) -> tuple[int, str, str]:
    """Run the command and return exit code, stdout and stderr."""
    manifest = write_manifest(tmp_path, model__source=source)
    code = run_command(["engine", "bench", "-f", str(manifest), "--threads", "1", *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_every_token_is_in_one_kind_of_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--input-tokens", "40", "--output-tokens", "9", "--concurrency", "1,7,3", "--json")
    code, out, err = bench(tmp_path, capsys, f"file://{folder}", *options)
    assert (code, err) == (0, "")
    report = json.loads(out)
    one = report["results"][0]
    assert [result["concurrency"] for result in report["results"]] == [1, 7, 3]
    for result in report["results"]:
        count = result["concurrency"]
        steps = {name: result[name]["steps"] for name in ("decode", "prefill", "mixed")}
        # The last token of a prompt gives the first output token.
        assert steps["decode"] >= 8 - steps["mixed"]
        assert result["decode"]["roofline_percent"] > 0
        assert result["prefill"]["roofline_percent"] > 0
        assert result["output_tokens_per_s"] == pytest.approx(count * 9 / result["seconds"], 0.1)
        assert 0 < result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"]
        assert 0 < result["tpot_ms"]["p50"] <= result["tpot_ms"]["p99"]
    assert one["mixed"] == {
        "steps": 0, "tokens_per_s": None, "step_ms": None, "roofline_percent": None
    }  # fmt: skip


def test_a_table_has_one_row_for_each_concurrency(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--input-tokens", "5", "--output-tokens", "1", "--concurrency", "2,1")
    code, out, _ = bench(tmp_path, capsys, f"file://{folder}", *options)
    assert code == 0
    rows = out.splitlines()[-2:]
    assert [row.split()[0] for row in rows] == ["2", "1"]
    assert "–" in rows[0]  # one output token has no time per output token


def test_limits_that_were_measured_under_load_are_measured_again(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first measurement is a thousandth of the true rates, so every share would be wrong."""
    measured: list[float] = []

    def measure(model: PackedModel) -> StepRoofline:
        slowed = 1 if measured else 1e-3
        true = measure_roofline(model)
        measured.append(true.flops_per_s)
        return replace(
            true, bytes_per_s=slowed * true.bytes_per_s, flops_per_s=slowed * true.flops_per_s
        )

    monkeypatch.setattr(start_up, "measure_roofline", measure)
    options = ("--input-tokens", "5", "--output-tokens", "3", "--concurrency", "1,2")
    code, out, _ = bench(tmp_path, capsys, f"file://{folder}", *options, "--json")
    assert code == 0
    report = json.loads(out)
    assert len(measured) == 3
    assert report["flops_per_s"] == round(max(measured[1:]))
    # A tiny model is far from the limits of any machine.
    assert all(one["decode"]["roofline_percent"] < 100 for one in report["results"])


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        ("emulated://llama-3-8b-h100", [], "emulates a device; set spec.model.source to file://"),
        (None, ["--input-tokens", "120", "--output-tokens", "9"], "add up to 129, but the context"),
        (None, ["--concurrency", "0"], "0"),
        (None, ["--concurrency", "1,257"], "--concurrency 257 exceeds spec.engine.maxNumSeqs, 256"),
        (None, ["--concurrency", "1,,2"], "a number of requests"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str | None,
    options: list[str],
    sentence: str,
) -> None:
    manifest = write_manifest(tmp_path, model__source=source or f"file://{folder}")
    assert run_command(["engine", "bench", "-f", str(manifest), *options]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("reason", "options"),
    [("too_long", "--input-tokens or --output-tokens"), ("memory_full", "--concurrency")],
)
def test_a_rejected_request_names_the_option_to_lower(reason: str, options: str) -> None:
    rejected = Rejected(rid=1, reason=reason, detail="the prompt is too long")
    with pytest.raises(UsageError) as caught:
        bench_module._require_admission([rejected])
    assert str(caught.value).endswith(f"the prompt is too long; give a lower {options}")


def test_without_a_concurrency_no_more_run_than_the_manifest_permits(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = write_manifest(tmp_path, model__source=f"file://{folder}", engine__maxNumSeqs=3)
    tokens = ["--input-tokens", "8", "--output-tokens", "3"]
    assert run_command(["engine", "bench", "-f", str(manifest), "--json", *tokens]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [one["concurrency"] for one in results] == [1, 3]
