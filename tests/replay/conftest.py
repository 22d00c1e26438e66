"""A synthetic run from a seed: bursts, a backlog, two classes and every outcome; a browser."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.pages import chromium

from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import SLOClass, Targets
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.runs.folder import RunWriter
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.runs.summary import (
    ClientSummary,
    LengthPinning,
    RunSummary,
    TargetSummary,
    TraceSummary,
)
from goodput_replay.runs.summary_builder import RunInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

    from goodput_replay.runs.summary import Summary

SLO = SLOClasses(
    classes=(
        SLOClass(name="interactive", ttft_ms=500, tpot_ms=50, objective=Fraction("0.95")),
        SLOClass(
            name="batch",
            ttft_ms=30_000,
            tpot_ms=200,
            tbt_p99_ms=400,
            e2e_ms=120_000,
            objective=Fraction("0.9"),
        ),
    ),
    default="interactive",
)
INFO = RunInfo(
    trace=TraceSummary(
        name="sample",
        digest="sha256:" + "5a" * 32,
        source="goodput trace synthesize",
        licence="Apache-2.0",
        clock="trace-relative",
        synthetic=True,
        transforms=("--window 0s..5m",),
    ),
    target=TargetSummary(
        url="http://127.0.0.1:8000",
        endpoint="/v1/completions",
        model="emulated",
        service="chat",
        pinning=LengthPinning.HEADER,
        header_names=("Authorization",),
        streaming=True,
    ),
    run=RunSummary(
        started_at="2026-03-04T05:06:07Z",
        goodput_version="0.1.0",
        command=("replay", "--trace", "sample", "-f", "examples/chat.yaml", "--window", "0s..5m"),
        seed=7,
        salt="2f9c",
        complete=True,
        abort_reason="",
    ),
    slo=SLO,
    window_start_ns=0,
    window_ns=300 * NS_PER_S,
    rows_planned=0,
    warmup_rows=3,
    client=ClientSummary(cpu_s=3.21, cpus=2, peak_in_flight=88),
    loop_lag_p99_ns=410_000,
    loop_lag_max_ns=6_900_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticRun:
    """A run's info and records, ready to be written by a `RunWriter`."""

    info: RunInfo
    records: tuple[RequestRecord, ...]
    warmup: tuple[RequestRecord, ...]


def make_run(
    *,
    seed: int = 7,
    window_s: int = 300,
    rate_per_s: float = 6.0,
    stall: tuple[float, float] | None = (140.0, 4.0),
    failures: float = 0.01,
    lag_ms: float = 0.3,
    unsent: int = 0,
) -> SyntheticRun:
    """Make a run of two replicas with a queue of prompts and bursts of arrivals.

    Args:
        seed: seed of all random values.
        window_s: length of the window.
        rate_per_s: mean arrival rate.
        stall: (start, length) in seconds of a pause of prefills, which causes a backlog.
        failures: share of requests with the outcome error, timeout or shed.
        lag_ms: mean send lag.
        unsent: number of last rows that are not sent.
    """
    rng = random.Random(seed)
    records: list[RequestRecord] = []
    service = _SimulatedService(rng=rng, stall=stall, failures=failures, lag_ms=lag_ms)
    for index, at_ns in enumerate(_arrivals(rng, window_s, rate_per_s)):
        records.append(service.serve(index, at_ns))
    for index in range(len(records) - unsent, len(records)):
        late = records[index]
        records[index] = RequestRecord(
            request_id=late.request_id,
            slo_class=late.slo_class,
            scheduled_ns=late.scheduled_ns,
            outcome=Outcome.UNSENT,
            input_tokens=late.input_tokens,
        )
    idle = _SimulatedService(rng=rng, stall=None, failures=0.0, lag_ms=lag_ms)
    warmup = tuple(idle.serve(900_000 + i, -NS_PER_S) for i in range(3))
    info = replace(INFO, rows_planned=len(records), window_ns=window_s * NS_PER_S)
    ordered = sorted(records, key=lambda r: r.end_ns or r.scheduled_ns)
    return SyntheticRun(info=info, records=tuple(ordered), warmup=warmup)


def write_run(
    folder: Path, info: RunInfo, records: Iterable[RequestRecord], **options: Any
) -> Summary:
    """Record requests into a folder and judge the run; `options` are those of `RunWriter`."""
    with RunWriter(folder, slo=info.slo, **options) as writer:
        for record in records:
            writer.append(record)
        return writer.finish(info)


def _arrivals(rng: random.Random, window_s: int, rate_per_s: float) -> Iterator[int]:
    at_s = 0.0
    while True:
        burst = 3.0 if (at_s // 20) % 3 == 2 else 0.7
        at_s += rng.expovariate(rate_per_s * burst)
        if at_s >= window_s:
            return
        yield int(at_s * NS_PER_S)


class _SimulatedService:
    """Two replicas; each prefills one prompt at a time."""

    def __init__(
        self,
        *,
        rng: random.Random,
        stall: tuple[float, float] | None,
        failures: float,
        lag_ms: float,
    ) -> None:
        self._rng = rng
        self._stall_ns = (0, 0)
        if stall is not None:
            self._stall_ns = (int(stall[0] * NS_PER_S), int(sum(stall) * NS_PER_S))
        self._failures = failures
        self._lag_ms = lag_ms
        self._free_ns = [-NS_PER_S, -NS_PER_S]

    def serve(self, index: int, at_ns: int) -> RequestRecord:
        rng = self._rng
        batch = rng.random() < 0.25
        tokens_in = int(rng.lognormvariate(7.2 if batch else 6.2, 0.7)) + 1
        tokens_out = int(rng.lognormvariate(4.6 if batch else 4.0, 0.6)) + 1
        sent_ns = at_ns + int(rng.expovariate(1 / self._lag_ms) * NS_PER_MS)
        replica = self._free_ns.index(min(self._free_ns))
        base = RequestRecord(
            request_id=f"row-{index:06d}",
            slo_class="batch" if batch else "interactive",
            scheduled_ns=at_ns,
            sent_ns=sent_ns,
            outcome=Outcome.OK,
            input_tokens=tokens_in,
            pinned_output_tokens=tokens_out,
            replica=f"chat-{replica}",
            revision="chat-6f8d",
            targets=Targets(ttft_ns=900 * NS_PER_MS) if index % 40 == 0 else Targets(),
            status=200,
        )
        if rng.random() < self._failures:
            return _failed(rng, base)
        start_ns = max(sent_ns, self._free_ns[replica])
        if self._stall_ns[0] <= start_ns < self._stall_ns[1]:
            start_ns = self._stall_ns[1]
        self._free_ns[replica] = start_ns + tokens_in * 60_000
        first_ns = self._free_ns[replica] + rng.randrange(5, 15) * NS_PER_MS
        if index % 150 == 149:
            return replace(
                base,
                outcome=Outcome.CANCELLED,
                cancel_after_ns=200 * NS_PER_MS,
                end_ns=at_ns + 200 * NS_PER_MS,
            )
        busy = (at_ns // (20 * NS_PER_S)) % 3 == 2
        mean_us = 22_000 + 4_000 * busy * rng.uniform(1, 7)
        gaps = tuple(int(rng.gauss(mean_us, mean_us / 8)) for _ in range(tokens_out - 1))
        last_ns = first_ns + sum(gaps) * 1000
        return replace(
            base,
            first_token_ns=first_ns,
            last_token_ns=last_ns,
            end_ns=last_ns + NS_PER_MS,
            gaps_us=gaps,
            output_tokens=tokens_out,
            cached_tokens=tokens_in // 2,
        )


def _failed(rng: random.Random, base: RequestRecord) -> RequestRecord:
    assert base.sent_ns is not None
    outcome, status, detail, after_ms = rng.choice(
        [
            (Outcome.SHED, 429, "429 Too Many Requests", 4),
            (Outcome.ERROR, 500, "500 Internal Server Error", 12),
            (Outcome.ERROR, None, "the connection closed mid-stream", 800),
            (Outcome.TIMEOUT, None, "nothing complete within 8 s", 8_000),
        ]
    )
    end_ns = base.sent_ns + after_ms * NS_PER_MS
    return replace(base, outcome=outcome, status=status, detail=detail, end_ns=end_ns, replica="")


@pytest.fixture(scope="session")
def synthetic_run() -> SyntheticRun:
    """Five minutes with a few thousand requests and every outcome except `unsent`."""
    return make_run()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return a browser; one for each module, because it takes a second to start."""
    with chromium() as started:
        yield started


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of twelve megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system is not permitted here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)
