"""One run of a load generator, measured from outside in the same way for all of them.

The rows of the trace differ in `output_tokens`, which all tools send as `max_tokens`. The mock
server logs this number, so that each arrival is compared with the row that it belongs to, whatever
order the requests arrive in.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psutil
from benchmarks.peers.environments import cache_folder
from benchmarks.peers.tools import Run
from benchmarks.replayer_lateness import OUTPUT_TOKENS, READ_EVENTS, at, mock_server

from goodput_core.units import NS_PER_MS
from goodput_traces.exporters.run import export_trace
from goodput_traces.format.schema import Clock, TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.peers.tools import Tool

__all__ = [
    "Arrivals",
    "Cell",
    "Measurement",
    "ProcessTree",
    "Timing",
    "compare",
    "make_rows",
    "measure",
    "read_arrivals",
]

INPUT_TOKENS: Final = 300
BLOCK_SIZE: Final = 512
RESPONSE_NS: Final = 50 * NS_PER_MS + (OUTPUT_TOKENS - 1) * 10 * NS_PER_MS
SAMPLE_S: Final = 0.2
MEMORY_SAMPLE_S: Final = 1.0
START_TIMEOUT_S: Final = 120.0
"""Time for start, results and end of a tool, in addition to twice the length of the schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A tool at a rate.

    Args:
        tool: name of the tool.
        rate_per_s: mean rate of the trace.
        repeat: number of the repeat, from 0; the trace depends on it.
        seconds: length of the trace.
    """

    tool: str
    rate_per_s: int
    repeat: int
    seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The server's log.

    Args:
        at_ns: first arrival of each row on the wall clock, by `max_tokens`.
        complete: rows whose response was sent to its end.
        repeated: number of arrivals of rows that had arrived before.
    """

    at_ns: dict[int, int]
    complete: set[int]
    repeated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of the arrivals of a run.

    Args:
        first_ns: first arrival on the wall clock.
        last_ns: last arrival.
        achieved_per_s: the rate of the trace, times the intended time between its first and its
            last arrival, divided by the actual one.
        error_p50_ms: median of arrival minus intended arrival, after subtracting the minimum.
        error_p99_ms: 99th percentile of the same.
        error_max_ms: maximum of the same.
    """

    first_ns: int
    last_ns: int
    achieved_per_s: float
    error_p50_ms: float
    error_p99_ms: float
    error_max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Results of a run.

    Args:
        cell: the tool and the rate.
        requests: rows of the trace.
        arrived: rows that arrived at the server.
        complete: rows whose response was sent to its end.
        repeated: arrivals of rows that had arrived before.
        timing: times of the arrivals; None if fewer than two requests arrived.
        cpu_s_per_1000: CPU seconds of the tool and its children per 1,000 requests, from the first
            arrival to the end of the last response.
        cpu_s: CPU seconds of the complete run.
        peak_mib: largest proportional set size of the tool and its children, sampled each second.
        wall_s: duration of the complete run.
        lag_p99_ms: p99 of the send lag that `replay` reports; None for other tools.
        failure: the reason if the tool failed, such as its last line of output; None otherwise.
        load: the machine's one-minute load average before the run.
    """

    cell: Cell
    requests: int
    arrived: int
    complete: int
    repeated: int
    timing: Timing | None
    cpu_s_per_1000: float | None
    cpu_s: float
    peak_mib: float
    wall_s: float
    lag_p99_ms: float | None
    failure: str | None
    load: float

    @property
    def lost(self) -> int:
        """Number of requests without a complete response."""
        return self.requests - self.complete

    @property
    def sustained(self) -> bool:
        """True if no request was lost and at least 99 % of the rate arrived."""
        if self.lost or self.timing is None:
            return False
        return self.timing.achieved_per_s >= 0.99 * self.cell.rate_per_s


def make_rows(rate_per_s: int, seconds: int, seed: int) -> list[TraceRow]:
    """Return Poisson arrivals in whole milliseconds, the finest unit that all tools read.

    The number of rows is `rate_per_s * seconds`, and the first row is at 0.
    """
    draw = random.Random(seed)
    arrivals = sorted(draw.randrange(seconds * 1000) for _ in range(rate_per_s * seconds))
    return [
        TraceRow(
            request_id=f"row-{number}",
            timestamp_start_unix_ns=(arrival - arrivals[0]) * NS_PER_MS,
            input_tokens=INPUT_TOKENS,
            output_tokens=OUTPUT_TOKENS + number,
            total_hashes=(number,),
            block_size=BLOCK_SIZE,
        )
        for number, arrival in enumerate(arrivals)
    ]


def measure(tool: Tool, cell: Cell, folder: Path, tokenizer: Path | None) -> Measurement:
    """Run a tool once.

    Args:
        tool: the tool.
        cell: its rate and trace.
        folder: an empty folder for the trace, the log and the tool's files.
        tokenizer: folder of the tokenizer; None if the tool does not need it.
    """
    rows = make_rows(cell.rate_per_s, cell.seconds, seed=cell.repeat)
    trace, mooncake, log = (folder / name for name in ("t.parquet", "t.jsonl", "arrivals.csv"))
    metadata = TraceMetadata(source="Poisson arrivals", clock=Clock.TRACE_RELATIVE)
    write_trace(trace, rows, metadata)
    export_trace(trace, mooncake, "mooncake")
    work = folder / "work"
    work.mkdir()
    load = os.getloadavg()[0]
    began = time.monotonic()
    with mock_server(log) as url:
        run = Run(
            url=url,
            trace=trace,
            mooncake=mooncake,
            rows=len(rows),
            folder=work,
            tokenizer=tokenizer,
            block_size=BLOCK_SIZE,
        )
        tree, failure = _run(tool, run, timeout_s=2 * cell.seconds + START_TIMEOUT_S)
    wall_s = time.monotonic() - began
    arrivals = read_arrivals(log, rows)
    timing = compare(cell.rate_per_s, rows, arrivals)
    first_ns, last_ns = (timing.first_ns, timing.last_ns) if timing else (0, 0)
    sending_s = tree.cpu_s_between(first_ns, last_ns + RESPONSE_NS)
    return Measurement(
        cell=cell,
        requests=len(rows),
        arrived=len(arrivals.at_ns),
        complete=len(arrivals.complete),
        repeated=arrivals.repeated,
        timing=timing,
        cpu_s_per_1000=round(sending_s * 1000 / len(arrivals.at_ns), 3) if timing else None,
        cpu_s=round(tree.cpu_s, 2),
        peak_mib=round(tree.peak_bytes / 2**20, 1),
        wall_s=round(wall_s, 1),
        lag_p99_ms=_own_lag_ms(work),
        failure=failure,
        load=round(load, 2),
    )


def read_arrivals(log: Path, rows: Sequence[TraceRow]) -> Arrivals:
    """Read the server's log; requests that are not in the trace, such as probes, are left out."""
    known = {row.output_tokens for row in rows}
    first_ns: dict[int, int] = {}
    complete = set()
    repeated = 0
    for line in log.read_text().splitlines():
        _, at_ns, max_tokens, ended = line.split(",")
        row = int(max_tokens or 0)
        if row not in known:
            continue
        repeated += row in first_ns
        first_ns.setdefault(row, int(at_ns))
        if ended == "1":
            complete.add(row)
    return Arrivals(at_ns=first_ns, complete=complete, repeated=repeated)


def compare(rate_per_s: int, rows: Sequence[TraceRow], arrivals: Arrivals) -> Timing | None:
    """Return the errors between intended and actual arrivals; None if too few requests arrived.

    The clock at which a tool starts its schedule is unknown, so the smallest difference counts as
    zero for each tool.
    """
    pairs = [
        (row.timestamp_start_unix_ns, arrivals.at_ns[row.output_tokens])
        for row in rows
        if row.output_tokens in arrivals.at_ns
    ]
    actual = sorted(at_ns for _, at_ns in pairs)
    if len(pairs) < 2 or actual[0] == actual[-1]:
        return None
    differences = sorted(at_ns - intended_ns for intended_ns, at_ns in pairs)
    errors = [difference - differences[0] for difference in differences]
    span_ns = pairs[-1][0] - pairs[0][0]
    return Timing(
        first_ns=actual[0],
        last_ns=actual[-1],
        achieved_per_s=round(rate_per_s * span_ns / (actual[-1] - actual[0]), 1),
        error_p50_ms=at(errors, 0.5),
        error_p99_ms=at(errors, 0.99),
        error_max_ms=at(errors, 1),
    )


class ProcessTree:
    """Samples CPU time and memory of a process and its descendants in a thread."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._samples: list[tuple[int, float]] = [(time.time_ns(), 0.0)]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)
        self.peak_bytes = 0

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._stopped.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        """CPU seconds until the last sample."""
        return self._samples[-1][1]

    def cpu_s_between(self, first_ns: int, last_ns: int) -> float:
        """Return the CPU seconds between two times of the wall clock, by interpolation."""
        return self._cpu_s_at(last_ns) - self._cpu_s_at(first_ns)

    def _cpu_s_at(self, at_ns: int) -> float:
        after = bisect_left(self._samples, (at_ns, 0.0))
        if after == 0 or after == len(self._samples):
            return self._samples[min(after, len(self._samples) - 1)][1]
        (t0, c0), (t1, c1) = self._samples[after - 1 : after + 1]
        return c0 + (c1 - c0) * (at_ns - t0) / (t1 - t0)

    def _sample_until_stopped(self) -> None:
        memory_due = 0.0
        while not self._stopped.wait(SAMPLE_S):
            with_memory = time.monotonic() >= memory_due
            if with_memory:
                memory_due = time.monotonic() + MEMORY_SAMPLE_S
            self._sample(with_memory=with_memory)

    def _sample(self, *, with_memory: bool) -> None:
        memory = 0
        with suppress(psutil.NoSuchProcess):
            # A process that has ended keeps the CPU time of its last sample.
            for process in (self._root, *self._root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    times = process.cpu_times()
                    key = process.pid, process.create_time()
                    self._cpu_s[key] = times.user + times.system
                    if with_memory:
                        memory += process.memory_full_info().pss
        self._samples.append((time.time_ns(), sum(self._cpu_s.values())))
        self.peak_bytes = max(self.peak_bytes, memory)


def _run(tool: Tool, run: Run, timeout_s: float) -> tuple[ProcessTree, str | None]:
    """Run a tool to its end; also return the reason if it failed."""
    invocation = tool.invoke(tool, run)
    output = run.folder / "output.txt"
    variables = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    variables |= {"HF_HOME": str(cache_folder() / "huggingface"), "HF_HUB_OFFLINE": "1"}
    with (
        output.open("wb") as sink,
        subprocess.Popen(
            invocation.command,
            cwd=run.folder,
            env=variables | dict(invocation.variables),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as child,
    ):
        tree = ProcessTree(child.pid)
        tree.start()
        try:
            page = _open_page(child, output) if tool.page else None
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return tree, f"did not end within {timeout_s:.0f} s"
        finally:
            tree.stop()
            # Also ends workers that survive their parent.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode not in tool.exit_codes:
        lines = [line.strip() for line in output.read_text(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "no output")
        return tree, f"exit code {child.returncode}: {last}"
    # The server of the page has ended, so the reader of the page ends, too.
    if tool.page and (page is None or page.wait()):
        return tree, "the live page could not be read"
    return tree, None


def _open_page(child: subprocess.Popen[bytes], output: Path) -> subprocess.Popen[bytes] | None:
    """Read the events of the live page in another process, as an open page does."""
    while child.poll() is None:
        _, _, rest = output.read_text(errors="replace").partition("live page: ")
        address, ended, _ = rest.partition("\n")
        if ended:
            return subprocess.Popen([sys.executable, "-c", READ_EVENTS, address.strip()])
        time.sleep(SAMPLE_S)
    return None


def _own_lag_ms(work: Path) -> float | None:
    summary = work / "run" / "summary.json"
    if not summary.exists():
        return None
    lag_ms = json.loads(summary.read_text())["validity"]["lag_ms"]
    return float(lag_ms["p99"]) if lag_ms else None
