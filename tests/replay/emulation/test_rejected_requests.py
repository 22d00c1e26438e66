"""Requests that an engine rejects or cuts off: virtual time records them as a replay over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.builders.fleets import make_fleet, plan, run_fleet
from tests.builders.manifests import write_manifest
from tests.builders.serving import server_state, serving
from tests.builders.traces import steady_rows, trace_row, write_rows

from goodput_core.slo.conformance import Deviation
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import SLOClass, Targets
from goodput_core.units import NS_PER_MS
from goodput_engine.device.load import load_profile
from goodput_replay.runs.record_rows import read_judged

if TYPE_CHECKING:
    from pathlib import Path

_CONTEXT = 96
ROWS: dict[str, dict[str, Any]] = {
    "fits": {},
    "fills the context": {"input_tokens": 92},
    "one token too long": {"input_tokens": 96},
    "a prompt far beyond the context": {"input_tokens": 700},
    "a limit beyond the context": {"input_tokens": 90, "max_output_tokens": 7},
    "a limit at the context": {"input_tokens": 90, "max_output_tokens": 6},
    "an output that the context cuts off": {"input_tokens": 90, "output_tokens": 30},
    "an output that its own limit cuts off": {"output_tokens": 30, "max_output_tokens": 5},
}


def _device(folder: Path, **numbers: int) -> Path:
    """Write the unit device with other numbers."""
    lines = ["name: small", "description: for a test", "form: unit", "overlap: add", "numbers:"]
    for name, value in (dict(load_profile("unit").numbers) | numbers).items():
        lines.append(f"  {name}: {{value: {value}, from: a test}}")
    path = folder / "small.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


async def _replay(*arguments: object) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "goodput_core", "replay", *map(str, arguments), "--no-report",
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, "GOODPUT_DEBUG": ""},
    )  # fmt: skip
    assert await child.wait() in {0, 3}


async def _replay_both(trace: Path, folder: Path, **numbers: int) -> tuple[Path, Path]:
    """Replay a trace over HTTP and in virtual time; return both run folders."""
    device, http, virtual = _device(folder, **numbers), folder / "http", folder / "virtual"
    manifest = write_manifest(
        folder,
        "emulated",
        replicas=1,
        slo__classes=[{"name": "fast", "ttftMs": 30_000, "tpotMs": 5_000, "objective": "99%"}],
    )
    classes = (SLOClass(name="fast", ttft_ms=30_000, tpot_ms=5_000),)
    async with serving(server_state(classes=classes, device=str(device))) as url:
        await _replay("--trace", trace, "--target", url, "--slo", manifest, "--no-probe",
                      "--out", http)  # fmt: skip
    await _replay("--trace", trace, "--emulate", manifest, "--device", device, "--out", virtual)
    return http, virtual


def _outcomes(run: Path) -> dict[str, tuple[object, ...]]:
    """Return by request what does not depend on the clock."""
    return {
        row.record.request_id: (
            row.record.outcome,
            row.record.status,
            row.record.detail,
            row.record.output_tokens,
            row.record.deviations,
            None if row.judgement is None else row.judgement.reasons,
        )
        for row in read_judged(run)
    }


async def test_requests_that_do_not_fit_are_recorded_as_over_http(tmp_path: Path) -> None:
    rows = (trace_row(n, **fields) for n, fields in enumerate(ROWS.values()))
    trace = write_rows(tmp_path / "t.parquet", rows)
    http, virtual = await _replay_both(trace, tmp_path, max_model_tokens=_CONTEXT)
    found = dict(zip(ROWS, (_outcomes(virtual)[f"row-{n}"] for n in range(len(ROWS))), strict=True))
    assert _outcomes(virtual) == _outcomes(http)
    statuses = {name: fields[1] for name, fields in found.items()}
    assert statuses == {
        "fits": 200,
        "fills the context": 200,
        "one token too long": 400,
        "a prompt far beyond the context": 400,
        "a limit beyond the context": 400,
        "a limit at the context": 200,
        "an output that the context cuts off": 200,
        "an output that its own limit cuts off": 200,
    }
    assert found["a limit beyond the context"][2] == (
        "HTTP 400: max_tokens is 7, but after a prompt of 90 tokens this model's context of 96 "
        "leaves 6"
    )
    assert found["an output that the context cuts off"][3:5] == (6, (Deviation.CUT_OFF,))


async def test_kv_memory_that_is_too_small_has_the_same_verdict_as_over_http(
    tmp_path: Path,
) -> None:
    rows = (
        replace(row, input_tokens=60) if n % 2 else row for n, row in enumerate(steady_rows(40))
    )
    trace = write_rows(tmp_path / "t.parquet", rows)
    runs = await _replay_both(trace, tmp_path, kv_blocks=3)
    http, virtual = (json.loads((run / "summary.json").read_text()) for run in runs)
    sentence = "the server rejected 20 of 40 requests as invalid (3xx or 4xx), and without them"
    for summary in (http, virtual):
        assert summary["verdict"]["reason"] == "ClientError"
        assert sentence in summary["verdict"]["sentence"]
    assert virtual["errors"] == http["errors"]
    (error,) = virtual["errors"]
    assert (error["status"], error["count"]) == (400, 20)


def test_requests_that_are_shed_have_the_statuses_of_engine_and_router() -> None:
    requests = [
        plan("long", 0, 8, 100),
        plan("late", 0, 8, 5, targets=Targets(ttft_ns=10 * NS_PER_MS)),
        plan("unclassed", 0, 8, 5, slo_class="gold"),
    ]
    run = run_fleet(requests, make_fleet(max_num_seqs=1, late_requests="drop"))
    late, unclassed = run["late"], run["unclassed"]
    assert (late.outcome, late.status) == (Outcome.SHED, 429)
    assert late.detail.startswith("HTTP 429: the request missed its target")
    assert (unclassed.outcome, unclassed.status) == (Outcome.ERROR, 400)
    assert unclassed.client_error


def test_a_request_that_is_dropped_after_its_first_token_reports_it_in_the_stream() -> None:
    requests = [plan("late", 0, 8, 100, targets=Targets(e2e_ns=20 * NS_PER_MS))]
    late = run_fleet(requests, make_fleet(late_requests="drop"))["late"]
    assert (late.outcome, late.status, late.output_tokens) == (Outcome.SHED, 200, 21)
    assert late.deviations == (Deviation.ERROR_IN_STREAM,)
    assert late.detail.startswith("the stream reported: the request missed its target")
