"""`replay gate`: judge a candidate by recorded runs, alone or against a baseline."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from goodput_core.cli import CommandParser, argument_type, parse_port
from goodput_core.errors import InputError, UsageError
from goodput_core.files import is_disk_full, write_output
from goodput_core.replay_job import ABResult
from goodput_core.slo.gate import DEFAULT_MARGIN
from goodput_core.slo.targets import USUAL_CONFIDENCE, parse_margin, parse_objective
from goodput_replay.compare.builds import add_recorded_revision
from goodput_replay.compare.gate import GateResult, RunPair, judge_runs
from goodput_replay.compare.outputs import junit_xml, markdown, print_result
from goodput_replay.compare.progress import result_message
from goodput_replay.compare.recorded_baseline import find_recorded_runs, read_recorded_spread
from goodput_replay.compare.recording import (
    AB_FILE,
    RECORDED_FILES,
    is_recording,
    read_history,
    read_recording,
)
from goodput_replay.result_options import add_result_file, reporting_errors, write_comparison
from goodput_replay.runs.files import RECORDS_FILE, SUMMARY_FILE
from goodput_replay.runs.json_results import encode_json
from goodput_replay.runs.named_outputs import require_output
from goodput_replay.runs.summary import read_summary
from goodput_replay.runs.tables import open_console
from goodput_replay.slo_options import add_confidence
from goodput_replay.storage import FolderCopies, is_uri

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from goodput_replay.compare.recording import ABRecording


__all__ = [
    "add_output_options",
    "add_rule_options",
    "main",
    "make_parser",
    "parse_address",
    "require_folders",
    "require_outputs",
    "write_outputs",
]


def main(argv: Sequence[str]) -> int:
    """Judge the runs, print the result, and return the exit code of the verdict.

    Args:
        argv: the arguments after `replay gate`.

    Raises:
        UsageError: the arguments do not fit together.
        InputError: a run cannot be read, or the runs cannot be compared.
    """
    given = make_parser().parse_args(argv)
    require_outputs(given)
    with reporting_errors(given.result_file, ABResult), FolderCopies() as copies:
        try:
            result = _judge(given, copies)
        except InputError as error:
            raise InputError(copies.with_uris(str(error))) from error
        try:
            write_outputs(result, given)
        finally:
            write_comparison(given.result_file, result_message(result))
    if given.serve is not None:
        from goodput_replay.compare.serving import serve_result  # noqa: PLC0415 - loads aiohttp

        serve_result(result, given.serve, Console(stderr=True))
    return result.exit_code


def _judge(given: argparse.Namespace, copies: FolderCopies) -> GateResult:
    """Judge the named runs.

    Raises:
        UsageError: the arguments do not fit together.
        InputError: a run cannot be read, or the runs cannot be compared.
        UnreachableError: the object storage of a run could not be read.
    """
    runs = [_read_place(run, copies) for run in given.runs]
    baselines = given.baseline and [_read_place(run, copies) for run in given.baseline]
    if given.recorded is not None:
        if given.history is not None:
            raise UsageError("replay gate: --history cannot be combined with --recorded; remove it")
        if len(runs) > 1 or is_recording(runs[0]):
            raise UsageError(
                "replay gate: --recorded needs one run of the candidate, because further runs "
                "would share the conditions of the first"
            )
        recorded = copies.folder(given.recorded, names=RECORDED_FILES, deep=True)
        if not baselines:
            like = read_summary(runs[0])
            baselines = find_recorded_runs(recorded, given.recorded_revision, like)[:1]
    elif given.recorded_revision is not None:
        raise UsageError("replay gate: --recorded-revision is only supported with --recorded")
    pairs, recording = _pairs(runs, baselines)
    if recording is not None:
        given.margin = parse_margin(recording.margin) if given.margin is None else given.margin
        given.confidence = given.confidence or parse_objective(recording.confidence)
        given.confidence = recording.confidence_now(given.confidence)
    if pairs[0].baseline is None:
        for option in ("history", "margin"):
            if getattr(given, option) is not None:
                raise UsageError(f"replay gate: --{option} is only supported with --baseline")
    is_recorded = recording is not None and recording.recorded
    read_spread = read_recorded_spread if is_recorded else read_history
    history = None if given.history is None else partial(read_spread, given.history)
    if given.recorded is not None:
        history = partial(read_recorded_spread, recorded, revision=given.recorded_revision)
    result = judge_runs(
        pairs,
        margin=DEFAULT_MARGIN if given.margin is None else given.margin,
        confidence=given.confidence or USUAL_CONFIDENCE,
        history=history,
    )
    return replace(
        result,
        sentence=copies.with_uris(result.sentence),
        candidates=tuple(map(copies.with_uris, result.candidates)),
        baselines=tuple(map(copies.with_uris, result.baselines)),
        warnings=tuple(map(copies.with_uris, result.warnings)),
    )


def _read_place(place: str, copies: FolderCopies) -> Path:
    """Return the folder of a run or of a recording; one in object storage is copied first."""
    folder = copies.folder(place, names=(SUMMARY_FILE, RECORDS_FILE, AB_FILE))
    return copies.folder(place) if is_uri(place) and is_recording(folder) else folder


def make_parser() -> CommandParser:
    """Build the parser of `replay gate`."""
    parser = CommandParser(
        "replay gate",
        summary="Judge a build by its recorded runs: PASS, FAIL, INCONCLUSIVE or INVALID. With "
        "--baseline, the build must also not lose more than the margin against the baseline.",
        usage="replay gate RUN [RUN ...] [--baseline RUN [RUN ...] | --recorded DIR] [OPTION ...]",
        examples=(
            "replay gate runs/candidate",
            "replay gate runs/b-1 runs/b-2 --baseline runs/a-1 runs/a-2 --margin 0.5%",
            "replay gate runs/candidate --recorded history",
            "replay gate runs/ab --junit gate.xml --markdown gate.md",
            "replay gate runs/ab --serve 127.0.0.1:8080",
        ),
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="folder of a run of the candidate, or one folder of `replay ab`; or its place in "
        "object storage, such as s3://BUCKET/PATH",
    )
    parser.add_argument(
        "--baseline",
        metavar="RUN",
        nargs="+",
        action="extend",
        help="runs of the baseline, one for each run of the candidate, in the same order; folders "
        "or places in object storage",
    )
    parser.add_argument(
        "--recorded",
        metavar="DIR",
        help="folder with recordings of the baseline against itself, made at different times, or "
        "its place in object storage; one run of the candidate is compared with the latest of "
        "them that has its requests, or with that of --baseline",
    )
    add_recorded_revision(parser)
    add_rule_options(parser)
    add_output_options(parser)
    add_result_file(parser)
    parser.add_argument(
        "--serve",
        metavar="HOST:PORT",
        type=argument_type(parse_address, "HOST:PORT"),
        help="answer rollout controllers with the result until stopped: GET for a web metric of "
        "Argo Rollouts, POST for a webhook of Flagger",
    )
    return parser


def add_rule_options(parser: CommandParser) -> None:
    """Add the options of the rule: margin, confidence and history."""
    group = parser.add_argument_group("rule")
    group.add_argument(
        "--margin",
        metavar="PERCENT",
        type=argument_type(parse_margin, "PERCENT"),
        help="acceptable loss of attainment against the baseline, in percentage points "
        "(default: 1%%)",
    )
    add_confidence(group, "the verdict", default=None)
    group.add_argument(
        "--history",
        metavar="DIR",
        type=Path,
        help="folder of `replay ab` runs of one build against itself, which show the spread "
        "between runs; with it, one pair can decide",
    )


def add_output_options(parser: CommandParser) -> None:
    """Add the options of the result's formats."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the result as JSON")
    group.add_argument("--junit", metavar="FILE", type=Path, help="write the result as JUnit XML")
    group.add_argument("--markdown", metavar="FILE", type=Path, help="write the result as Markdown")


def require_folders(given: argparse.Namespace) -> None:
    """Reject output files whose folder is missing, before runs that take long.

    Raises:
        UsageError: a folder is missing.
    """
    for _, path in _files(given):
        if not path.parent.is_dir():
            raise UsageError(f"{path}: its folder does not exist; create it first")


def require_outputs(given: argparse.Namespace) -> None:
    """Reject outputs that would replace each other, or the runs.

    Raises:
        UsageError: two outputs are one file, or one is a file of a run or of a recording.
    """
    known: dict[Path, str] = {}
    for option, path in _files(given):
        require_output(option, path)
        if path.resolve().name == AB_FILE and path.exists():
            raise UsageError(f"{option} {path}: is a file of `replay ab`; name another file")
        other = known.setdefault(path.resolve(), option)
        if other != option:
            raise UsageError(f"{option} {path}: is the file of {other}, too; name another file")


def _files(given: argparse.Namespace) -> list[tuple[str, Path]]:
    named = (("--junit", given.junit), ("--markdown", given.markdown))
    return [(option, path) for option, path in named if path is not None]


def write_outputs(result: GateResult, given: argparse.Namespace) -> None:
    """Print the result, and write the files that the options name, also if stdout was closed.

    Raises:
        InputError: a file cannot be written.
    """
    try:
        if given.json:
            sys.stdout.write(encode_json(result).decode())
        else:
            print_result(result, open_console())
        sys.stdout.flush()  # before a file that is the same pipe
    finally:
        _write_files(result, given)


def _write_files(result: GateResult, given: argparse.Namespace) -> None:
    outputs: list[tuple[Path | None, Any]] = [
        (given.junit, lambda: junit_xml(result)),
        (given.markdown, lambda: markdown(result).encode()),
    ]
    for path, render in outputs:
        if path is None:
            continue
        try:
            write_output(path, render())
        except OSError as error:
            if is_disk_full(error):
                raise
            why = error.strerror or type(error).__name__
            raise InputError(f"{path}: the result cannot be written ({why})") from error


def _pairs(
    runs: Sequence[Path], baselines: Sequence[Path] | None
) -> tuple[list[RunPair], ABRecording | None]:
    """Return the pairs of runs that the arguments name, and their recording if there is one.

    Raises:
        UsageError: the numbers of runs differ.
        InputError: a recording cannot be read, or has no complete pair.
    """
    recordings = [run for run in runs if is_recording(run)]
    if recordings:
        if len(runs) > 1 or baselines is not None:
            raise UsageError(
                f"replay gate: {recordings[0]} already has the runs of both builds; give it alone"
            )
        recording = read_recording(recordings[0])
        done, planned = len(recording.pairs), recording.looks[0]
        if done < planned:
            raise InputError(
                f"{recordings[0]}: {done} of {planned} planned pairs are complete; the plan was "
                "fixed so that no good moment is chosen to stop, so record it again"
            )
        return recording.run_pairs(recordings[0]), recording
    if baselines is None:
        return [RunPair(candidate=run) for run in runs], None
    if len(baselines) != len(runs):
        raise UsageError(
            f"replay gate: {len(runs)} runs of the candidate and {len(baselines)} of the baseline "
            "cannot be paired; give one baseline for each run"
        )
    return [RunPair(candidate=r, baseline=b) for r, b in zip(runs, baselines, strict=True)], None


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, with an IPv6 address in brackets.

    Raises:
        ValueError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host:
        raise ValueError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:8080")
    return host, parse_port(port)
