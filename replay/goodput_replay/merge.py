"""`replay merge RUN … -o DIR`: join the shards of one run, and judge the whole.

A merged run is a function of the run folders alone. Each record keeps the number of its sender, so
that the stalls of one sender are subtracted only from its own requests. A shard that is missing or
ended early makes the merged run INVALID: rows were not sent, whatever the others show.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from goodput_core.cli import CommandParser
from goodput_core.errors import ExitCode, InputError, UsageError
from goodput_core.files import partial_path
from goodput_core.text import printable
from goodput_replay.result_options import (
    add_result_file,
    add_upload,
    reporting_errors,
    write_result,
)
from goodput_replay.runs.files import SERVER_METRICS_FILE, require_digest
from goodput_replay.storage import FolderCopies, upload_folder

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from goodput_replay.runs.summary import ClientSummary, ShardSummary, Summary
    from goodput_replay.runs.summary_builder import RunInfo

__all__ = ["main", "make_parser", "merge_runs"]


class _ShardRun(NamedTuple):
    """The run of one shard.

    Args:
        folder: its folder.
        shard: its place among the shards.
        summary: its summary.
        first_sender: number of its first sender in the merged run.
    """

    folder: Path
    shard: ShardSummary
    summary: Summary
    first_sender: int


def main(argv: Sequence[str]) -> int:
    """Merge the runs and print the summary.

    Args:
        argv: the arguments after `replay merge`.

    Raises:
        UsageError: an argument is invalid.
        InputError: a folder has no readable run, or the runs are not the shards of one run.
    """
    given = make_parser().parse_args(argv)
    with reporting_errors(given.result_file), FolderCopies() as copies:
        return _merge(given, copies)


def _merge(given: Namespace, copies: FolderCopies) -> int:
    folders = [copies.folder(run) for run in given.runs]
    if given.out.resolve() in {folder.resolve() for folder in folders}:
        raise UsageError(f"replay merge: --out {given.out} is one of the shards; name another")
    # Imported after the arguments are parsed, because they load numpy and pyarrow.
    from rich.console import Console  # noqa: PLC0415

    from goodput_replay.runs.json_results import encode_json  # noqa: PLC0415
    from goodput_replay.runs.terminal import print_summary  # noqa: PLC0415

    summary = merge_runs(
        folders, given.out, partial=given.partial, force=given.force, report=given.report
    )
    try:
        if given.json:
            sys.stdout.write(encode_json(summary).decode())
        else:
            print_summary(summary, Console(), folder=given.out)
        sys.stdout.flush()
    finally:
        if given.upload is not None:
            upload_folder(given.out, given.upload)
        write_result(given.result_file, summary)
    if given.gate:
        if not summary.promises and summary.overall.total == 0:
            raise UsageError("--gate: the run has no SLO; give one to every shard")
        return summary.verdict.kind.exit_code
    return ExitCode.PASS if summary.validity.valid else ExitCode.INVALID


def make_parser() -> CommandParser:
    """Build the parser of `replay merge`."""
    parser = CommandParser(
        "replay merge",
        summary="Join the shards of one run, and judge the whole. Every shard is the folder of a "
        "replay with --shard.",
        usage="replay merge DIR [DIR ...] -o DIR [OPTION ...]",
        examples=(
            "replay merge shard-1 shard-2 shard-3 -o runs/merged",
            "replay merge shards/* -o runs/merged --gate",
        ),
    )
    parser.add_argument(
        "runs",
        metavar="DIR",
        nargs="+",
        help="folder of a shard, or its place in object storage, such as s3://BUCKET/PATH",
    )
    parser.add_argument(
        "-o", "--out", metavar="DIR", type=Path, required=True, help="folder of the merged run"
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="merge although shards are missing; the merged run is INVALID",
    )
    parser.add_argument("--force", action="store_true", help="replace the existing run in --out")
    parser.add_argument(
        "--gate",
        action="store_true",
        help="exit 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 INVALID (without it: 0 valid, 3 invalid)",
    )
    add_upload(parser, "the merged run")
    add_result_file(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--no-report", dest="report", action="store_false", help="do not write report.html"
    )
    return parser


def merge_runs(
    folders: Sequence[Path],
    out: Path,
    *,
    partial: bool = False,
    force: bool = False,
    report: bool = True,
) -> Summary:
    """Merge shards into a new run folder, and return its summary.

    Args:
        folders: folders of the shards, in any order.
        out: folder of the merged run.
        partial: True to accept missing shards.
        force: True to replace a run in `out`.
        report: True to write the report.

    Raises:
        InputError: a folder has no readable run, or the runs are not the shards of one run.
        DiskFullError: the disk is full.
    """
    from goodput_replay.report.run_report import write_report  # noqa: PLC0415
    from goodput_replay.runs.folder import RunWriter  # noqa: PLC0415
    from goodput_replay.runs.record_rows import read_judged  # noqa: PLC0415
    from goodput_replay.runs.server_metrics import (  # noqa: PLC0415
        merge_server_metrics,
        read_server_metrics,
        write_server_metrics,
    )
    from goodput_replay.sessions import JudgedSpan  # noqa: PLC0415

    for folder in folders:
        if out.resolve().is_relative_to(folder.resolve()):
            raise InputError(f"{out}: is in the folder of the shard {folder}; name another folder")
    runs = _read_shards(folders)
    missing = _find_missing(runs)
    if missing and not partial:
        raise InputError(
            f"{_list_shards(missing, runs)} missing; name the folder of every shard, or merge "
            "the others into an INVALID run with --partial"
        )
    unknown = [run.shard.number for run in runs if run.shard.clock_error_ms is None]
    if unknown:
        sys.stderr.write(
            f"warning: {_list_shards(unknown, runs)} from a machine whose clock error is not "
            "known; shards start together only if the clocks of their machines agree\n"
        )
    info = _describe(runs, missing)
    with RunWriter(
        out, slo=info.slo, force=force, write_report=write_report if report else None
    ) as writer:
        span = JudgedSpan(starts_at_zero=not info.warmup_rows)
        for run in runs:
            for record, judgement in read_judged(run.folder):
                sender = run.first_sender + record.sender
                writer.append(replace(record, sender=sender), warmup=judgement is None)
                if judgement is not None:
                    span.add(record)
        scraped = [found for run in runs if (found := read_server_metrics(run.folder)) is not None]
        if scraped:
            file = partial_path(out / SERVER_METRICS_FILE)
            if warning := write_server_metrics(file, merge_server_metrics(scraped)):
                sys.stderr.write(f"{printable(warning)}\n")
        if info.run.sessions is not None:  # the responses determined the window
            start_ns, end_ns = span.span_ns
            info = replace(info, window_start_ns=start_ns, window_ns=end_ns - start_ns)
        return writer.finish(info)


def _read_shards(folders: Sequence[Path]) -> list[_ShardRun]:
    """Read the summaries in the order of the shards, and check that they belong to one run."""
    from goodput_replay.compare.runs import read_checked_summary  # noqa: PLC0415

    found: dict[int, tuple[Path, ShardSummary, Summary]] = {}
    for folder in folders:
        summary = read_checked_summary(folder)
        require_digest(folder, summary.records_digest)
        shard = summary.run.shard
        if shard is None:
            raise InputError(f"{folder}: not a shard; merge only replays with --shard")
        if not (1 <= shard.number <= shard.count and shard.window_ns > 0):
            raise InputError(f"{folder}: shard {shard} does not exist; replay again")
        if shard.number in found:
            raise InputError(
                f"{folder}: shard {shard} again, after {found[shard.number][0]}; name each shard "
                "once"
            )
        if found:
            other, _, first = next(iter(found.values()))
            if difference := _difference(first, summary):
                raise InputError(f"{other} and {folder} are not shards of one run: {difference}")
        found[shard.number] = (folder, shard, summary)
    runs, senders = [], 0
    for _, (folder, shard, summary) in sorted(found.items()):
        runs.append(_ShardRun(folder, shard, summary, senders))
        senders += max(1, len(summary.client.senders))
    return runs


def _difference(first: Summary, second: Summary) -> str:
    """Return why two summaries are not shards of one run; empty if they can be."""
    from goodput_replay.compare.runs import difference_between  # noqa: PLC0415

    one, other = first.run, second.run
    pairs: tuple[tuple[str, object, object], ...] = (
        ("the number of shards", one.shard and one.shard.count, other.shard and other.shard.count),
        ("the start", one.started_at, other.started_at),
        ("--salt", one.salt, other.salt),
        ("the version of Goodput", one.goodput_version, other.goodput_version),
        ("the model", first.target.model, second.target.model),
        ("--prompt", first.target.prompt, second.target.prompt),
    )
    confidences = (_confidence(first), _confidence(second))
    if None not in confidences:
        pairs += (("--confidence", *confidences),)
    for name, a, b in pairs:
        if a != b:
            return f"{name} differs: {a} and {b}"
    return difference_between(first, second)


def _find_missing(runs: Sequence[_ShardRun]) -> list[int]:
    """Return the numbers of the missing shards.

    Raises:
        InputError: no shard is missing, and the rows of all shards are not those of the trace.
    """
    whole = runs[0].shard
    missing = sorted(set(range(1, whole.count + 1)) - {run.shard.number for run in runs})
    rows = sum(run.summary.window.rows_planned for run in runs)
    if not missing and rows != whole.rows_planned:
        raise InputError(
            f"{runs[0].folder}: the shards have {rows} rows together, and the trace has "
            f"{whole.rows_planned}; replay again"
        )
    return missing


def _list_shards(numbers: Sequence[int], runs: Sequence[_ShardRun]) -> str:
    shown = ", ".join(map(str, numbers[:10])) + ", …" * (len(numbers) > 10)
    count = runs[0].shard.count
    return f"shard {shown} of {count} is" if len(numbers) == 1 else f"shards {shown} of {count} are"


def _describe(runs: Sequence[_ShardRun], missing: Sequence[int]) -> RunInfo:
    """Describe the merged run."""
    from goodput_core.replay_job import MAX_START_SKEW_NS  # noqa: PLC0415
    from goodput_core.slo.intervals import DEFAULT_CONFIDENCE  # noqa: PLC0415
    from goodput_core.slo.verdict import Reason  # noqa: PLC0415
    from goodput_core.units import NS_PER_MS, format_duration  # noqa: PLC0415
    from goodput_replay.compare.runs import read_classes  # noqa: PLC0415
    from goodput_replay.runs.slo import SLOClasses  # noqa: PLC0415
    from goodput_replay.runs.summary_builder import RunInfo  # noqa: PLC0415

    first, whole = runs[0].summary, runs[0].shard
    problems = [
        f"shard {run.shard} ended early ({run.summary.run.abort_reason or 'it was stopped'})"
        for run in runs
        if not run.summary.run.complete
    ]
    problems += [
        f"the clock of shard {run.shard} may be wrong by {format_duration(error_ns)}"
        for run in runs
        if (error_ns := round((run.shard.clock_error_ms or 0) * NS_PER_MS)) > MAX_START_SKEW_NS
    ]
    problems += [
        f"shard {run.shard} could not connect to the target"
        for run in runs
        if run.summary.verdict.reason is Reason.NEVER_CONNECTED
    ]
    if missing:
        problems.append(f"{_list_shards(missing, runs)} missing")
    urls = dict.fromkeys(run.summary.target.url for run in runs)
    loop_lags = [run.summary.validity for run in runs]
    return RunInfo(
        trace=first.trace,
        target=replace(first.target, url=", ".join(urls)),
        run=replace(
            first.run,
            command=("replay", "merge", *(str(run.folder) for run in runs)),
            shard=None,
            complete=not problems,
            abort_reason="because " + " and ".join(problems) if problems else "",
        ),
        slo=SLOClasses(
            classes=tuple(read_classes(first)),
            default=first.default_class,
            outage_s=first.outage_s,
        ),
        window_start_ns=whole.window_start_ns,
        window_ns=whole.window_ns,
        rows_planned=whole.rows_planned,
        warmup_rows=whole.warmup_rows,
        confidence=next(filter(None, map(_confidence, _summaries(runs))), DEFAULT_CONFIDENCE),
        client=_merge_clients(runs),
        loop_lag_p99_ns=round(max(one.loop_lag_p99_ms for one in loop_lags) * NS_PER_MS),
        loop_lag_max_ns=round(max(one.loop_lag_max_ms for one in loop_lags) * NS_PER_MS),
    )


def _summaries(runs: Sequence[_ShardRun]) -> Iterator[Summary]:
    return (run.summary for run in runs)


def _confidence(summary: Summary) -> float | None:
    """Return the confidence of the bounds; None if no request was judged."""
    return next((c.interval.confidence for c in summary.classes if c.interval is not None), None)


def _merge_clients(runs: Sequence[_ShardRun]) -> ClientSummary:
    """Join the senders of all shards; their stalls keep their owners."""
    from goodput_replay.runs.summary import ClientSummary, SenderSummary  # noqa: PLC0415

    clients = [run.summary.client for run in runs]
    senders: list[SenderSummary] = []
    for run in runs:
        client, validity = run.summary.client, run.summary.validity
        alone = SenderSummary(
            shard=None,
            requests=run.summary.overall.requests + run.summary.window.warmup_rows,
            cpu_s=client.cpu_s,
            peak_in_flight=client.peak_in_flight,
            loop_lag_p99_ms=validity.loop_lag_p99_ms,
            loop_lag_max_ms=validity.loop_lag_max_ms,
        )
        senders += (
            replace(one, shard=run.shard.number, clock_error_ms=run.shard.clock_error_ms)
            for one in client.senders or (alone,)
        )
    return ClientSummary(
        cpu_s=round(sum(client.cpu_s for client in clients), 6),
        cpus=sum(client.cpus for client in clients),
        peak_in_flight=sum(client.peak_in_flight for client in clients),
        stalls=tuple(
            replace(stall, sender=run.first_sender + stall.sender)
            for run in runs
            for stall in run.summary.client.stalls
        ),
        senders=tuple(senders),
    )
