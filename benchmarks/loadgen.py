"""This replayer beside other load generators, on the same trace and the same server.

Each tool replays a trace with Poisson arrivals against a mock server in a process of its own, which
streams 16 tokens per response and logs all arrivals. A bare aiohttp loop is the reference.
Measured from outside are the error between intended and actual arrivals, CPU time, memory, lost
requests and the highest sustained rate; docs/benchmarks.md defines them.

    python -m benchmarks.loadgen --build              # environments of the other tools, 8 GB
    python -m benchmarks.loadgen                      # all tools, three repeats: half an hour
    python -m benchmarks.loadgen --minutes 12         # as many cells as fit into 12 minutes
    python -m benchmarks.loadgen --tools bare,replay  # without other tools
    python -m benchmarks.loadgen --markdown           # tables for docs/benchmarks.md
    python -m benchmarks.loadgen --quick              # bare loop and replay, in seconds

The tools run one after another, in a random order that is new in each repeat. Each result is
appended to a file at once. The same command continues after the last result, and `--minutes 0`
then only prints the tables. A tool that cannot be installed is reported with the reason.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from benchmarks.comparison.arguments import names_of, positive_count
from benchmarks.peers.environments import BuildError, build, cache_folder, tokenizer
from benchmarks.peers.measuring import Cell, Measurement, measure
from benchmarks.peers.summary import sections
from benchmarks.peers.tools import TOOLS
from benchmarks.replayer_lateness import machine
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from benchmarks.peers.summary import Section

RATES: Final = [200, 500, 1000]
CLIMB: Final = [1500, 2000, 2500, 3000]
SECONDS: Final = 10
REPEATS: Final = 3
_TOO_FAR: Final = 0.8
"""A tool that reached less than this share of a rate is not run at it or above it again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cells that have no result yet, and print the tables."""
    options = _parser().parse_args(argv)
    if options.quick:
        options.tools, options.rates, options.climb = ["bare", "replay"], [100], []
        options.seconds, options.repeats = 3, 1
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.jsonl" if options.quick else options.results
        missing = _build(options.tools)
        if options.build:
            return int(bool(missing))
        tools = [name for name in options.tools if name not in missing]
        measurements = _measure_all(tools, options, results)
    _print(measurements, missing, options)
    return 0


def _build(names: Sequence[str]) -> dict[str, str]:
    """Build the environments; return the reason of each tool that is not available."""
    missing = {}
    for name in names:
        environment = TOOLS[name].environment
        if environment is None:
            continue
        _say(f"{name}: environment in {environment.folder}")
        try:
            build(environment)
            tokenizer(environment)
        except BuildError as error:
            missing[name] = str(error)
            _say(f"{name}: not available: {error}")
    return missing


def _measure_all(
    tools: Sequence[str], options: argparse.Namespace, path: Path
) -> list[Measurement]:
    """Run the cells in order, append each result to a file, and return all results.

    Results of traces of another length stay in the file, but are not returned.
    """
    earlier = [] if options.fresh else _read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Also removes a line that was cut off when an earlier run was killed.
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in earlier))
    done = {one.cell: one for one in earlier if one.cell.seconds == options.seconds}
    deadline = time.monotonic() + 60 * options.minutes
    for number, cell in enumerate(_cells(tools, options, done), start=1):
        if time.monotonic() >= deadline:
            _say(f"{options.minutes:g} minutes are over; the same command continues")
            break
        _say(f"{number}: {cell.tool}, {cell.rate_per_s}/s, repeat {cell.repeat + 1}", end=" … ")
        with tempfile.TemporaryDirectory() as folder:
            environment = TOOLS[cell.tool].environment
            model = tokenizer(environment) if environment else None
            result = measure(TOOLS[cell.tool], cell, Path(folder), model)
        done[cell] = result
        with path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        _say(_line(result))
    return list(done.values())


def _cells(
    tools: Sequence[str], options: argparse.Namespace, done: dict[Cell, Measurement]
) -> Iterator[Cell]:
    """Yield the cells without a result, in an order that depends on the results so far.

    The first repeat comes first, then higher rates for the tools that sustained all rates, then
    the other repeats.
    """
    shuffle = random.Random(0).shuffle
    for repeat in range(options.repeats):
        block = [
            Cell(tool=tool, rate_per_s=rate, repeat=repeat, seconds=options.seconds)
            for tool in tools
            for rate in _rates_of(tool, options)
        ]
        shuffle(block)
        for cell in block:
            if cell not in done and not _out_of_reach(cell, done.values()):
                yield cell
        if repeat == 0:
            yield from _climb(tools, options, done)


def _climb(
    tools: Sequence[str], options: argparse.Namespace, done: dict[Cell, Measurement]
) -> Iterator[Cell]:
    for tool in tools:
        for rate in options.climb if not TOOLS[tool].page else ():
            own = [one for one in done.values() if one.cell.tool == tool]
            if not all(one.sustained for one in own if one.cell.rate_per_s < rate):
                break
            cell = Cell(tool=tool, rate_per_s=rate, repeat=0, seconds=options.seconds)
            if cell not in done:
                yield cell


def _rates_of(tool: str, options: argparse.Namespace) -> list[int]:
    """Return the rates of a tool: with a live page only the highest, whose lag is the largest."""
    if TOOLS[tool].page:
        return [max(options.rates)]
    rates: list[int] = options.rates
    if TOOLS[tool].environment and options.peer_rates:
        rates = options.peer_rates
    return rates


def _out_of_reach(cell: Cell, results: Iterable[Measurement]) -> bool:
    """True if the tool was far from this rate, or from a lower one, before."""
    return any(
        one.cell.tool == cell.tool
        and one.cell.rate_per_s <= cell.rate_per_s
        and (one.timing is None or one.timing.achieved_per_s < _TOO_FAR * one.cell.rate_per_s)
        for one in results
    )


def _read(path: Path) -> list[Measurement]:
    """Read the results of earlier runs.

    Raises:
        SystemExit: the file is not one of results.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    # A line without an end was cut off.
    try:
        return [msgspec.json.decode(line, type=Measurement) for line in lines[:-1]]
    except msgspec.MsgspecError as error:
        raise SystemExit(
            f"--results: {path} is not a file of this version's results ({error}); "
            "name another file, or add --fresh to replace it"
        ) from None


def _line(result: Measurement) -> str:
    if result.failure:
        return f"failed: {result.failure}"
    if result.timing is None:
        return "no arrivals"
    return (
        f"{result.timing.achieved_per_s:,.0f}/s, error p99 {result.timing.error_p99_ms:.1f} ms, "
        f"{result.cpu_s_per_1000:.2f} CPU s per 1,000, {result.lost} lost, {result.wall_s:.0f} s"
    )


def _print(
    measurements: Sequence[Measurement], missing: dict[str, str], options: argparse.Namespace
) -> None:
    tables = sections(measurements)
    if options.json:
        document = {
            "machine": machine(),
            "runs": msgspec.to_builtins(measurements),
            "tables": msgspec.to_builtins(tables),
            "not_available": missing,
        }
        print(json.dumps(document, indent=2))
        return
    for table in tables:
        if options.markdown:
            print(_markdown(table))
        else:
            _show(table)
    for name, reason in missing.items():
        print(f"{TOOLS[name].title} is not available: {reason}")


def _markdown(section: Section) -> str:
    left = {"tool", "measure"}
    rule = " | ".join("---" if name in left else "---:" for name in section.columns)
    rows = "".join(f"| {' | '.join(row)} |\n" for row in section.rows)
    return f"{section.title}:\n\n| {' | '.join(section.columns)} |\n| {rule} |\n{rows}"


def _show(section: Section) -> None:
    table = Table(title=section.title)
    for name in section.columns:
        table.add_column(name, justify="left" if name in {"tool", "measure"} else "right")
    for row in section.rows:
        table.add_row(*row)
    Console(width=max(170, Console().width)).print(table)


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def _rates(text: str) -> list[int]:
    return sorted({positive_count(part) for part in text.split(",")})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loadgen",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tools",
        type=names_of(TOOLS),
        default=list(TOOLS),
        metavar="NAMES",
        help=f"comma-separated names of {', '.join(TOOLS)} (default: all)",
    )
    parser.add_argument(
        "--rates",
        type=_rates,
        default=RATES,
        metavar="PER_S",
        help="comma-separated rates, requests per second (default: 200,500,1000)",
    )
    parser.add_argument(
        "--peer-rates",
        type=_rates,
        metavar="PER_S",
        help="rates of the tools of others (default: the same)",
    )
    parser.add_argument(
        "--climb",
        type=_rates,
        default=CLIMB,
        metavar="PER_S",
        help="rates run once, in rising order, until a tool does not sustain one "
        "(default: 1500,2000,2500,3000)",
    )
    parser.add_argument(
        "--seconds", type=positive_count, default=SECONDS, help="length of a trace (%(default)s)"
    )
    parser.add_argument("--repeats", type=positive_count, default=REPEATS, help="(%(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="start no cell after this time (default: run all cells)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=cache_folder() / "results.jsonl",
        metavar="FILE",
        help="file of results, one per line (%(default)s)",
    )
    parser.add_argument("--fresh", action="store_true", help="replace the results in the file")
    parser.add_argument("--build", action="store_true", help="only build the environments")
    parser.add_argument("--quick", action="store_true", help="bare loop and replay, one short run")
    parser.add_argument("--json", action="store_true", help="print runs and tables as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())
