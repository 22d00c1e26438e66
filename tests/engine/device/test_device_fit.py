"""`goodput device fit`: from a step log to a profile."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from goodput_core.errors import InputError, UsageError
from goodput_core.steptime import PiecewiseForm, RooflineForm, StepShape, StepTimeForm
from goodput_engine.cli import device
from goodput_engine.device.load import load_profile
from goodput_engine.device.step_log import STEP_COLUMNS

if TYPE_CHECKING:
    from pathlib import Path

LAW = RooflineForm(
    c0_ns=8e6, c1_ns_per_token=40_000, c2_ns_per_context_token=60, c4_ns_per_request=9_000
)


CURVE = PiecewiseForm(
    tokens=(1, 8, 32, 512),
    times_ns=(66e6, 100e6, 192e6, 1_400e6),
    c2_ns_per_context_token=900,
    c3_ns_per_square=40,
    c4_ns_per_request=300_000,
)


def write_log(
    path: Path,
    count: int = 2000,
    *,
    most_prefill: int = 2048,
    law: StepTimeForm = LAW,
    host_ns: int | None = None,
) -> Path:
    """Steps by a law, with 1 % of noise; each waits `host_ns` and 10 µs per request if given."""
    draw = random.Random(count)
    rows = []
    at_ns = 0
    for number in range(count):
        decodes = draw.randint(1, 100)
        shape = StepShape.of(
            decodes=decodes,
            decode_context_tokens=decodes * draw.randint(100, 2000),
            chunks=[(0, draw.randint(1, most_prefill))] if draw.random() < 0.3 else [],
        )
        step_ns = round(law.step_ns(shape) * draw.gauss(1, 0.01))
        if host_ns is not None:
            # A tenth of the steps waits for other reasons.
            idle_ns = 10**9 if draw.random() < 0.1 else 0
            at_ns += step_ns + host_ns + 10_000 * shape.num_requests + idle_ns
        rows.append(
            {
                "at_ns": number if host_ns is None else at_ns,
                "step_ns": step_ns,
                **{name: getattr(shape, name) for name in STEP_COLUMNS[2:]},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "steps.parquet")


def test_coefficients_and_their_held_out_error_are_printed(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert device(["fit", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["c0_ms"] == pytest.approx(8, rel=0.02)
    assert told["c1_us_per_token"] == pytest.approx(40, rel=0.02)
    assert told["c2_ns_per_context_token"] == pytest.approx(60, rel=0.05)
    assert told["c4_us_per_request"] == pytest.approx(9, rel=0.2)
    assert (told["steps"], told["held_out_steps"], told["profile"]) == (2000, 400, None)
    assert told["p50_error"] == pytest.approx(0.0067, abs=0.0015), "the median of |N(0, 1 %)|"
    assert told["p95_error"] == pytest.approx(0.0196, abs=0.004)
    device(["fit", str(log)])
    table = capsys.readouterr().out
    assert "c0_ms" in table
    assert "of the 400 held out" in table


def test_a_fitted_profile_predicts_so_and_takes_the_rest_from_its_base(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    assert device(["fit", str(log), "--base", "opt-13b-a100", "--out", str(out)]) == 0
    assert f"wrote {out}\n" in capsys.readouterr().out
    profile, base = load_profile(str(out)), load_profile("opt-13b-a100")
    assert (profile.name, profile.form_name) == ("mine", "roofline")
    step = StepShape.of(decodes=50, decode_context_tokens=50_000, chunks=[(0, 1000)])
    assert profile.form.step_ns(step) == pytest.approx(LAW.step_ns(step), rel=0.01)
    assert (profile.kv_blocks, profile.overlap) == (base.kv_blocks, base.overlap)
    assert profile.provenance["c0_ms"].startswith("fitted to 2,000 steps of steps.parquet; held")
    assert profile.provenance["kv_blocks"].startswith("opt-13b-a100: published: 66,144 tokens")


def test_a_cpu_gets_a_piecewise_form_and_its_host_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path / "cpu.parquet", 3000, most_prefill=480, law=CURVE, host_ns=2_000_000)
    out = tmp_path / "cpu.yaml"
    assert device(["fit", str(log), "--base", "opt-13b-a100", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["form"] == "piecewise"
    assert told["p50_error"] < 0.01
    profile = load_profile(str(out))
    assert profile.form_name == "piecewise"
    step = StepShape.of(decodes=20, decode_context_tokens=10_000, chunks=[(0, 100)])
    assert profile.form.step_ns(step) == pytest.approx(CURVE.step_ns(step), rel=0.02)
    assert profile.host_ns_per_step == pytest.approx(2_000_000, rel=0.01)
    assert profile.host_ns_per_request == pytest.approx(10_000, rel=0.05)
    assert device(["show", str(out)]) == 0
    assert "step times in ms by tokens, from: fitted to 3,000 steps" in capsys.readouterr().out
    assert device(["fit", str(log), "--form", "roofline", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["p50_error"] > 0.02


def test_what_is_fitted_to_an_illustrative_base_stays_illustrative(
    log: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.yaml"
    device(["fit", str(log), "--base", "published-70b-table", "--out", str(out)])
    assert load_profile(str(out)).illustrative


def test_a_profile_is_not_replaced(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    out.write_text("keep", encoding="utf-8")
    with pytest.raises(InputError, match="exists; name another file"):
        device(["fit", str(log), "--base", "unit", "--out", str(out)])
    assert out.read_text(encoding="utf-8") == "keep"


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        pytest.param(
            ["--out", "x.yaml"], UsageError, "--out and --base must be given together", id="no base"
        ),
        pytest.param(
            ["--base", "unit"], UsageError, "--out and --base must be given together", id="no out"
        ),
        pytest.param(
            ["--out", "x.txt", "--base", "unit"], UsageError, "must end in .yaml", id="no YAML"
        ),
        pytest.param(["--form", "line"], UsageError, r"choose from 'auto', ", id="form"),
        pytest.param(
            ["--out", "x.yaml", "--base", "gpu"], InputError, "no device profile", id="base"
        ),
        pytest.param(
            ["--out", "/no/such/x.yaml", "--base", "unit"], InputError, "cannot be", id="folder"
        ),
    ],
)
def test_what_cannot_be_written_is_one_sentence(
    options: list[str], error: type[Exception], problem: str, log: Path
) -> None:
    with pytest.raises(error, match=problem):
        device(["fit", str(log), *options])


def test_a_log_that_shows_too_little_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    few = write_log(tmp_path / "few.parquet", 99)
    with pytest.raises(InputError, match=r"few\.parquet: has 99 steps; a fit needs at least 100"):
        device(["fit", str(few)])
    small = write_log(tmp_path / "small.parquet", 500, most_prefill=20)
    with pytest.raises(InputError, match=r"small\.parquet: no step is large enough .* longer prom"):
        device(["fit", str(small)])
