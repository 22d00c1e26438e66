"""Arguments of `goodput trace`; `goodput_traces.commands` runs them.

Building the parser imports neither pyarrow nor numpy, so `--help` and shell completion are fast.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from goodput_core.cli import CommandParser, argument_type, parse_whole
from goodput_core.errors import ExitCode
from goodput_core.units import NS_PER_S, parse_duration, parse_size
from goodput_traces.exporters import EXPORTS
from goodput_traces.format.schema import OPTIONAL_COLUMNS
from goodput_traces.importers import FORMATS
from goodput_traces.importers.column_map import ColumnMap, parse_filter, parse_pairs
from goodput_traces.sample import SAMPLE, trace_path
from goodput_traces.synthesis.two_classes import SynthesisOptions

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main", "make_parser"]

"""The name of the trace shipped with Goodput on the command line."""
_MAX_DURATION_NS: Final = 31 * 86_400 * NS_PER_S


def main(argv: list[str]) -> int:
    """Run `goodput trace ARGV` and return its exit code."""
    arguments = make_parser().parse_args(argv)
    from goodput_traces.commands import COMMANDS  # noqa: PLC0415 - loads pyarrow

    try:
        code = COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The process that reads stdout closed it early, as in `describe | head`: not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PASS
    return code


def make_parser() -> CommandParser:
    """Build the parser of `goodput trace`."""
    parser = CommandParser(
        "goodput trace",
        summary="Import, export, describe, synthesize and anonymize traces of requests.",
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
    _add_anonymize(commands)
    return parser


def _add_import(commands: Any) -> None:
    formats = "\n".join(f"  {name:<12}{kind.summary}" for name, kind in FORMATS.items())
    parser = commands.add_parser(
        "import",
        help="turn another format into a trace",
        summary="Turn CSV, JSON lines or Parquet (plain, gz, xz, zst or bz2) into a trace.\n\n"
        f"formats:\n{formats}",
        examples=(
            "goodput trace import AzureLLMInferenceTrace_conv.csv.gz --out azure.parquet",
            "goodput trace import conversation_trace.jsonl.gz --format mooncake --out kimi.parquet",
            "goodput trace import unsorted.parquet --sort --out sorted.parquet",
            "goodput trace import log.csv --map arrival=time,slo_class=tier --preview",
            "goodput trace import access.log --map examples/nginx-access-log.yaml --preview",
        ),
    )
    parser.add_argument(
        "sources",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a file to read; several files can be joined if each session has its own clock (weka)",
    )
    _add_out(parser, required=False)
    _add_limit(parser)
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        help="the source's format (default: recognised from its columns)",
    )
    parser.add_argument(
        "--map",
        type=argument_type(_column_map, "map"),
        action="append",
        default=[],
        metavar="MAP",
        help="the log's columns by column of the trace: arrival=time,input_tokens=prompt_tokens, "
        "or a YAML or JSON file; nested fields are joined by dots, and :s, :ms, :us or :ns names "
        "a unit",
    )
    parser.add_argument(
        "--only",
        type=argument_type(parse_filter, "condition"),
        action="append",
        default=[],
        metavar="COLUMN=TEXT",
        help="import only the rows of a log that have this text in the column; * stands for any "
        "characters",
    )
    parser.add_argument(
        "--preview",
        action="store_true",
        help="show the first rows and the assumptions about the columns, and write no file",
    )
    parser.add_argument(
        "--sort",
        action="store_true",
        help="sort rows by arrival instead of rejecting an unsorted source",
    )
    parser.add_argument(
        "--block-size",
        type=argument_type(
            partial(parse_whole, low=1, high=1 << 20, what="a number of tokens"), "block size"
        ),
        metavar="TOKENS",
        help="tokens per hash, if the source does not state it",
    )
    parser.add_argument("--source", dest="origin", metavar="TEXT", help="origin of the requests")
    parser.add_argument("--licence", default="", metavar="TEXT", help="the source's licence")


def _add_export(commands: Any) -> None:
    formats = "\n".join(f"  {name:<12}{kind.summary}" for name, kind in EXPORTS.items())
    parser = commands.add_parser(
        "export",
        help="write a trace in another tool's format",
        summary=f"Write a trace in another tool's format. Notes on stderr list lost values.\n\n"
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


def _add_describe(commands: Any) -> None:
    parser = commands.add_parser(
        "describe",
        help="show rates, lengths, bursts, ties, sessions and prefix reuse",
        summary="Describe a trace: rates, lengths, bursts, ties, sessions, prefix reuse.",
        examples=("goodput trace describe sample", "goodput trace describe prod.parquet --json"),
    )
    _add_trace(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _add_synthesize(commands: Any) -> None:
    defaults = SynthesisOptions()
    parser = commands.add_parser(
        "synthesize",
        help="generate a trace: like another one, or with bursts, two classes and sessions",
        summary="Generate a trace from a seed. With --like, arrivals, lengths, classes, prefixes "
        "and sessions are\nlike those of another trace, and a table shows how like it they are. "
        "Without --like, the trace\nhas bursts, the classes interactive and batch, sessions and "
        "shared prefixes. The metadata labels\nthe trace as synthetic.",
        examples=(
            "goodput trace synthesize --like prod.parquet --out like.parquet --duration 1h",
            "goodput trace synthesize --like sample --out double.parquet --rate 10 --force",
            "goodput trace synthesize --out load.parquet --seed 1 --duration 10m --rate 20",
            "goodput trace synthesize --out calm.parquet --burst-factor 1 --batch-share 0",
        ),
    )
    _add_out(parser)
    parser.add_argument(
        "--like",
        type=trace_path,
        metavar="TRACE",
        help=f"the trace to imitate; `{SAMPLE}` is the one shipped with goodput",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=defaults.seed,
        help="seed of the random numbers; equal seeds give equal traces (%(default)s)",
    )
    parser.add_argument(
        "--duration",
        type=argument_type(_duration, "duration"),
        help="time span of the arrivals (60s; with --like, that of the other trace)",
    )
    parser.add_argument(
        "--rate",
        type=argument_type(_number_between(0.001, 100_000), "rate"),
        help=f"mean requests per second ({defaults.rate_per_s}; with --like, that of the other "
        "trace)",
    )
    parser.add_argument("--json", action="store_true", help="with --like: print JSON")
    _add_limit(parser)
    group = parser.add_argument_group("without --like")
    group.add_argument(
        "--burst-factor",
        type=argument_type(_number_between(1, 1000), "factor"),
        help=f"ratio of the burst rate to the base rate; 1 for no bursts ({defaults.burst_factor})",
    )
    for name, default, what in (
        ("--batch-share", defaults.batch_share, "share of requests of class batch"),
        (
            "--session-share",
            defaults.session_share,
            "probability that an interactive request continues a session",
        ),
    ):
        group.add_argument(
            name,
            type=argument_type(_number_between(0, 1), "share"),
            help=f"{what} ({default})",
        )


def _add_anonymize(commands: Any) -> None:
    parser = commands.add_parser(
        "anonymize",
        help="remove texts and hash ids, to share a trace",
        summary="Write a trace without texts. Ids of requests, sessions and organisations, and the "
        "hashes of blocks,\nare replaced with keyed hashes. Times, lengths, classes, targets and "
        "names of models are kept.",
        examples=(
            "goodput trace anonymize prod.parquet -o shared.parquet --drop model_name",
            "goodput trace anonymize prod.parquet -o shared.parquet --key-file trace.key",
            "goodput trace anonymize prod.parquet -o shared.parquet --relative-times",
        ),
    )
    _add_trace(parser)
    _add_out(parser)
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="a secret of 16 to 4096 bytes; the same key gives the same ids, also in another trace "
        "(default: a random key that is not kept)",
    )
    parser.add_argument(
        "--relative-times",
        action="store_true",
        help="count arrivals from the first one, which hides the date and the time of day",
    )
    parser.add_argument(
        "--drop",
        choices=[name for name in OPTIONAL_COLUMNS if name != "block_size"],
        action="append",
        default=[],
        metavar="COLUMN",
        help="leave out this column too, such as model_name; repeatable",
    )


def _add_trace(parser: CommandParser) -> None:
    parser.add_argument(
        "trace",
        type=trace_path,
        metavar="TRACE",
        help=f"a trace; `{SAMPLE}` is the one shipped with goodput",
    )
    _add_limit(parser)


def _add_limit(parser: CommandParser) -> None:
    parser.add_argument(
        "--max-decoded-size",
        type=argument_type(parse_size, "size"),
        metavar="SIZE",
        help="reject a file that decodes to more, for example 4GiB (default: 256 times the size of "
        "a Parquet file, at least 256MiB; 1024 times that of compressed text, at least 1GiB)",
    )


def _add_out(parser: CommandParser, *, required: bool = True) -> None:
    parser.add_argument(
        "-o", "--out", type=Path, required=required, metavar="FILE", help="file to write"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def _column_map(text: str) -> ColumnMap | Path:
    """Return the map that the text has, or the path of the file that has it."""
    return parse_pairs(text) if "=" in text else Path(text)


def _duration(text: str) -> int:
    duration = parse_duration(text)
    if not 0 < duration <= _MAX_DURATION_NS:
        raise ValueError(f"{text!r} is out of bounds; the duration must be above 0 and at most 31d")
    return duration


def _number_between(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            raise ValueError(f"{text!r} is not a number from {low:g} to {high:g}")
        return number

    return parse
