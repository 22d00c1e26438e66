"""`replay export RUN`: write the records of a run, or the server's metrics, as CSV."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from goodput_core.cli import CommandParser
from goodput_core.errors import ExitCode, InputError
from goodput_core.files import is_disk_full, output_file
from goodput_replay.runs.named_outputs import require_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

__all__ = ["main", "make_parser", "plain_batch", "write_csv"]

_GAPS: Final = "gaps_us"
_FORMULA: Final = r"^[=+\-@\t\r\n\x{FF1D}\x{FF0B}\x{FF0D}\x{FF20}]"
"""Beginnings of texts that spreadsheets evaluate as formulas, some also in full width."""
_NUMBER: Final = r"^[+-]?[0-9]+(\.[0-9]+)?$"


def main(argv: Sequence[str]) -> int:
    """Write one line for each request, with the columns of `records.parquet`.

    With `--server-metrics`, write the rows of `server_metrics.parquet` instead.

    Args:
        argv: the arguments after `replay export`.

    Raises:
        UsageError: an argument is invalid, or the output is a file of a run.
        InputError: the folder has no readable run, or the file cannot be written.
    """
    given = make_parser().parse_args(argv)
    if given.server_metrics:
        batches = _server_batches(given.folder)
    else:
        batches = _batches(given.folder, gaps=given.gaps)
    if given.out is None:
        try:
            write_csv(batches, sys.stdout.buffer)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader, such as `head`, has enough; Python must not flush into it again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PASS
    require_output("--out", given.out)
    try:
        with output_file(given.out) as file:
            write_csv(batches, file)
    except OSError as error:
        if is_disk_full(error):
            raise
        why = error.strerror or type(error).__name__
        raise InputError(f"--out {given.out}: cannot be written ({why}); name another") from error
    return ExitCode.PASS


def make_parser() -> CommandParser:
    """Build the parser of `replay export`."""
    parser = CommandParser(
        "replay export",
        summary="Write the records of a run as CSV, one line for each request, or the metrics of "
        "the server.",
        examples=(
            "replay export runs/candidate -o candidate.csv",
            "replay export runs/candidate | head",
            "replay export runs/candidate --server-metrics -o server.csv",
        ),
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the run's folder")
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, help="file to write (default: standard output)"
    )
    parser.add_argument(
        "--gaps", action="store_true", help="add the gaps between tokens, separated by semicolons"
    )
    parser.add_argument(
        "--server-metrics",
        action="store_true",
        help="write the metrics of the server that were scraped during the run",
    )
    return parser


def write_csv(batches: Iterator[Any], sink: IO[bytes]) -> None:
    """Write batches of equal columns, at least one, as CSV with a header."""
    from pyarrow import csv  # noqa: PLC0415 - heavy

    writer: Any = None
    for batch in batches:
        if writer is None:
            writer = csv.CSVWriter(sink, batch.schema)
        writer.write(batch)
    writer.close()


def _batches(folder: Path, *, gaps: bool) -> Iterator[Any]:
    """Yield batches, at least one, so that memory does not grow with the run."""
    import pyarrow as pa  # noqa: PLC0415 - heavy

    from goodput_replay.runs.records import (  # noqa: PLC0415 - heavy
        RECORDS_SCHEMA,
        open_records,
        read_batches,
    )

    with open_records(folder) as opened:
        written = opened.schema_arrow.names  # records of earlier versions lack some columns
        fields = [
            field
            for field in RECORDS_SCHEMA
            if field.name in written and (gaps or field.name != _GAPS)
        ]
        # The writer writes the header with the first batch.
        yield plain_batch(pa.RecordBatch.from_pylist([], schema=pa.schema(fields)))
        for batch in read_batches(opened, [field.name for field in fields]):
            yield plain_batch(batch)


def _server_batches(folder: Path) -> Iterator[Any]:
    from goodput_replay.runs.server_metrics import read_server_metrics  # noqa: PLC0415 - heavy

    metrics = read_server_metrics(folder)
    if metrics is None:
        raise InputError(
            f"{folder}: has no metrics of the server; run the replay with --scrape URL"
        )
    for batch in metrics.table().combine_chunks().to_batches():
        yield plain_batch(batch)


def plain_batch(batch: Any) -> Any:
    """Return a batch for CSV: lists become texts, and no text is a formula."""
    import pyarrow as pa  # noqa: PLC0415 - heavy
    import pyarrow.compute as pc  # noqa: PLC0415 - heavy

    columns = []
    for found in batch.columns:
        column = found
        if pa.types.is_list(column.type):
            column = pc.binary_join(pc.cast(column, pa.list_(pa.string())), ";")
        elif pa.types.is_dictionary(column.type):
            column = pc.cast(column, pa.string())
        columns.append(_mark_formulas(column) if pa.types.is_string(column.type) else column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _mark_formulas(texts: Any) -> Any:
    """Put an apostrophe before texts that a spreadsheet would evaluate.

    Ids come from traces, and names of metrics from servers; neither is trusted.

    Source: OWASP, "CSV Injection".
    """
    import pyarrow.compute as pc  # noqa: PLC0415 - heavy

    is_number = pc.match_substring_regex(texts, _NUMBER)
    is_formula = pc.and_not(pc.match_substring_regex(texts, _FORMULA), is_number)
    return pc.if_else(is_formula, pc.binary_join_element_wise("'", texts, ""), texts)
