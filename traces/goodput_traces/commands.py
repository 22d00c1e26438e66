"""Run the commands of `goodput trace`. Results go to stdout, notes and progress to stderr."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from goodput_core.errors import UsageError
from goodput_core.text import printable
from goodput_core.units import NS_PER_S, format_duration
from goodput_traces.anonymize import anonymize_trace, read_key
from goodput_traces.describe import describe
from goodput_traces.describe.view import print_description, to_json
from goodput_traces.errors import TraceError
from goodput_traces.exporters.run import export_trace
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock
from goodput_traces.format.writer import reject_existing, write_trace
from goodput_traces.importers.base import ImportOptions
from goodput_traces.importers.column_map import ColumnMap, read_map_file
from goodput_traces.importers.preview import print_preview
from goodput_traces.importers.run import import_trace, preview_import
from goodput_traces.sample import SAMPLE, sample_path
from goodput_traces.synthesis.like import fit_trace
from goodput_traces.synthesis.likeness import compare_traces
from goodput_traces.synthesis.two_classes import SynthesisOptions, synthesize, synthetic_metadata
from goodput_traces.synthesis.view import comparison_to_json, print_comparison

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from goodput_traces.format.schema import TraceRow
    from goodput_traces.importers.preview import ImportPreview

__all__ = ["COMMANDS"]


def _import(arguments: argparse.Namespace) -> int:
    names = ", ".join(path.name for path in arguments.sources)
    options = ImportOptions(
        source=arguments.origin or f"imported from {names}",
        licence=arguments.licence,
        block_size=arguments.block_size,
        column_map=_column_map(arguments),
    )
    if arguments.preview:
        preview = preview_import(
            arguments.sources[0],
            form=arguments.format,
            options=options,
            max_decoded_bytes=arguments.max_decoded_size,
        )
        print_preview(Console(), preview)
        return 0
    if arguments.out is None:
        raise UsageError(
            "goodput trace import: name the trace to write with --out, or add --preview to see "
            "the first rows; see `goodput trace import --help`"
        )
    with _progress(arguments.sources) as (console, on_bytes):

        def show(preview: ImportPreview) -> None:
            if preview.uses:  # otherwise, the format determines the meaning of every column
                print_preview(console, preview)

        result = import_trace(
            arguments.sources,
            arguments.out,
            form=arguments.format,
            options=options,
            sort=arguments.sort,
            overwrite=arguments.force,
            max_decoded_bytes=arguments.max_decoded_size,
            on_bytes=on_bytes,
            on_preview=show,
        )
    _note(result.notes)
    _report(
        arguments.out,
        f"{result.num_rows:,} rows from {result.container} in the format {result.format}",
    )
    return 0


def _column_map(arguments: argparse.Namespace) -> ColumnMap:
    """Join the maps of the command line, in their order."""
    column_map = ColumnMap(only=tuple(arguments.only))
    for part in arguments.map:
        column_map = column_map.merge(read_map_file(part) if isinstance(part, Path) else part)
    return column_map


def _export(arguments: argparse.Namespace) -> int:
    result = export_trace(
        arguments.trace,
        arguments.out,
        arguments.format,
        overwrite=arguments.force,
        max_decoded_bytes=arguments.max_decoded_size,
    )
    _note(result.notes)
    _report(
        arguments.out,
        f"{result.num_rows:,} rows in the format {arguments.format}",
    )
    return 0


def _describe(arguments: argparse.Namespace) -> int:
    trace = open_trace(arguments.trace, max_decoded_bytes=arguments.max_decoded_size)
    description = describe(trace)
    if arguments.json:
        text = json.dumps(to_json(arguments.trace, description), indent=2) + "\n"
    else:
        console = Console()
        with console.capture() as captured:
            sample = arguments.trace == sample_path()
            print_description(console, SAMPLE if sample else str(arguments.trace), description)
        text = captured.get()
    sys.stdout.write(text)
    return 0


def _synthesize(arguments: argparse.Namespace) -> int:
    given = {
        name: getattr(arguments, name)
        for name in ("burst_factor", "batch_share", "session_share")
        if getattr(arguments, name) is not None
    }
    if arguments.like is not None:
        if given:
            option = "--" + next(iter(given)).replace("_", "-")
            raise UsageError(f"goodput trace synthesize: {option} has no effect with --like")
        return _synthesize_like(arguments)
    if arguments.json:
        raise UsageError("goodput trace synthesize: --json needs --like")
    if arguments.duration is not None:
        given["duration_ns"] = arguments.duration
    if arguments.rate is not None:
        given["rate_per_s"] = arguments.rate
    options = SynthesisOptions(seed=arguments.seed, **given)
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
        _require_rows(synthesize(options), arguments.out),
        synthetic_metadata(command),
        overwrite=arguments.force,
    )
    _report(
        arguments.out,
        f"{rows:,} synthetic rows over {format_duration(options.duration_ns)}",
    )
    return 0


def _synthesize_like(arguments: argparse.Namespace) -> int:
    reject_existing(arguments.out, overwrite=arguments.force, sources=(arguments.like,))
    source = open_trace(arguments.like, max_decoded_bytes=arguments.max_decoded_size)
    has_clock = source.metadata.clock is not Clock.SESSION_RELATIVE
    if not has_clock and (arguments.rate is None or arguments.duration is None):
        raise UsageError(
            f"goodput trace synthesize: the sessions of {arguments.like} share no clock, so they "
            "have no rate; name --rate and --duration"
        )
    options = [f"--seed={arguments.seed}"]
    duration_ns = source.last_ns - source.first_ns + 1
    if arguments.duration is not None:
        duration_ns = arguments.duration
        options.append(f"--duration={duration_ns / NS_PER_S:.12g}s")
    if arguments.rate is not None:
        options.append(f"--rate={arguments.rate:.12g}")
    names = ("--like", arguments.like.name, "--out", arguments.out.name)
    model = fit_trace(source)
    drawn = model.rows(seed=arguments.seed, duration_ns=duration_ns, rate_per_s=arguments.rate)
    rows = write_trace(
        arguments.out,
        _require_rows(drawn, arguments.like),
        model.metadata(shlex.join(["goodput", "trace", "synthesize", *names, *options])),
        overwrite=arguments.force,
    )
    features = compare_traces(source, open_trace(arguments.out), duration_ns, arguments.rate)
    if arguments.json:
        sys.stdout.write(json.dumps(comparison_to_json(features), indent=2) + "\n")
        return 0
    _report(arguments.out, f"{rows:,} synthetic rows over {format_duration(duration_ns)}")
    console = Console()
    with console.capture() as captured:
        print_comparison(console, features)
    sys.stdout.write(captured.get())
    return 0


def _anonymize(arguments: argparse.Namespace) -> int:
    result = anonymize_trace(
        arguments.trace,
        arguments.out,
        key=None if arguments.key_file is None else read_key(arguments.key_file),
        drop=arguments.drop,
        relative_times=arguments.relative_times,
        overwrite=arguments.force,
        max_decoded_bytes=arguments.max_decoded_size,
    )
    _note(result.notes)
    _report(arguments.out, f"{result.num_rows:,} rows without texts, with hashed ids")
    return 0


def _require_rows(rows: Iterator[TraceRow], named: Path) -> Iterator[TraceRow]:
    """Yield the rows; reject a synthetic trace without any, naming a file of the command."""
    first = next(rows, None)
    if first is None:
        raise TraceError(named, "no request was drawn; raise --rate or --duration")
    yield first
    yield from rows


@contextmanager
def _progress(
    sources: Sequence[Path],
) -> Iterator[tuple[Console, Callable[[int], None] | None]]:
    """Yield a console on stderr, and a function that moves a progress bar if it is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal or not all(path.is_file() for path in sources):
        yield console, None
        return
    columns = (TextColumn("importing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("import", total=sum(path.stat().st_size for path in sources))
        yield console, lambda position: progress.update(task, completed=position)


def _report(out: Path, result: str) -> None:
    sys.stdout.write(f"{printable(str(out))}: {result}\n")


def _note(notes: tuple[str, ...]) -> None:
    for note in notes:
        sys.stderr.write(f"note: {printable(note)}\n")


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "import": _import,
    "export": _export,
    "describe": _describe,
    "synthesize": _synthesize,
    "anonymize": _anonymize,
}
