"""`goodput trace`: import, export, describe, synthesize.

Arguments in, one call, a result on stdout; notes and progress on stderr.
"""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from goodput_core.cli import CommandParser, argument_type
from goodput_core.units import NS_PER_S, format_duration, parse_duration
from goodput_traces.describe import describe
from goodput_traces.describe_view import print_description, to_json
from goodput_traces.exporters.run import EXPORTS, export_trace
from goodput_traces.importers.base import ImportOptions
from goodput_traces.importers.registry import FORMATS
from goodput_traces.importers.run import ImportRequest, import_trace
from goodput_traces.reader import open_trace
from goodput_traces.sample import sample_path
from goodput_traces.synthesis import SynthesisOptions, synthesize, synthetic_metadata
from goodput_traces.writer import write_trace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

__all__ = ["main"]

_MAX_DURATION_NS: Final = 31 * 86_400 * NS_PER_S
_SAMPLE: Final = "sample"


def main(argv: list[str]) -> int:
    """Run `goodput trace ARGV` and return its exit code."""
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def _parser() -> CommandParser:
    parser = CommandParser(
        "goodput trace",
        summary="Import, export, describe and synthesize traces of requests.",
        examples=(
            "goodput trace describe sample",
            "goodput trace import AzureLLMInferenceTrace_conv.csv.gz --out azure.parquet",
        ),
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    _add_import(commands)
    _add_export(commands)
    _add_describe(commands)
    _add_synthesize(commands)
    return parser


def _add_import(commands: Any) -> None:
    formats = "\n".join(f"  {name:<10}{kind.summary}" for name, kind in FORMATS.items())
    parser = commands.add_parser(
        "import",
        help="turn another format into a trace",
        summary="Turn CSV, JSON lines or Parquet (plain, gz, xz, zst or bz2) into a trace.\n\n"
        f"formats:\n{formats}",
        examples=(
            "goodput trace import AzureLLMInferenceTrace_conv.csv.gz --out azure.parquet",
            "goodput trace import conversation_trace.jsonl.gz --format mooncake --out kimi.parquet",
            "goodput trace import unsorted.parquet --sort --out sorted.parquet",
        ),
    )
    parser.add_argument("source", type=Path, metavar="FILE", help="the file to read")
    _add_out(parser)
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        help="the source's format (default: recognised from its columns)",
    )
    parser.add_argument(
        "--sort", action="store_true", help="sort rows by arrival instead of refusing disorder"
    )
    parser.add_argument(
        "--block-size",
        type=argument_type(_block_size, "block size"),
        metavar="TOKENS",
        help="tokens per hash, where the source does not say",
    )
    parser.add_argument(
        "--source", dest="origin", metavar="TEXT", help="where the requests are from"
    )
    parser.add_argument("--licence", default="", metavar="TEXT", help="the source's licence")
    parser.set_defaults(run=_import)


def _add_export(commands: Any) -> None:
    formats = "\n".join(f"  {name:<10}{kind.summary}" for name, kind in EXPORTS.items())
    parser = commands.add_parser(
        "export",
        help="write a trace in another tool's format",
        summary=f"Write a trace in another tool's format; what is lost is said on stderr.\n\n"
        f"formats:\n{formats}",
        examples=(
            "goodput trace export sample --format mooncake --out sample.jsonl",
            "goodput trace export sample --format baseten --out baseten.parquet",
        ),
    )
    _add_trace(parser)
    _add_out(parser)
    parser.add_argument(
        "--format", choices=tuple(EXPORTS), required=True, help="the format to write"
    )
    parser.set_defaults(run=_export)


def _add_describe(commands: Any) -> None:
    parser = commands.add_parser(
        "describe",
        help="rates, lengths, bursts, ties, sessions, prefix reuse",
        summary="Show what a trace holds: rates, lengths, bursts, ties, sessions, prefix reuse.",
        examples=("goodput trace describe sample", "goodput trace describe prod.parquet --json"),
    )
    _add_trace(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_describe)


def _add_synthesize(commands: Any) -> None:
    defaults = SynthesisOptions()
    parser = commands.add_parser(
        "synthesize",
        help="make a trace with bursts, two classes, sessions and shared prefixes",
        summary="Make a synthetic trace from a seed: bursts, the classes interactive and batch, "
        "sessions and shared prefixes. It is labelled synthetic.",
        examples=(
            "goodput trace synthesize --out load.parquet --seed 1 --duration 10m --rate 20",
            "goodput trace synthesize --out calm.parquet --burst-factor 1 --batch-share 0",
        ),
    )
    _add_out(parser)
    parser.add_argument(
        "--seed", type=int, default=defaults.seed, help="equal seeds, equal traces (%(default)s)"
    )
    parser.add_argument(
        "--duration",
        type=argument_type(_duration, "duration"),
        default=defaults.duration_ns,
        help="how long arrivals go on (60s)",
    )
    parser.add_argument(
        "--rate",
        type=argument_type(_between(0.001, 100_000), "rate"),
        default=defaults.rate_per_s,
        help="mean requests per second (%(default)s)",
    )
    parser.add_argument(
        "--burst-factor",
        type=argument_type(_between(1, 1000), "factor"),
        default=defaults.burst_factor,
        help="a burst's rate over the quiet rate; 1: no bursts (%(default)s)",
    )
    for name, default, what in (
        ("--batch-share", defaults.batch_share, "share of requests of class batch"),
        ("--session-share", defaults.session_share, "chance that a request continues a session"),
    ):
        parser.add_argument(
            name,
            type=argument_type(_between(0, 1), "share"),
            default=default,
            help=f"{what} (%(default)s)",
        )
    parser.set_defaults(run=_synthesize)


def _add_trace(parser: CommandParser) -> None:
    parser.add_argument(
        "trace",
        type=lambda text: sample_path() if text == _SAMPLE else Path(text),
        metavar="TRACE",
        help=f"a trace; `{_SAMPLE}` is the one that comes with goodput",
    )


def _add_out(parser: CommandParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument("--force", action="store_true", help="replace the file when it exists")


def _import(arguments: argparse.Namespace) -> int:
    request = ImportRequest(
        source=arguments.source,
        out=arguments.out,
        format=arguments.format,
        options=ImportOptions(
            source=arguments.origin or f"imported from {arguments.source.name}",
            licence=arguments.licence,
            block_size=arguments.block_size,
        ),
        sort=arguments.sort,
        overwrite=arguments.force,
    )
    with _progress(arguments.source) as on_bytes:
        result = import_trace(request, on_bytes)
    _note(result.notes)
    sys.stdout.write(
        f"{arguments.out}: {result.num_rows:,} rows from {result.container} "
        f"in the format {result.format}\n"
    )
    return 0


def _export(arguments: argparse.Namespace) -> int:
    result = export_trace(
        arguments.trace, arguments.out, arguments.format, overwrite=arguments.force
    )
    _note(result.notes)
    sys.stdout.write(
        f"{arguments.out}: {result.num_rows:,} rows in the format {arguments.format}\n"
    )
    return 0


def _describe(arguments: argparse.Namespace) -> int:
    description = describe(open_trace(arguments.trace))
    if arguments.json:
        json.dump(to_json(arguments.trace, description), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sample = arguments.trace == sample_path()
        print_description(Console(), _SAMPLE if sample else str(arguments.trace), description)
    return 0


def _synthesize(arguments: argparse.Namespace) -> int:
    options = SynthesisOptions(
        seed=arguments.seed,
        duration_ns=arguments.duration,
        rate_per_s=arguments.rate,
        burst_factor=arguments.burst_factor,
        batch_share=arguments.batch_share,
        session_share=arguments.session_share,
    )
    command = shlex.join(
        [
            *("goodput", "trace", "synthesize", "--out", arguments.out.name),
            *("--seed", str(options.seed), "--duration", f"{options.duration_ns / NS_PER_S:g}s"),
            *("--rate", f"{options.rate_per_s:g}", "--burst-factor", f"{options.burst_factor:g}"),
            *("--batch-share", f"{options.batch_share:g}"),
            *("--session-share", f"{options.session_share:g}"),
        ]
    )
    rows = write_trace(
        arguments.out,
        synthesize(options),
        synthetic_metadata(command),
        overwrite=arguments.force,
    )
    sys.stdout.write(
        f"{arguments.out}: {rows:,} synthetic rows over {format_duration(options.duration_ns)}\n"
    )
    return 0


@contextmanager
def _progress(source: Path) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr that shows how much of the source has been read; none in a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal or not source.is_file():
        yield None
        return
    columns = (TextColumn("importing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("import", total=source.stat().st_size)
        yield lambda position: progress.update(task, completed=position)


def _note(notes: tuple[str, ...]) -> None:
    for note in notes:
        sys.stderr.write(f"note: {note}\n")


def _block_size(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 1 << 20):
        raise ValueError(f"{text!r} is not a block size; give a number of tokens, 1 to 1048576")
    return int(text)


def _duration(text: str) -> int:
    duration = parse_duration(text)
    if not 0 < duration <= _MAX_DURATION_NS:
        raise ValueError(f"{text!r} is out of bounds; a duration is above 0 and at most 31d")
    return duration


def _between(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            raise ValueError(f"{text!r} is not a number from {low:g} to {high:g}")
        return number

    return parse
