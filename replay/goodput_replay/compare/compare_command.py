"""`replay compare`: two or more finished runs side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_core.cli import CommandParser
from goodput_core.errors import ExitCode, InputError, UsageError
from goodput_core.files import is_disk_full, write_output
from goodput_core.slo.targets import USUAL_CONFIDENCE
from goodput_replay.compare.comparison import compare_runs
from goodput_replay.compare.page import render_comparison
from goodput_replay.compare.runs import load_run
from goodput_replay.compare.view import print_comparisons
from goodput_replay.runs.json_results import encode_json
from goodput_replay.runs.named_outputs import require_output
from goodput_replay.runs.tables import open_console
from goodput_replay.slo_options import add_confidence

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str]) -> int:
    """Compare the runs and print the result.

    Args:
        argv: the arguments after `replay compare`.

    Raises:
        UsageError: fewer than two runs, a run is named twice, or the page is a file of a run.
        InputError: a folder has no readable run, or the page cannot be written.
    """
    given = make_parser().parse_args(argv)
    folders: list[Path] = given.runs
    if len(folders) < 2:
        raise UsageError("replay compare: name at least two runs, the baseline first")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError("replay compare: the same run was named twice; name different runs")
    if given.html is not None:
        require_output("--html", given.html)
    runs = [load_run(folder) for folder in folders]
    result = compare_runs(runs, confidence=float(given.confidence))
    if given.html is not None:
        _write_page(render_comparison(result, runs), given.html)
    if given.json:
        sys.stdout.write(encode_json(result).decode())
    else:
        print_comparisons(result, open_console())
    return ExitCode.PASS


def make_parser() -> CommandParser:
    """Build the parser of `replay compare`."""
    parser = CommandParser(
        "replay compare",
        summary="Compare finished runs with the first one: attainment, goodput, latencies, and the "
        "requests whose outcome changed. `replay gate` gives a verdict.",
        usage="replay compare BASELINE RUN [RUN ...] [OPTION ...]",
        examples=(
            "replay compare runs/old runs/new --html compare.html",
            "replay compare runs/sarathi runs/vllm runs/slo --json",
        ),
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, the baseline first"
    )
    add_confidence(parser, "each bound", default=USUAL_CONFIDENCE)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="write a page with the distributions, attainment over time and changed requests",
    )
    return parser


def _write_page(page: str, path: Path) -> None:
    try:
        write_output(path, page.encode())
    except OSError as error:
        if is_disk_full(error):
            raise
        why = error.strerror or type(error).__name__
        raise InputError(f"{path}: the page cannot be written ({why})") from error
