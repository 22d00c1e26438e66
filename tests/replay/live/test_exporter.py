"""A run in progress can be scraped by a Prometheus server."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import aiohttp
import pytest
from benchmarks.replayer_lateness import mock_server
from prometheus_client.parser import text_string_to_metric_families
from tests.replay.live.builders import make_progress, make_tally, make_window

from goodput_core.slo.verdict import VerdictKind
from goodput_replay.live.exporter import MetricsExporter
from goodput_replay.live.server import HOST, open_site
from goodput_replay.live.summary import summarise_so_far
from goodput_replay.live.tally import LiveTally

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun

HOSTILE = 'a"b\\c\nd} 1 </script>'
_Labels = frozenset[tuple[str, str]]


@asynccontextmanager
async def _served(exporter: MetricsExporter) -> AsyncIterator[str]:
    runner, port = await open_site(exporter.app, 0, "--prometheus")
    try:
        yield f"http://{HOST}:{port}/metrics"
    finally:
        await runner.cleanup()


async def _fetch(exporter: MetricsExporter, **headers: str) -> tuple[int, str]:
    async with (
        _served(exporter) as url,
        aiohttp.ClientSession() as session,
        session.get(url, headers=headers) as response,
    ):
        return response.status, await response.text()


def _parse(text: str) -> dict[tuple[str, _Labels], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def _scrape(run: SyntheticRun, tally: LiveTally | None = None, **progress: Any) -> str:
    exporter = MetricsExporter(HOST)
    exporter.begin(tally or make_tally(run), lambda: make_progress(run, **progress))
    status, text = await _fetch(exporter)
    assert status == 200
    return text


async def test_the_series_have_the_figures_of_the_live_page(synthetic_run: SyntheticRun) -> None:
    found = _parse(await _scrape(synthetic_run, in_flight=7))
    progress = make_progress(synthetic_run)
    summary = summarise_so_far(make_tally(synthetic_run).so_far(progress), synthetic_run.info)

    def value(name: str, **labels: str) -> float:
        return found.pop((f"goodput_replay_{name}", frozenset(labels.items())))

    assert value("sent_requests_total") == progress.sent
    assert value("planned_requests") == len(synthetic_run.records)
    assert value("in_flight_requests") == 7
    assert value("elapsed_seconds") == 300
    assert value("goodput_requests_per_second") == pytest.approx(summary.overall.goodput_per_s)
    for kind in VerdictKind:
        assert value("verdict", verdict=kind.value) == (kind is summary.verdict.kind)
    for one in summary.classes:
        assert value("judged_requests_total", slo_class=one.name, result="attained") == one.good
        assert value("judged_requests_total", slo_class=one.name, result="missed") == (
            one.total - one.good
        )
        assert one.attainment is not None
        assert one.interval is not None
        assert one.objective is not None
        for name, expected in (
            ("attainment_ratio", one.attainment),
            ("attainment_lower_ratio", one.interval.lower),
            ("attainment_upper_ratio", one.interval.upper),
            ("objective_ratio", float(one.objective.rstrip("%")) / 100),
        ):
            assert value(name, slo_class=one.name) == pytest.approx(expected, abs=1e-6)
        for outcome in ("ok", "shed", "error", "timeout", "cancelled", "unsent"):
            assert value("requests_total", slo_class=one.name, outcome=outcome) == (
                one.outcomes.get(outcome, 0)
            )
        for reason in ("ttft", "tpot", "tbt", "e2e", "short", "shed", "error", "timeout"):
            assert value("misses_total", slo_class=one.name, reason=reason) == (
                one.misses.get(reason, 0)
            )
        assert one.ttft_ms is not None
        assert value("ttft_seconds_count", slo_class=one.name) == one.ttft_ms.count
        assert value("ttft_seconds_bucket", slo_class=one.name, le="+Inf") == one.ttft_ms.count


async def test_buckets_add_up(synthetic_run: SyntheticRun) -> None:
    found = _parse(await _scrape(synthetic_run))
    for name, extra in (("ttft", "interactive"), ("e2e", "batch"), ("send_lag", "")):
        labels = {("slo_class", extra)} if extra else set()
        buckets = sorted(
            (float(dict(each)["le"]), value)
            for (found_name, each), value in found.items()
            if found_name == f"goodput_replay_{name}_seconds_bucket" and labels <= each
        )
        counts = [count for _, count in buckets]
        assert counts == sorted(counts)
        assert counts[-1] > 0
        assert counts[0] < counts[-1]
        assert buckets[-1][0] == float("inf")


async def test_the_page_is_empty_before_the_run_and_is_for_this_machine_alone() -> None:
    assert await _fetch(MetricsExporter(HOST)) == (200, "")
    assert (await _fetch(MetricsExporter(HOST), Host="evil.example"))[0] == 403
    assert (await _fetch(MetricsExporter("0.0.0.0"), Host="machine.example:9464"))[0] == 200


async def test_hostile_class_names_are_label_values(synthetic_run: SyntheticRun) -> None:
    tally = LiveTally(make_window(synthetic_run))
    for record in synthetic_run.records[:100]:
        tally.add(replace(record, slo_class=HOSTILE))
    text = await _scrape(synthetic_run, tally)
    labels = frozenset({("slo_class", HOSTILE), ("outcome", "ok")})
    assert _parse(text)["goodput_replay_requests_total", labels] > 0


async def test_promtool_accepts_the_page(synthetic_run: SyntheticRun) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT RUN: promtool is missing; install it with `apt-get install prometheus`")
    text = await _scrape(synthetic_run)
    checked = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.mark.slow
def test_a_run_is_scraped_while_it_is_sent(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "goodput_core", "replay", "--trace", "sample"),
        *("--window", "0s..6s", "--no-probe", "--length-pinning", "none", "--no-report"),
        *("--prometheus", "0", "--out", str(tmp_path / "run"), "--ttft", "2s", "--tpot", "1s"),
    ]
    with (
        mock_server(tmp_path / "arrivals.csv") as target,
        subprocess.Popen([*command, "--target", target], stderr=subprocess.PIPE, text=True) as run,
    ):
        assert run.stderr is not None
        line = run.stderr.readline()
        assert re.fullmatch(r"metrics: http://127\.0\.0\.1:\d+/metrics\n", line)
        sent: list[float] = []
        deadline = time.monotonic() + 30
        while not sent or sent[-1] < 3:
            assert time.monotonic() < deadline
            with urlopen(line.split()[1], timeout=5) as response:
                found = _parse(response.read().decode())
            sent.append(found.get(("goodput_replay_sent_requests_total", frozenset()), 0))
            time.sleep(0.1)
        assert sent == sorted(sent)
        assert found["goodput_replay_planned_requests", frozenset()] == 18
        assert run.wait(timeout=60) in {0, 3}, "on a busy machine, the client's lag may be too high"


def test_a_port_in_use_ends_the_command_before_a_request_is_sent(tmp_path: Path) -> None:
    log = tmp_path / "arrivals.csv"
    with socket.create_server((HOST, 0)) as taken, mock_server(log) as target:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "goodput_core",
                    "replay",
                    "--trace",
                    "sample",
                    "--no-probe",
                ),
                *("--target", target, "--length-pinning", "none", "--out", str(tmp_path / "run")),
                *("--prometheus", str(port)),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 64
    assert done.stderr.splitlines()[-1].startswith(
        f"error: --prometheus: port {port} on 127.0.0.1 is in use"
    )
    assert not log.read_text()
