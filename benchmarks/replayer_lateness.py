"""Lateness of the replayer, and its CPU time per request.

For each rate, the `replay` command replays a constant schedule of streamed requests against
`mock_server.py` in a separate process: 16 tokens per response, 50 ms to the first token, 10 ms
between tokens. Lateness is measured twice, and the results must agree:

- *lag*: recorded by the replayer, from the scheduled arrival until the bytes are given to the
  socket;
- *arrival*: logged by the server, from the scheduled arrival until the request's last byte is read.

    python benchmarks/replayer_lateness.py            # four rates, three repeats: four minutes
    python benchmarks/replayer_lateness.py --quick    # one repeat of five seconds each
    python benchmarks/replayer_lateness.py --json > lateness.json
    python benchmarks/replayer_lateness.py --ui       # every run also with a page open
    python benchmarks/replayer_lateness.py --workers 1 2    # every run with one and two senders
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.runs.record_rows import read_records
from goodput_traces.format.schema import Clock, TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# An open page, in a process of its own.
READ_EVENTS = """
import sys, time, urllib.error, urllib.request
while True:
    try:
        events = urllib.request.urlopen(sys.argv[1] + "events")
        break
    except urllib.error.HTTPError as error:
        # The run has not started yet.
        if error.code != 503:
            raise
        time.sleep(0.1)
with events:
    while line := events.readline():
        if line.startswith(b"event: finished"):
            urllib.request.urlopen(sys.argv[1] + "report").read()
            break
"""
RATES = (50, 200, 500, 1000)
INPUT_TOKENS = 300
OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results of one run.

    Args:
        ui: True if the live page was open.
        workers: number of sending processes.
        load: the machine's one-minute load average before the run.
    """

    rate_per_s: int
    ui: bool
    workers: int
    requests: int
    ok: int
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    arrival_p50_ms: float
    arrival_p99_ms: float
    arrival_max_ms: float
    cpu_s_per_1000: float
    valid: bool
    load: float


def main() -> int:
    """Measure every rate, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, metavar="PER_S")
    parser.add_argument("--seconds", type=int, default=15, help="length of one run (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat of five seconds each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ui", action="store_true", help="repeat every run with a live page")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=(1,),
        metavar="N",
        help="numbers of sending processes; every run is repeated with each (default: 1)",
    )
    options = parser.parse_args()
    seconds = 5 if options.quick else options.seconds
    repeats = 1 if options.quick else options.repeats
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for rate in options.rates:
            for repeat in range(repeats):
                print(f"{rate} requests/s, run {repeat + 1} of {repeats}", file=sys.stderr)
                # Alternating, so that a drift of the machine concerns all variants.
                runs += [
                    measure(rate, seconds, Path(scratch), ui=ui, workers=workers)
                    for workers in options.workers
                    for ui in (False, True)[: 1 + options.ui]
                ]
    if options.json:
        json.dump(
            {"machine": machine(), "runs": [asdict(run) for run in runs]}, sys.stdout, indent=2
        )
        print()
    else:
        show(runs)
    return 0


def measure(rate_per_s: int, seconds: int, scratch: Path, *, ui: bool, workers: int) -> Measured:
    """Run `replay` in a separate process and measure it.

    Args:
        rate_per_s: requests per second.
        seconds: length of the run.
        scratch: folder for the trace, the run and the log.
        ui: True to open the live page of the run.
        workers: number of sending processes.
    """
    trace, run, log = scratch / "trace.parquet", scratch / "run", scratch / "arrivals.csv"
    rows = (
        TraceRow(
            request_id=f"row-{i}",
            timestamp_start_unix_ns=i * NS_PER_S // rate_per_s,
            input_tokens=INPUT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
        )
        for i in range(rate_per_s * seconds)
    )
    metadata = TraceMetadata(source="constant rate", clock=Clock.TRACE_RELATIVE)
    write_trace(trace, rows, metadata, overwrite=True)
    load = os.getloadavg()[0]
    with mock_server(log) as url:
        command = ["-m", "goodput_core", "replay", "--trace", str(trace), "--target", url]
        # The server's log has no line of a probe.
        command += ["--out", str(run), "--force", "--no-report", "--no-probe", "--json"]
        command += ["--workers", str(workers)]
        summary = replayed(command, ui=ui)
    records = list(read_records(run, gaps=False))
    lag = sorted(r.lag_ns for r in records if r.lag_ns is not None)
    arrival = server_lateness(log, summary, {r.request_id: r.scheduled_ns for r in records})
    return Measured(
        rate_per_s=rate_per_s,
        ui=ui,
        workers=workers,
        requests=len(records),
        ok=summary["overall"]["outcomes"].get("ok", 0),
        lag_p50_ms=at(lag, 0.5),
        lag_p99_ms=at(lag, 0.99),
        lag_max_ms=at(lag, 1),
        arrival_p50_ms=at(arrival, 0.5),
        arrival_p99_ms=at(arrival, 0.99),
        arrival_max_ms=at(arrival, 1),
        cpu_s_per_1000=round(summary["client"]["cpu_s"] * 1000 / len(records), 3),
        valid=summary["validity"]["valid"],
        load=round(load, 2),
    )


def replayed(command: list[str], *, ui: bool) -> Any:
    """Run a replay and return its summary; with `ui`, read the events of its page until the end."""
    with subprocess.Popen(
        [sys.executable, *command, *(["--ui"] if ui else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stderr is not None
        page = child.stderr.readline().partition("live page: ")[2].strip() if ui else ""
        reader = subprocess.Popen([sys.executable, "-c", READ_EVENTS, page]) if page else None
        output, errors = child.communicate()
        if reader is not None:
            reader.wait()
    # Exit code 3 marks an invalid run, which is a result here.
    if child.returncode not in {0, 3} or bool(page) is not ui:
        raise SystemExit(errors)
    return json.loads(output)


@contextmanager
def mock_server(log: Path) -> Iterator[str]:
    """Run the mock server in a separate process; its log is complete after the block."""
    script = Path(__file__).parent / "stand_ins" / "mock_server.py"
    command = [sys.executable, str(script), "--log", str(log), "--tokens", str(OUTPUT_TOKENS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            yield json.loads(child.stdout.readline())["url"]
        finally:
            child.terminate()
            child.wait()


def server_lateness(log: Path, summary: Any, scheduled_ns: dict[str, int]) -> list[int]:
    """Return arrival at the server minus schedule, sorted, in nanoseconds.

    The run's zero is known on the wall clock, which the server logs, to a microsecond.
    """
    started = datetime.fromisoformat(summary["run"]["started_at"])
    zero_ns = int(started.timestamp()) * NS_PER_S + started.microsecond * 1000
    lines = (line.split(",") for line in log.read_text().splitlines())
    return sorted(int(at_ns) - zero_ns - scheduled_ns[name] for name, at_ns, *_ in lines)


def at(values: Sequence[int], share: float) -> float:
    """Return a quantile of sorted nanoseconds, in milliseconds."""
    return round(values[min(len(values) - 1, int(len(values) * share))] / NS_PER_MS, 3)


def machine() -> dict[str, object]:
    """Return the description of the machine."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def show(runs: Sequence[Measured]) -> None:
    """Print one row per run."""
    table = Table(title=f"replayer lateness, ms (p50 / p99 / max), {machine()['cpus']} CPUs")
    for name in (
        "rate/s",
        "page",
        "senders",
        "ok",
        "lag",
        "arrival at server",
        "CPU s per 1,000",
        "valid",
        "load",
    ):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            str(run.rate_per_s),
            "open" if run.ui else "",
            str(run.workers),
            f"{run.ok}/{run.requests}",
            f"{run.lag_p50_ms:.2f} / {run.lag_p99_ms:.2f} / {run.lag_max_ms:.2f}",
            f"{run.arrival_p50_ms:.2f} / {run.arrival_p99_ms:.2f} / {run.arrival_max_ms:.2f}",
            f"{run.cpu_s_per_1000:.2f}",
            "yes" if run.valid else "no",
            f"{run.load:.2f}",
        )
    Console(width=max(110, Console().width)).print(table)


if __name__ == "__main__":
    sys.exit(main())
