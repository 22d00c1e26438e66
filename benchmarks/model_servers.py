"""The engine beside other servers on the same real model: one load, one server at a time.

The servers are the engine, `transformers serve` with continuous batching, and llama_cpp.server,
each from an environment of its own. The first two compute the weights in float32, the third reads
the same weights in four bits, in which they are distributed. All have the same number of threads.

A repeat starts each server in turn, sends a request to load its model, and then replays the same
load at each rate. CPU time and memory are those of the server's processes. The results of a repeat
are appended to `--results`, and the table has the medians of all repeats in this file.

    make smollm2
    python -m tools.foreign                                 # installs the other servers
    python -m benchmarks.model_servers --results results.jsonl
    python -m benchmarks.model_servers --runs runs/servers  # for `goodput device calibrate`
    python -m benchmarks.model_servers --quick              # the engine alone, one short load
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import msgspec
import psutil
from benchmarks.comparison.arguments import names_of, positive_count
from benchmarks.twin import running_engine
from tools.foreign.servers import COMPLETE, folder, running
from tools.smollm2 import model_folder

from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.runs.record_rows import read_records
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MANIFEST: Final = Path(__file__).parent.parent / "examples/smollm2.yaml"
SERVERS: Final = ("goodput", "transformers", "llama_cpp")
SEED: Final = 14
KV_BLOCKS: Final = 4096
"""Blocks of 16 tokens: as many tokens as the 256 blocks of 256 tokens of `transformers serve`."""
OPTIONS: Final = {
    "transformers": (),
    "llama_cpp": ("--interrupt_requests", "false"),
}
TIMEOUT_S: Final = 120
BYTES_PER_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """One load on one server.

    Args:
        server: name of the server.
        rate: rate of the load, as in the command.
        requests: number of requests.
        good: those that met their targets.
        outcomes: number of requests by outcome.
        window_s: length of the load, to its last scheduled arrival.
        ttft_p50_ms: median time to first token, from the scheduled arrival; None if no token came.
        ttft_p99_ms: its 99th percentile.
        tpot_p50_ms: median time per output token.
        tokens: output tokens.
        took_s: time from the first arrival to the end of the last response.
        cpu_s: CPU time of the server during the run.
        memory_mib: memory of its processes at the end, each shared page counted once.
    """

    server: str
    rate: str
    requests: int
    good: int
    outcomes: dict[str, int]
    window_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tokens: int
    took_s: float
    cpu_s: float
    memory_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that has loaded its model.

    Args:
        url: its address.
        model: model name to send.
        process: its first process.
    """

    url: str
    model: str
    process: psutil.Process

    def usage(self) -> tuple[float, float]:
        """Return the CPU seconds and the MiB of memory of all its processes."""
        cpu_s = size = 0.0
        for one in (self.process, *self.process.children(recursive=True)):
            times = one.cpu_times()
            cpu_s += times.user + times.system
            size += one.memory_full_info().pss
        return cpu_s, size / BYTES_PER_MIB


@contextmanager
def serving(name: str, threads: int, log: Path) -> Iterator[RunningServer]:
    """Start a server and load its model; stop it after the `with` block."""
    if name == "goodput":
        options = ["--threads", str(threads), "--kv-blocks", str(KV_BLOCKS)]
        with running_engine(MANIFEST, *options) as engine:
            server = RunningServer(
                url=engine["url"], model="smollm2", process=psutil.Process(engine["pid"])
            )
            _first_request(server)
            yield server
        return
    options = [*OPTIONS[name]]
    if name == "llama_cpp":
        options += ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
    with running(name, log, *options, variables={"OMP_NUM_THREADS": str(threads)}) as foreign:
        server = RunningServer(
            url=foreign.url, model=foreign.model, process=psutil.Process(foreign.pid)
        )
        _first_request(server)
        yield server


def _first_request(server: RunningServer) -> None:
    body = {"model": server.model, "prompt": "Hello", "max_tokens": 2}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        response.read()


def measure(
    name: str, server: RunningServer, rate: str, options: argparse.Namespace, where: Path
) -> ServedRun:
    """Replay the load of a rate and return the result."""
    command = [sys.executable, "-m", "goodput_core", "replay", "--rate", rate]
    command += ["--duration", f"{options.seconds}s", "--seed", str(SEED), "--salt", "servers"]
    command += ["--input-tokens", options.input_tokens, "--output-tokens", options.output_tokens]
    command += ["--tokenizer", str(model_folder()), "--target", server.url]
    command += ["--model", server.model, "--slo", str(MANIFEST), "--timeout", f"{TIMEOUT_S}s"]
    command += ["--length-pinning", "limit", "--out", str(where), "--no-report"]
    before_s, _ = server.usage()
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    after_s, memory_mib = server.usage()
    if finished.returncode not in {0, 3}:  # 3: the run is invalid, as on a busy machine
        raise SystemExit(f"replay ended with {finished.returncode}: {finished.stderr}")
    return _result(name, rate, options.seconds, where, cpu_s=after_s - before_s, mib=memory_mib)


def _result(
    name: str, rate: str, seconds: float, where: Path, *, cpu_s: float, mib: float
) -> ServedRun:
    records = list(read_records(where))
    ttft = sorted(one.ttft_ns / NS_PER_MS for one in records if one.ttft_ns is not None)
    tpot = [one.tpot_ns / NS_PER_MS for one in records if one.tpot_ns is not None]
    outcomes = dict.fromkeys(Outcome, 0)
    for one in records:
        outcomes[one.outcome] += 1
    end_ns = max(one.end_ns for one in records if one.end_ns is not None)
    return ServedRun(
        server=name,
        rate=rate,
        requests=len(records),
        good=read_summary(where).overall.good,
        outcomes={outcome.value: count for outcome, count in outcomes.items() if count},
        window_s=seconds,
        ttft_p50_ms=median(ttft) if ttft else None,
        ttft_p99_ms=ttft[-(len(ttft) // 100) - 1] if ttft else None,
        tpot_p50_ms=median(tpot) if tpot else None,
        tokens=sum(one.output_tokens for one in records),
        took_s=(end_ns - min(one.scheduled_ns for one in records)) / NS_PER_S,
        cpu_s=cpu_s,
        memory_mib=mib,
    )


def table(runs: Sequence[ServedRun]) -> list[str]:
    """Return the rows of a table with the medians of all repeats."""
    lines = [
        (
            "| rate | server | repeats | good | goodput, /s | TTFT p50, ms | TTFT p99, ms "
            "| TPOT p50, ms | tokens/s | CPU s per 1,000 tokens | memory, MiB | outcomes |"
        ),
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for rate, server in dict.fromkeys((run.rate, run.server) for run in runs):
        some = [run for run in runs if (run.rate, run.server) == (rate, server)]
        totals: dict[str, int] = {}
        for run in some:
            for outcome, count in run.outcomes.items():
                totals[outcome] = totals.get(outcome, 0) + count
        good, requests = sum(run.good for run in some), sum(run.requests for run in some)
        cells = [
            rate,
            server,
            str(len(some)),
            f"{good / requests:.1%}",
            f"{median(run.good / run.window_s for run in some):.2f}",
            _milliseconds([run.ttft_p50_ms for run in some]),
            _milliseconds([run.ttft_p99_ms for run in some]),
            _milliseconds([run.tpot_p50_ms for run in some]),
            f"{median(run.tokens / run.took_s for run in some):.1f}",
            f"{median(1000 * run.cpu_s / max(1, run.tokens) for run in some):.1f}",
            f"{median(run.memory_mib for run in some):,.0f}",
            ", ".join(f"{count} {outcome}" for outcome, count in totals.items()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _milliseconds(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{median(found):,.0f}" if found else "–"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the servers and print the table."""
    options = _parser().parse_args(argv)
    if find_spec("torch") is None or not model_folder().exists():
        print("not run: torch or the model is missing; `make smollm2` installs both")
        return 0
    if options.quick:
        options.servers, options.rates, options.repeats = ["goodput"], ["60/m"], 1
        options.seconds = 5
    missing = [
        name
        for name in options.servers
        if name != "goodput" and not (folder() / name / COMPLETE).exists()
    ]
    if missing:
        print(f"not installed: {', '.join(missing)}; run `python -m tools.foreign`")
        return 64
    runs: list[ServedRun] = []
    if options.results is not None and options.results.exists():
        lines = options.results.read_bytes().splitlines()
        runs += [msgspec.json.decode(line, type=ServedRun) for line in lines]
    for repeat in range(options.repeats):
        # Each repeat begins with another server.
        first = repeat % len(options.servers)
        for name in options.servers[first:] + options.servers[:first]:
            with tempfile.TemporaryDirectory() as temporary:
                where = Path(temporary)
                kept = options.runs or where
                with serving(name, options.threads, where / "log") as server:
                    for rate in options.rates:
                        folder_name = f"{name}-{rate.replace('/', 'p')}-{repeat + 1}"
                        runs.append(measure(name, server, rate, options, kept / folder_name))
                        if options.results is not None:
                            with options.results.open("a", encoding="utf-8") as results:
                                results.write(f"{json.dumps(asdict(runs[-1]))}\n")
    print("\n".join(table(sorted(runs, key=lambda run: _order(run, options.rates)))))
    return 0


def _order(run: ServedRun, rates: Sequence[str]) -> tuple[int, int]:
    at = rates.index(run.rate) if run.rate in rates else len(rates)
    return at, SERVERS.index(run.server)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=names_of(SERVERS), default=list(SERVERS), metavar="LIST")
    parser.add_argument(
        "--rates", type=lambda text: text.split(","), default=["12/m", "60/m"],
        help="of the load, each with a unit (12/m,60/m)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=positive_count, default=60, help="of each load (60)")
    parser.add_argument("--repeats", type=int, default=3, help="of all servers (%(default)s)")
    parser.add_argument("--threads", type=positive_count, default=1, help="that compute (1)")
    parser.add_argument("--input-tokens", default="64~60%", help="(64~60%%)")
    parser.add_argument("--output-tokens", default="24~60%", help="(24~60%%)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines to append to")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the run folders here")
    parser.add_argument("--quick", action="store_true", help="the engine alone, one short load")
    return parser


if __name__ == "__main__":
    sys.exit(main())
