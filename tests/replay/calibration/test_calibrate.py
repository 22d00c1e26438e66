"""`goodput device calibrate`: known devices are recovered from the records of runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.builders.manifests import manifest_text

from goodput_core.dispatch import run_command
from goodput_core.errors import InputError, UsageError
from goodput_core.steptime import StepShape
from goodput_core.units import NS_PER_MS
from goodput_engine.device.fit import FormChoice
from goodput_engine.device.load import load_profile
from goodput_replay.calibration.calibration import ObservedRun, calibrate
from goodput_replay.calibration.command import main
from goodput_replay.calibration.requests import read_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_replay.calibration.calibration import CalibratedDevice
    from goodput_replay.calibration.requests import ObservedRequest

    Replay = Callable[..., Path]

CPU = """\
name: cpu
description: A small model on a CPU.
form: piecewise
overlap: add
curve: {from: a test, tokens: [1, 8, 32, 512], step_ms: [66, 100, 192, 1400]}
numbers:
  c2_ns_per_context_token: {value: 3000, from: a test}
  c3_ns_per_square: {value: 100, from: a test}
  c4_us_per_request: {value: 200, from: a test}
  host_ms_per_step: {value: 1, from: a test}
  host_us_per_request: {value: 0, from: a test}
  kv_blocks: {value: 4000, from: a test}
  block_size: {value: 16, from: a test}
  kv_bytes_per_token: {value: 46080, from: a test}
  max_model_tokens: {value: 8192, from: a test}
  vocab_size: {value: 49152, from: a test}
  tensor_parallel: {value: 1, from: a test}
  swap_gb_per_s: {value: 5, from: a test}
  link_gb_per_s: {value: 5, from: a test}
  startup_seconds: {value: 5, from: a test}
"""
SHAPES = [
    StepShape.of(decodes=4, decode_context_tokens=3_000),
    StepShape.of(decodes=8, decode_context_tokens=8_000, chunks=[(0, 400)]),
    StepShape.of(chunks=[(0, 300)]),
]


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    """Replay a generated load in virtual time; return the run's folder."""

    def run(
        name: str,
        device: str,
        policy: str = "sarathi",
        *,
        rate: str,
        seconds: int,
        prompts: str,
        running: int = 256,
    ) -> Path:
        manifest = tmp_path / f"{name}.yaml"
        engine = {
            "policy": policy,
            "tokenBudget": {"min": 64, "max": 8192, "initial": 2048},
            "maxNumSeqs": running,
        }
        fields = {f"engine__{key}": value for key, value in engine.items()}
        text = manifest_text("emulated", **fields)
        manifest.write_text(text, encoding="utf-8")
        folder = tmp_path / name
        load = ["--rate", rate, "--duration", f"{seconds}s", "--input-tokens", prompts]
        load += ["--output-tokens", "80~80%", "--device", device, "--emulate", str(manifest)]
        assert run_command(["replay", *load, "-o", str(folder), "--no-report"]) == 0
        return folder

    return run


@pytest.fixture
def cpu(tmp_path: Path) -> str:
    path = tmp_path / "cpu.yaml"
    path.write_text(CPU, encoding="utf-8")
    return str(path)


def calibrated(*folders: Path) -> CalibratedDevice:
    runs = [ObservedRun(folder=one, requests=read_requests(one)) for one in folders]
    return calibrate(runs, choice=FormChoice.AUTO, service=None, base=None)


def errors(found: CalibratedDevice) -> dict[str, float]:
    return {one.name: abs(one.error) for one in found.latencies}


@pytest.mark.parametrize(
    ("device", "policy", "rate", "seconds", "prompts"),
    [
        pytest.param("llama-3-8b-h100", "sarathi", "12/s", 30, "900~150%", id="chunked prompts"),
        pytest.param("llama-3-8b-h100", "vllm", "12/s", 25, "600~100%", id="prompts alone"),
        pytest.param("llama-3-8b-h100", "sjf", "20/s", 20, "600~100%", id="another order"),
        pytest.param("opt-13b-a100", "sarathi", "2/s", 60, "500~60%", id="squares and host time"),
        pytest.param("cpu", "sarathi", "10/m", 900, "120~60%", id="a curve"),
    ],
)
def test_a_known_device_is_recovered(
    replay: Replay, cpu: str, device: str, policy: str, rate: str, seconds: int, prompts: str
) -> None:
    device = cpu if device == "cpu" else device
    folder = replay("run", device, policy, rate=rate, seconds=seconds, prompts=prompts)
    found, truth = calibrated(folder), load_profile(device)
    # Prompts alone are cheaper by DistServe's law, which a law over all tokens cannot express.
    sums = truth.form_name == "distserve"
    for shape in SHAPES[: 2 if sums else None]:
        expected_ns = truth.form.step_ns(shape)
        if truth.default_depth == 0:
            expected_ns += truth.host_ns(shape.num_requests)
        assert found.form.step_ns(shape) == pytest.approx(expected_ns, rel=0.05), shape
    off = errors(found)
    assert off["TPOT p50"] < 0.02
    assert off["TBT p50"] < 0.02
    assert off["TTFT p50"] < (0.15 if sums else 0.05)
    assert off["TTFT p99"] < 0.15


def test_the_profile_predicts_a_load_that_was_not_calibrated(
    replay: Replay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = replay("low", "llama-3-8b-h100", rate="8/s", seconds=40, prompts="600~100%")
    out = tmp_path / "mine.yaml"
    assert run_command(["device", "calibrate", str(folder), "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "c0_ms" in printed
    assert "TTFT p99" in printed
    assert printed.endswith(f"wrote {out}\n")
    busy = {
        name: read_requests(replay(name, device, rate="24/s", seconds=30, prompts="900~100%"))
        for name, device in (("measured", "llama-3-8b-h100"), ("predicted", str(out)))
    }
    for share, bound in ((0.5, 0.05), (0.99, 0.1)):
        measured, predicted = (
            np.quantile([one.record.ttft_ns for one in busy[name]], share)
            for name in ("measured", "predicted")
        )
        assert predicted == pytest.approx(measured, rel=bound)
    profile = load_profile(str(out))
    assert profile.provenance["c0_ms"].startswith("calibrated with ")
    assert profile.provenance["kv_blocks"].startswith("assumed: 4 times the ")


def test_the_jitter_and_the_delay_of_a_network_do_not_hide_the_law(replay: Replay) -> None:
    folder = replay("run", "llama-3-8b-h100", rate="12/s", seconds=40, prompts="900~100%")
    draw = np.random.default_rng(1)
    requests = []
    for one in read_requests(folder):
        late = draw.exponential(0.3 * NS_PER_MS, len(one.times_ns)).astype(np.int64)
        times_ns = np.maximum.accumulate(one.times_ns + late)
        sent_ns = one.arrival_ns - 2 * NS_PER_MS
        record = replace(
            one.record,
            sent_ns=sent_ns,
            first_token_ns=int(times_ns[0]),
            last_token_ns=int(times_ns[-1]),
            gaps_us=tuple((np.diff(times_ns) // 1_000).tolist()),
        )
        requests.append(replace(one, record=record, arrival_ns=sent_ns, times_ns=times_ns))
    run = ObservedRun(folder=folder, requests=requests)
    found = calibrate([run], choice=FormChoice.AUTO, service=None, base=None)
    truth = load_profile("llama-3-8b-h100")
    for shape in SHAPES:
        assert found.form.step_ns(shape) == pytest.approx(truth.form.step_ns(shape), rel=0.05)
    assert found.delay_ns == pytest.approx(2.8 * NS_PER_MS, abs=NS_PER_MS)
    assert errors(found)["TPOT p50"] < 0.02


def test_the_limits_of_a_server_are_inferred(replay: Replay) -> None:
    folder = replay("run", "llama-3-8b-h100", rate="12/s", seconds=30, prompts="2500~60%")
    found = calibrated(folder)
    assert (found.policy, found.overlap, found.token_budget) == ("sarathi", "max", 2048)


@pytest.mark.parametrize(("running", "rate"), [(1, "8/m"), (3, "30/m")])
def test_a_server_that_runs_few_requests_at_once_is_recognized(
    replay: Replay, cpu: str, running: int, rate: str
) -> None:
    folder = replay("run", cpu, rate=rate, seconds=600, prompts="64~60%", running=running)
    found = calibrated(folder)
    assert found.max_num_seqs == running
    assert all(error < 0.05 for error in errors(found).values())


def test_a_server_with_unsteady_steps_that_runs_one_request_at_a_time_is_recognized(
    replay: Replay, cpu: str
) -> None:
    folder = replay("run", cpu, rate="90/m", seconds=120, prompts="64~60%")
    run, slowed = (
        ObservedRun(folder=folder, requests=one_at_a_time(read_requests(folder), slower=slower))
        for slower in (1, 3)
    )
    found = calibrate([run], choice=FormChoice.AUTO, service=None, base=None)
    assert found.max_num_seqs == 1
    off = errors(found)
    assert max(off["TTFT p50"], off["TTFT p99"]) < 0.1
    assert max(off["TPOT p50"], off["TPOT p99"]) < 0.05
    assert found.slowdown < 1.2
    found = calibrate([slowed], choice=FormChoice.AUTO, service=None, base=None)
    assert found.slowdown > 2


def one_at_a_time(requests: Sequence[ObservedRequest], *, slower: int) -> list[ObservedRequest]:
    """Serve requests one after the other, the last half `slower` times as long.

    A prompt takes 20 ms and 5 ms per token, each further token 10 ms, all with 10 % of noise.
    """
    draw, free_ns, served = np.random.default_rng(1), 0, []
    for number, one in enumerate(requests):
        times_ms = np.full(one.record.output_tokens, 10.0)
        times_ms[0] = 20 + 5 * one.prompt_tokens
        times_ms *= np.exp(draw.normal(0, 0.1, len(times_ms)))
        times_ms *= slower if number > len(requests) // 2 else 1
        begin_ns = max(one.arrival_ns, free_ns)
        times_ns = begin_ns + np.cumsum(times_ms * NS_PER_MS).astype(np.int64)
        free_ns = int(times_ns[-1])
        record = replace(
            one.record,
            first_token_ns=int(times_ns[0]),
            last_token_ns=free_ns,
            gaps_us=tuple((np.diff(times_ns) // 1_000).tolist()),
            replica="one",
        )
        served.append(replace(one, record=record, times_ns=times_ns))
    return served


def test_requests_of_several_runs_may_have_the_same_ids(replay: Replay, cpu: str) -> None:
    folders = [
        replay(name, cpu, rate=rate, seconds=300, prompts="64~60%")
        for name, rate in (("low", "20/m"), ("high", "40/m"))
    ]
    found = calibrated(*folders)
    assert all(error < 0.05 for error in errors(found).values())


def test_the_result_is_printed_as_json(replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    folder = replay("run", "llama-3-8b-h100", rate="8/s", seconds=20, prompts="600")
    capsys.readouterr()
    base = ["--base", "llama-3-8b-h100", "-f", str(folder.with_name("run.yaml"))]
    assert main([str(folder), *base, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["form"] in {"roofline", "piecewise"}
    assert (result["policy"], result["profile"]) == ("sarathi", None)
    assert [one["name"] for one in result["latencies"]][:2] == ["TTFT p50", "TTFT p99"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(
            lambda summary, _: summary["validity"].update(valid=False, sentence="late"),
            r"the run is INVALID \(late\); replay again",
            id="invalid",
        ),
        pytest.param(
            lambda summary, _: summary["target"].update(streaming=False),
            "were not streamed",
            id="not streamed",
        ),
        pytest.param(
            lambda _, columns: columns.update(gaps_us=[[] for _ in columns["gaps_us"]]),
            "have no gaps between tokens; replay without --no-gaps",
            id="no gaps",
        ),
        pytest.param(
            lambda _, columns: columns.update({name: rows[:40] for name, rows in columns.items()}),
            "requests received two tokens or more; a calibration needs 50",
            id="few requests",
        ),
        pytest.param(
            lambda _, columns: columns.update(
                gaps_us=[gaps[: len(gaps) // 2] for gaps in columns["gaps_us"]]
            ),
            "so its steps cannot be distinguished",
            id="joined tokens",
        ),
        pytest.param(
            lambda _, columns: columns.update(cached_tokens=[100] * len(columns["sent_ns"])),
            "in its prefix cache",
            id="cached prompts",
        ),
    ],
)
def test_a_run_that_does_not_show_the_steps_is_rejected(
    replay: Replay, change: Callable[[dict[str, Any], dict[str, Any]], None], problem: str
) -> None:
    folder = replay("run", "llama-3-8b-h100", rate="8/s", seconds=10, prompts="600")
    records, summary = folder / "records.parquet", folder / "summary.json"
    table, result = pq.read_table(records), json.loads(summary.read_text(encoding="utf-8"))
    columns = table.to_pydict()
    change(result, columns)
    pq.write_table(table.schema.empty_table().from_pydict(columns, schema=table.schema), records)
    summary.write_text(json.dumps(result), encoding="utf-8")
    with pytest.raises(InputError, match=problem) as caught:
        main([str(folder)])
    assert "\n" not in str(caught.value)


def test_a_wrong_folder_form_or_file_is_rejected(
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError, match=r"no such file|cannot be read|summary"):
        main([str(tmp_path)])
    with pytest.raises(UsageError, match="choose from 'auto', "):
        main([str(tmp_path), "--form", "line"])
    out = tmp_path / "mine.yaml"
    out.write_text("keep", encoding="utf-8")
    with pytest.raises(InputError, match="exists; name another file"):
        main([str(tmp_path), "-o", str(out)])
    assert out.read_text(encoding="utf-8") == "keep"


def test_a_server_whose_prompts_take_no_time_is_recovered(replay: Replay, cpu: str) -> None:
    flat = CPU.replace("[66, 100, 192, 1400]", "[20, 20, 20, 20]")
    flat = flat.replace("c3_ns_per_square: {value: 100", "c3_ns_per_square: {value: 0")
    flat = flat.replace("c4_us_per_request: {value: 200", "c4_us_per_request: {value: 15000")
    Path(cpu).write_text(flat, encoding="utf-8")
    folder = replay("run", cpu, rate="60/m", seconds=120, prompts="64~60%")
    found = calibrated(folder)
    assert all(error < 0.05 for error in errors(found).values())
