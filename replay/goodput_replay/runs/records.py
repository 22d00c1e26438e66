"""`records.parquet`: one row per request, written during the run and read in batches.

A row holds the measurements of a request and its judgement, so any Parquet tool can evaluate the
file. The writer buffers one row group and the reader one batch. Row groups grow with the run up to
65,536 rows, because the writer and the reader keep an index of 27 kB for each of them in memory.
`folder` chooses the path and handles a full disk, and `record_rows` turns rows into records.
"""

from __future__ import annotations

import io
import threading
from array import array
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from goodput_core.errors import InputError
from goodput_core.files import partial_path
from goodput_core.quantiles import P99, quantile
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.judging import Judgement, JudgementKind
from goodput_replay.runs.files import RECORDS_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from goodput_core.slo.record import RequestRecord

__all__ = [
    "ADDED_COLUMNS",
    "RECORDS_SCHEMA",
    "TARGET_COLUMNS",
    "JudgedRecord",
    "RecordWriter",
    "open_records",
    "read_batches",
]

_MAX_GAP_US: Final = 2**31 - 1
# Converting and writing rows blocks the sender's event loop for about 3 ms (measured with 512
# requests of 200 gaps). This must stay well below the limit of the send lag, which is at least
# 10 ms. Larger row groups are therefore written by a thread, which does not need the interpreter.
_TABLE_ROWS: Final = 512
_TABLE_GAPS: Final = 1 << 18
_MAX_GROUP_ROWS: Final = 1 << 16
_MAX_GROUP_GAPS: Final = 1 << 23
_GROUP_SHARE: Final = 128
"""A row group is one part in this many of the rows before it."""
_BATCH_ROWS: Final = 4096
_FOOTER_BYTES: Final = 4096  # per row group; 1,750 measured

_VERSION: Final = b"1"
_VERSION_KEY: Final = b"goodput.records_version"


def _required(name: str, kind: Any, text: str) -> Any:
    return pa.field(name, kind, nullable=False, metadata={"description": text})


def _optional(name: str, kind: Any, text: str) -> Any:
    return pa.field(name, kind, metadata={"description": text})


_LABEL: Final = pa.dictionary(pa.int32(), pa.string())

RECORDS_SCHEMA: Final[Any] = pa.schema(
    [
        _required("request_id", pa.string(), "Request id in the trace."),
        _required("slo_class", _LABEL, "SLO class; empty if the request has none."),
        _required(
            "warmup", pa.bool_(), "True for a warm-up request, which is excluded from all results."
        ),
        _required(
            "scheduled_ns", pa.int64(), "Scheduled arrival, nanoseconds since time zero of the run."
        ),
        _optional("sent_ns", pa.int64(), "Time of the send; null if the request was not sent."),
        _optional("first_token_ns", pa.int64(), "Time of the first non-empty token."),
        _optional("last_token_ns", pa.int64(), "Time of the last token."),
        _optional("end_ns", pa.int64(), "Time at which the response ended or failed."),
        _required("outcome", _LABEL, "Outcome: ok, shed, error, timeout, cancelled or unsent."),
        _optional(
            "judgement",
            _LABEL,
            "attained, missed, excluded (cancelled by the trace without a miss) or "
            "unjudged (no target, or too little data); null for warm-up rows.",
        ),
        _optional(
            "attained", pa.bool_(), "True if every target was met; null unless attained or missed."
        ),
        _required(
            "miss_reasons",
            pa.list_(pa.string()),
            "Reasons of a miss: ttft, tpot, tbt, e2e, short, shed, error, timeout, unsent.",
        ),
        _required("input_tokens", pa.int64(), "Prompt tokens."),
        _required(
            "output_tokens",
            pa.int64(),
            "Output tokens received, including reasoning tokens; the fewest possible if uncertain.",
        ),
        _optional(
            "most_output_tokens",
            pa.int64(),
            "Most output tokens possible; null unless the server's counts contradict each other.",
        ),
        _optional(
            "pinned_output_tokens",
            pa.int64(),
            "Required output tokens; fewer is a miss; null if not pinned.",
        ),
        _optional(
            "reported_input_tokens",
            pa.int64(),
            "Prompt tokens that the server counted; null if not reported.",
        ),
        _optional(
            "cached_tokens",
            pa.int64(),
            "Prompt tokens found in the server's prefix cache; null if not reported.",
        ),
        _optional(
            "ttft_target_ns", pa.int64(), "TTFT target of the row, which overrides its class's."
        ),
        _optional(
            "tpot_target_ns", pa.int64(), "TPOT target of the row, which overrides its class's."
        ),
        _optional("tbt_p99_target_ns", pa.int64(), "Target of the row for the p99 of its gaps."),
        _optional("e2e_target_ns", pa.int64(), "End-to-end latency target of the row."),
        _optional(
            "cancel_after_ns",
            pa.int64(),
            "Time from scheduled_ns to the cancellation by the trace; null if none.",
        ),
        _optional(
            "status", pa.int32(), "HTTP status, or a 4xx in an error event; null if no response."
        ),
        _required(
            "detail", _LABEL, "Error message without prompt text; empty if there was no error."
        ),
        _required("replica", _LABEL, "Replica that served the request, if reported."),
        _required("revision", _LABEL, "Revision that served the request, if reported."),
        _optional(
            "tbt_p99_us",
            pa.int64(),
            "Nearest-rank p99 of the gaps between tokens, microseconds; null with fewer than two "
            "token times.",
        ),
        _required("retries", pa.int32(), "How often the request was sent again after a failure."),
        _required(
            "sender",
            pa.int32(),
            "Number of the process that sent the request, from 0: its index in client.senders of "
            "the summary; 0 if one process sent all requests.",
        ),
        _required(
            "deviations",
            pa.list_(pa.string()),
            "Deviations of the response from the API or its request: "
            f"{', '.join(d for d in Deviation if d is not Deviation.CUT_BY_CLIENT)}; "
            "see docs/verdicts.md.",
        ),
        _required(
            "gaps_us",
            pa.list_(pa.int32()),
            "Microseconds between consecutive tokens; empty with --no-gaps.",
        ),
    ],
    metadata={_VERSION_KEY: _VERSION},
)

ADDED_COLUMNS: Final[dict[str, object]] = {
    "most_output_tokens": None,
    "reported_input_tokens": None,
    "retries": 0,
    "sender": 0,
    "deviations": (),
}
"""Columns that folders of earlier versions lack, and the values of their rows."""

# Columns that are computed in `RecordWriter.append`, in its order; every other column but
# `gaps_us` is an attribute of a `RequestRecord`.
_COMPUTED: Final = ("warmup", "judgement", "attained", "miss_reasons", "tbt_p99_us")
_ATTAINED: Final[dict[JudgementKind | None, bool]] = {
    JudgementKind.ATTAINED: True,
    JudgementKind.MISSED: False,
}
TARGET_COLUMNS: Final = {
    "ttft_target_ns": "ttft_ns",
    "tpot_target_ns": "tpot_ns",
    "tbt_p99_target_ns": "tbt_p99_ns",
    "e2e_target_ns": "e2e_ns",
}
"""The field of `Targets` by its column."""
_MEASURED: Final = tuple(n for n in RECORDS_SCHEMA.names if n not in {*_COMPUTED, "gaps_us"})
_measured_values: Final = attrgetter(
    *(f"targets.{TARGET_COLUMNS[n]}" if n in TARGET_COLUMNS else n for n in _MEASURED)
)


class JudgedRecord(NamedTuple):
    """A row of the file: a request and its judgement."""

    record: RequestRecord
    judgement: Judgement | None
    """None for warm-up rows."""

    @property
    def warmup(self) -> bool:
        """True if the row is excluded from all results."""
        return self.judgement is None


class RecordWriter:
    """Writes rows in groups; not thread-safe.

    Args:
        sink: an open binary file; the caller closes it after `close`.
        keep_gaps: if False, write only the p99 of the gaps and leave `gaps_us` empty.
        free_bytes: returns the bytes that still fit into the sink; None if unlimited.
    """

    def __init__(
        self,
        sink: io.RawIOBase | io.BytesIO,
        *,
        keep_gaps: bool = True,
        free_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._keep_gaps = keep_gaps
        self._free_bytes = free_bytes
        self._groups = 0
        self._tables: list[Any] = []
        self._buffered_rows = 0
        self._buffered_gaps = 0
        self._written_rows = 0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.lost = 0
        """Number of rows that did not fit."""
        self.complete = False
        """True if the footer was written, so that the file can be read."""
        self._reset()
        self._writer = _parquet_writer(sink)

    def append(self, record: RequestRecord, judgement: Judgement | None) -> None:
        """Append one request and its judgement; None for a warm-up row."""
        kind = None if judgement is None else judgement.kind
        gaps = record.gaps_us
        self._rows.append(
            (
                *_measured_values(record),
                judgement is None,
                kind,
                _ATTAINED.get(kind),
                () if judgement is None else judgement.reasons,
                quantile(gaps, P99) if gaps else record.tbt_p99_us,
            )
        )
        if self._keep_gaps and gaps:
            self._extend_gaps(gaps)
        self._gap_offsets.append(len(self._gaps))
        if len(self._rows) >= _TABLE_ROWS or len(self._gaps) >= _TABLE_GAPS:
            self._convert()
            most = min(max(_TABLE_ROWS, self._written_rows // _GROUP_SHARE), _MAX_GROUP_ROWS)
            most_gaps = min(most * (_TABLE_GAPS // _TABLE_ROWS), _MAX_GROUP_GAPS)
            if self._buffered_rows >= most or self._buffered_gaps >= most_gaps:
                self._write_group()

    def flush(self) -> None:
        """Write the buffered rows as one row group, or count them as lost if they do not fit."""
        self._convert()
        self._write_group(in_thread=False)

    def close(self) -> None:
        """Write the last row group and the footer; the file cannot be read without the footer."""
        try:
            self.flush()
        finally:
            self._writer.close()
            self.complete = True

    def _convert(self) -> None:
        """Convert the buffered rows to a table."""
        rows, gaps, offsets = self._rows, self._gaps, self._gap_offsets
        if not rows:
            return
        # Empty the buffer first, so that `close` does not repeat a failed write.
        self._reset()
        columns = dict(zip((*_MEASURED, *_COMPUTED), zip(*rows, strict=True), strict=True))
        arrays = [
            pa.array(columns[field.name], type=field.type)
            for field in RECORDS_SCHEMA
            if field.name != "gaps_us"
        ]
        values = pa.Array.from_buffers(pa.int32(), len(gaps), [None, pa.py_buffer(gaps.tobytes())])
        arrays.append(pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), values))
        self._tables.append(pa.Table.from_arrays(arrays, schema=RECORDS_SCHEMA))
        self._buffered_rows += len(rows)
        self._buffered_gaps += len(gaps)

    def _write_group(self, *, in_thread: bool = True) -> None:
        """Write the tables as one row group, several of them in a thread.

        Raises:
            OSError: this or the previous row group could not be written.
        """
        tables = self._tables
        self._tables, self._buffered_rows, self._buffered_gaps = [], 0, 0
        self._wait()
        if len(tables) > 1 and in_thread:
            self._thread = threading.Thread(target=self._try_to_write, args=(tables,))
            self._thread.start()
        elif tables:
            self._write(tables)

    def _wait(self) -> None:
        """Wait until the previous row group is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _try_to_write(self, tables: Sequence[Any]) -> None:
        try:
            self._write(tables)
        except Exception as error:  # noqa: BLE001 - raised again by `_wait`
            self._failure = error

    def _write(self, tables: Sequence[Any]) -> None:
        table = pa.concat_tables(tables).unify_dictionaries()
        if self._fits(table):
            self._writer.write_table(table, row_group_size=table.num_rows)
            self._groups += 1
            self._written_rows += table.num_rows
        else:
            self.lost += table.num_rows

    def _fits(self, table: Any) -> bool:
        """True if a row group and the footer fit; a partial row group corrupts the file."""
        free = self._free_bytes()
        if free is None:
            return True
        trial = io.BytesIO()
        with _parquet_writer(trial) as writer:
            writer.write_table(table)
        return len(trial.getbuffer()) + self._groups * _FOOTER_BYTES <= free

    def _reset(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._gaps = array("i")
        self._gap_offsets = [0]

    def _extend_gaps(self, gaps: Sequence[int]) -> None:
        start = len(self._gaps)
        try:
            self._gaps.extend(gaps)
        except OverflowError:
            # Gaps are capped at 35 minutes, which is above every target.
            del self._gaps[start:]
            self._gaps.extend([min(gap, _MAX_GAP_US) for gap in gaps])


def _parquet_writer(sink: io.RawIOBase | io.BytesIO) -> Any:
    return pq.ParquetWriter(
        sink,
        RECORDS_SCHEMA,
        compression="zstd",
        use_dictionary=[f.name for f in RECORDS_SCHEMA if f.type == _LABEL],
        write_statistics=["request_id", "scheduled_ns"],
        write_page_checksum=True,
    )


@contextmanager
def open_records(folder: Path) -> Iterator[Any]:
    """Open the records of a run as a `pyarrow.parquet.ParquetFile`.

    Raises:
        InputError: the file is missing, truncated, of a later version, or not the records of a
            run; also raised in the block if the part that it reads is damaged.
    """
    path = folder / RECORDS_FILE
    try:
        opened = pq.ParquetFile(path, page_checksum_verification=True)
    except FileNotFoundError as error:
        unfinished = partial_path(path).exists()
        why = "the run was killed before it could be closed" if unfinished else "not a run's folder"
        raise InputError(f"{path}: no such file ({why}); give the folder of a run") from error
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{path}: not a readable Parquet file, possibly truncated ({_brief(error)}); "
            "restore it or replay again"
        ) from error
    with opened:
        _check_schema(path, opened.schema_arrow)
        try:
            yield opened
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(
                f"{path}: damaged ({_brief(error)}); restore it or replay again"
            ) from error


def _check_schema(path: Path, schema: Any) -> None:
    version = (schema.metadata or {}).get(_VERSION_KEY)
    if version is None:
        raise InputError(f"{path}: not written by `replay`; give the folder of a run")
    if version != _VERSION:
        raise InputError(
            f"{path}: the records have version {version.decode(errors='replace')[:20]!r}, and this "
            f"Goodput reads version {_VERSION.decode()}; use the Goodput that wrote them"
        )
    expected = [f for f in RECORDS_SCHEMA if f.name not in ADDED_COLUMNS or f.name in schema.names]
    if not schema.equals(pa.schema(expected)):
        raise InputError(f"{path}: its columns are not those of a run; replay again")


def read_batches(opened: Any, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of opened records in batches of at most 4,096 rows, with these columns.

    One row group at a time is in memory. `iter_batches` of pyarrow would keep the compressed
    columns of all row groups until the end, and threads would keep memory of their own.
    """
    for group in range(opened.num_row_groups):
        table = opened.read_row_group(group, columns=list(columns), use_threads=False)
        yield from table.to_batches(_BATCH_ROWS)


def _brief(error: BaseException) -> str:
    """Return the first line of a library's message, truncated."""
    return str(error).strip().partition("\n")[0][:160] or type(error).__name__
