"""Where the replayer spends its CPU time while it sends, by part of the work.

`replay` sends a constant schedule to `mock_server.py`, and a timer of CPU time samples the stack of
the sending thread. A sample counts the CPU time of this thread since the sample before it. The part
of a sample is that of its innermost frame in a known module. Time in C code, such as the reads of
uvloop, counts for the next line of Python.

    python -m benchmarks.sending_profile             # 500 requests a second for 40 seconds
    python -m benchmarks.sending_profile --quick     # for five seconds
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.replayer_lateness import INPUT_TOKENS, OUTPUT_TOKENS, mock_server
from rich.console import Console
from rich.table import Table

from goodput_core.dispatch import run_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

EVERY_S = 0.002
# The first entry with which a frame's file ends decides; a folder ends with a slash.
PARTS = (
    ("/sending/client/chunks.py", "events, JSON, times of tokens"),
    ("/sending/client/stream.py", "events, JSON, times of tokens"),
    ("/openai/", "events, JSON, times of tokens"),
    ("/sending/client/", "states of a request, its outcome and its headers"),
    ("/sending/body.py", "bodies"),
    ("/sending/prompts.py", "bodies"),
    ("/sending/lookahead.py", "bodies"),
    ("/goodput_replay/runs/", "records and judging"),
    ("/goodput_core/slo/", "records and judging"),
    ("/goodput_replay/live/", "records and judging"),
    ("/sending/real_time.py", "records and judging"),
    ("/aiohttp/streams.py", "sockets, aiohttp's parser and stream reader"),
    ("/aiohttp/client_proto.py", "sockets, aiohttp's parser and stream reader"),
    ("/aiohttp/base_protocol.py", "sockets, aiohttp's parser and stream reader"),
    ("/aiohttp/", "aiohttp: request set-up, headers, send, release of the connection"),
    ("/yarl/", "aiohttp: request set-up, headers, send, release of the connection"),
    ("/multidict/", "aiohttp: request set-up, headers, send, release of the connection"),
    ("/asyncio/timeouts.py", "time limit of each request"),
    ("/goodput_replay/sending/", "event loop, pacing"),
    ("/asyncio/", "event loop, pacing"),
)


class StackSampler:
    """Samples the stack of this thread, the main thread.

    Attributes:
        spent_ns: CPU time by part.
    """

    def __init__(self) -> None:
        self.spent_ns: Counter[str] = Counter()
        self._before_ns = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take samples inside the block."""
        self._before_ns = time.thread_time_ns()
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        now_ns = time.thread_time_ns()
        if is_sending(frame):
            self.spent_ns[part_of(frame)] += now_ns - self._before_ns
        self._before_ns = now_ns


def is_sending(frame: FrameType | None) -> bool:
    """Return True if the stack runs the event loop of a replay, not its preparation or its end."""
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_filename.rpartition("/")[2] + ":" + frame.f_code.co_name)
        frame = frame.f_back
    return "runner.py:_run_plan" in names and "real_time.py:finish" not in names


def part_of(frame: FrameType | None) -> str:
    """Return the part of the work of a stack."""
    while frame is not None:
        path = frame.f_code.co_filename
        for place, part in PARTS:
            if place in path if place.endswith("/") else path.endswith(place):
                return part
        frame = frame.f_back
    return "other"


def main() -> int:
    """Replay, and print the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=int, default=500, help="requests per second (%(default)s)")
    parser.add_argument("--seconds", type=int, default=40, help="length of the run (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="five seconds")
    options = parser.parse_args()
    seconds = 5 if options.quick else options.seconds
    sampler = StackSampler()
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "arrivals.csv"
        with mock_server(log) as url, sampler.running(), redirect_stdout(StringIO()):
            run_command(
                [
                    *("replay", "--rate", f"{options.rate}/s", "--duration", f"{seconds}s"),
                    *("--arrivals", "constant", "--input-tokens", str(INPUT_TOKENS)),
                    *("--output-tokens", str(OUTPUT_TOKENS), "--target", url, "--no-probe"),
                    *("--ttft", "200ms", "--tpot", "50ms", "--objective", "99%"),
                    *("--out", str(Path(scratch) / "run"), "--no-report", "--workers", "1"),
                ]
            )
        requests = len(log.read_text().splitlines())
    total_ns = sampler.spent_ns.total()
    if not requests or not total_ns:
        raise SystemExit("the replay sent no requests")
    table = Table(title=f"{requests:,} requests, {total_ns / 1e6 / requests:.2f} s per 1,000")
    table.add_column("part")
    table.add_column("share of the CPU time", justify="right")
    for part, spent_ns in sampler.spent_ns.most_common():
        table.add_row(part, f"{spent_ns / total_ns:.0%}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
