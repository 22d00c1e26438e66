"""`records.parquet`: one row per request, written as the run goes and read back row by row.

Any Parquet tool can read the file, so the judgement of each request stands beside what was
measured. The writer buffers one row group and the reader holds one batch: memory does not grow
with the run. Where the file lies and what becomes of a full disk is `folder`'s business.
"""

from __future__ import annotations

import io
from array import array
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from goodput_core.errors import InputError
from goodput_core.files import PARTIAL_SUFFIX
from goodput_core.quantiles import P99, quantile
from goodput_core.slo.judging import Judgement, JudgementKind, MissReason
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import Targets
from goodput_replay.run.files import RECORDS_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = [
    "LABEL",
    "RECORDS_SCHEMA",
    "RECORDS_VERSION",
    "VERSION_KEY",
    "JudgedRecord",
    "RecordWriter",
    "column_help",
    "open_records",
    "read_judged",
    "read_records",
]

_MAX_GAP_US: Final = 2**31 - 1
# A row group: writing one holds the sender's event loop for about 3 ms (512 requests of 200
# gaps, measured), which must stay well below the lag that a valid run may have.
_GROUP_ROWS: Final = 512
_GROUP_GAPS: Final = 1 << 18
_BATCH_ROWS: Final = 4096
_FOOTER_BYTES: Final = 4096  # of one row group; 1,750 measured


class JudgedRecord(NamedTuple):
    """A row of the file: the request, what it counted as, and whether it was warm-up."""

    record: RequestRecord
    judgement: Judgement | None
    """None for warm-up rows."""

    @property
    def warmup(self) -> bool:
        """Whether the row is outside every figure."""
        return self.judgement is None


class RecordWriter:
    """Writes rows in groups; not safe for threads.

    Args:
        sink: an open binary file; the caller closes it after `close`.
        keep_gaps: False leaves `gaps_us` empty and keeps their p99 alone.
        room: how many bytes the sink still takes; None: it is not limited.
    """

    def __init__(
        self,
        sink: io.RawIOBase | io.BytesIO,
        *,
        keep_gaps: bool = True,
        room: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._keep_gaps = keep_gaps
        self._room = room
        self._groups = 0
        self.lost = 0
        """Rows that there was no room for."""
        self.whole = False
        """Whether the footer was written: the sink can be read."""
        self._columns: dict[str, list[Any]] = {}
        self._gaps = array("i")
        self._gap_offsets: list[int] = []
        self._reset()
        self._writer = _parquet_writer(sink)

    def append(self, record: RequestRecord, judgement: Judgement | None) -> None:
        """Keep one request; `judgement` None marks a warm-up row."""
        kind = None if judgement is None else judgement.kind
        put = self._columns
        put["request_id"].append(record.request_id)
        put["slo_class"].append(record.slo_class)
        put["warmup"].append(judgement is None)
        put["scheduled_ns"].append(record.scheduled_ns)
        put["sent_ns"].append(record.sent_ns)
        put["first_token_ns"].append(record.first_token_ns)
        put["last_token_ns"].append(record.last_token_ns)
        put["end_ns"].append(record.end_ns)
        put["outcome"].append(record.outcome.value)
        put["judgement"].append(None if kind is None else kind.value)
        put["attained"].append(_ATTAINED.get(kind))
        put["miss_reasons"].append(
            () if judgement is None else [r.value for r in judgement.reasons]
        )
        put["input_tokens"].append(record.input_tokens)
        put["output_tokens"].append(record.output_tokens)
        put["pinned_output_tokens"].append(record.pinned_output_tokens)
        put["cached_tokens"].append(record.cached_tokens)
        put["ttft_target_ns"].append(record.targets.ttft_ns)
        put["tpot_target_ns"].append(record.targets.tpot_ns)
        put["tbt_p99_target_ns"].append(record.targets.tbt_p99_ns)
        put["e2e_target_ns"].append(record.targets.e2e_ns)
        put["cancel_after_ns"].append(record.cancel_after_ns)
        put["status"].append(record.status)
        put["detail"].append(record.detail)
        put["replica"].append(record.replica)
        put["revision"].append(record.revision)
        gaps = record.gaps_us
        put["tbt_p99_us"].append(quantile(gaps, P99) if gaps else record.tbt_p99_us)
        if self._keep_gaps and gaps:
            self._extend_gaps(gaps)
        self._gap_offsets.append(len(self._gaps))
        if len(self._gap_offsets) > _GROUP_ROWS or len(self._gaps) >= _GROUP_GAPS:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as one row group, or count it as lost where it has no room."""
        columns, gaps, offsets = self._columns, self._gaps, self._gap_offsets
        if len(offsets) == 1:
            return
        # Emptied first: what fails must not be repeated by the close that follows it.
        self._reset()
        arrays = [
            pa.array(columns[field.name], type=field.type)
            for field in RECORDS_SCHEMA
            if field.name != "gaps_us"
        ]
        values = pa.Array.from_buffers(pa.int32(), len(gaps), [None, pa.py_buffer(gaps.tobytes())])
        arrays.append(pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), values))
        table = pa.Table.from_arrays(arrays, schema=RECORDS_SCHEMA)
        if self._fits(table):
            self._writer.write_table(table)
            self._groups += 1
        else:
            self.lost += table.num_rows

    def close(self) -> None:
        """Write the last row group and the footer, without which the file cannot be read."""
        try:
            self.flush()
        finally:
            self._writer.close()
            self.whole = True

    def _fits(self, table: Any) -> bool:
        """Whether a row group and the footer still fit: half a group would cost the whole file."""
        room = self._room()
        if room is None:
            return True
        trial = io.BytesIO()
        with _parquet_writer(trial) as writer:
            writer.write_table(table)
        return len(trial.getbuffer()) + self._groups * _FOOTER_BYTES <= room

    def _reset(self) -> None:
        self._columns = {f.name: [] for f in RECORDS_SCHEMA if f.name != "gaps_us"}
        self._gaps = array("i")
        self._gap_offsets = [0]

    def _extend_gaps(self, gaps: Sequence[int]) -> None:
        start = len(self._gaps)
        try:
            self._gaps.extend(gaps)
        except OverflowError:
            # A gap of more than 35 minutes: whatever was promised, it is missed at the bound too.
            del self._gaps[start:]
            self._gaps.extend([min(gap, _MAX_GAP_US) for gap in gaps])


def _parquet_writer(sink: io.RawIOBase | io.BytesIO) -> Any:
    return pq.ParquetWriter(
        sink,
        RECORDS_SCHEMA,
        compression="zstd",
        use_dictionary=[f.name for f in RECORDS_SCHEMA if f.type == LABEL],
        write_statistics=["request_id", "scheduled_ns"],
    )


_ATTAINED: Final[dict[JudgementKind | None, bool]] = {
    JudgementKind.ATTAINED: True,
    JudgementKind.MISSED: False,
}


def open_records(folder: Path) -> Any:
    """The opened `pyarrow.parquet.ParquetFile` of a run, checked to be ours.

    Raises:
        InputError: it is missing, truncated, foreign, or of a later version.
    """
    path = folder / RECORDS_FILE
    try:
        opened = pq.ParquetFile(path)
    except FileNotFoundError as error:
        unfinished = path.with_name(path.name + PARTIAL_SUFFIX).exists()
        why = "the run was killed before it could be closed" if unfinished else "not a run's folder"
        raise InputError(f"{path}: no such file ({why}); give the folder of a run") from error
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{path}: not a readable Parquet file, perhaps cut short ({_brief(error)}); "
            "restore it or replay again"
        ) from error
    version = (opened.schema_arrow.metadata or {}).get(VERSION_KEY)
    if version is None:
        raise InputError(f"{path}: not written by `replay`; give the folder of a run")
    if version != RECORDS_VERSION.encode():
        raise InputError(
            f"{path}: records of version {version.decode(errors='replace')[:20]!r}, and this "
            f"Goodput reads version {RECORDS_VERSION}; use the Goodput that wrote it"
        )
    if not opened.schema_arrow.equals(RECORDS_SCHEMA):
        raise InputError(f"{path}: its columns are not those of a run; replay again")
    return opened


def read_records(folder: Path, *, gaps: bool = True) -> Iterator[RequestRecord]:
    """The judged requests of a run, warm-up rows left out, in the order they ended.

    Args:
        folder: the run's folder.
        gaps: False leaves `gaps_us` empty, with `tbt_p99_us` in their place: several times
            faster, and judging comes out the same.

    Raises:
        InputError: see `open_records`.
    """
    return (row.record for row in read_judged(folder, gaps=gaps) if not row.warmup)


def read_judged(folder: Path, *, gaps: bool = True) -> Iterator[JudgedRecord]:
    """Every row of a run with its judgement, warm-up rows too; see `read_records`."""
    opened = open_records(folder)
    names = [f.name for f in RECORDS_SCHEMA if gaps or f.name != "gaps_us"]
    try:
        with opened:
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS, columns=names):
                yield from _rows(batch)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"{folder / RECORDS_FILE}: damaged ({_brief(error)}); restore it or replay again"
        ) from error


def _rows(batch: Any) -> Iterator[JudgedRecord]:
    columns = batch.to_pydict()
    columns.setdefault("gaps_us", [()] * batch.num_rows)
    columns.pop("attained")
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        kind, reasons = row.pop("judgement"), row.pop("miss_reasons")
        row.pop("warmup")
        gaps = tuple(row.pop("gaps_us"))
        tbt_p99_us = row.pop("tbt_p99_us")
        record = RequestRecord(
            outcome=Outcome(row.pop("outcome")),
            targets=Targets(
                ttft_ns=row.pop("ttft_target_ns"),
                tpot_ns=row.pop("tpot_target_ns"),
                tbt_p99_ns=row.pop("tbt_p99_target_ns"),
                e2e_ns=row.pop("e2e_target_ns"),
            ),
            gaps_us=gaps,
            # Where the gaps tell it, the record itself does not repeat it.
            tbt_p99_us=None if gaps else tbt_p99_us,
            **row,
        )
        judgement = None
        if kind is not None:
            judgement = Judgement(
                kind=JudgementKind(kind), reasons=tuple(MissReason(r) for r in reasons)
            )
        yield JudgedRecord(record, judgement)


def _brief(error: BaseException) -> str:
    """The first line of a library's message, which may go on for pages."""
    return str(error).strip().partition("\n")[0][:160] or type(error).__name__


RECORDS_VERSION: Final = "1"
VERSION_KEY: Final = b"goodput.records_version"


def _column(name: str, kind: Any, text: str, *, required: bool = False) -> Any:
    return pa.field(name, kind, nullable=not required, metadata={"description": text})


LABEL: Final = pa.dictionary(pa.int32(), pa.string())

RECORDS_SCHEMA: Final[Any] = pa.schema(
    [
        _column("request_id", pa.string(), "The trace's id of the row.", required=True),
        _column(
            "slo_class", LABEL, "The class it was judged by; empty: without one.", required=True
        ),
        _column(
            "warmup",
            pa.bool_(),
            "Sent to warm the service up: outside every figure.",
            required=True,
        ),
        _column(
            "scheduled_ns",
            pa.int64(),
            "When the trace says it arrives, nanoseconds since the run's zero.",
            required=True,
        ),
        _column("sent_ns", pa.int64(), "When it was handed to the socket; null: never sent."),
        _column("first_token_ns", pa.int64(), "When the first non-empty token came."),
        _column("last_token_ns", pa.int64(), "When the last non-empty token came."),
        _column("end_ns", pa.int64(), "When the answer ended, or failed."),
        _column(
            "outcome",
            LABEL,
            "How it ended: ok, shed, error, timeout, cancelled or unsent.",
            required=True,
        ),
        _column(
            "judgement",
            LABEL,
            "What it counts as: attained, missed, excluded (cancelled by the trace in time) or "
            "unjudged (nothing was promised); null for warm-up rows.",
        ),
        _column("attained", pa.bool_(), "Whether every target held; null where it is not counted."),
        _column(
            "miss_reasons",
            pa.list_(pa.string()),
            "Why it missed: ttft, tpot, tbt, e2e, short, shed, error, timeout, unsent.",
            required=True,
        ),
        _column("input_tokens", pa.int64(), "Tokens of the prompt, as sent.", required=True),
        _column(
            "output_tokens",
            pa.int64(),
            "Tokens that came back, reasoning tokens included.",
            required=True,
        ),
        _column(
            "pinned_output_tokens",
            pa.int64(),
            "Tokens the answer had to have; fewer is a miss; null: not pinned.",
        ),
        _column(
            "cached_tokens",
            pa.int64(),
            "Prompt tokens found in the server's prefix cache; null: it did not say.",
        ),
        _column("ttft_target_ns", pa.int64(), "The row's own TTFT target; wins over its class's."),
        _column("tpot_target_ns", pa.int64(), "The row's own TPOT target; wins over its class's."),
        _column("tbt_p99_target_ns", pa.int64(), "The row's own target for the p99 of its gaps."),
        _column("e2e_target_ns", pa.int64(), "The row's own target for the whole request."),
        _column(
            "cancel_after_ns",
            pa.int64(),
            "When the trace cancels it, counted from scheduled_ns; null: never.",
        ),
        _column("status", pa.int32(), "HTTP status; null: none came."),
        _column(
            "detail",
            LABEL,
            "What went wrong, one short sentence without prompt text.",
            required=True,
        ),
        _column("replica", LABEL, "Who served it, when the answer said so.", required=True),
        _column("revision", LABEL, "The revision that served it, when said.", required=True),
        _column(
            "tbt_p99_us",
            pa.int64(),
            "Nearest-rank p99 of the gaps between tokens, microseconds; null: fewer than two "
            "token times.",
        ),
        _column(
            "gaps_us",
            pa.list_(pa.int32()),
            "Microseconds between consecutive tokens; empty with --no-gaps.",
            required=True,
        ),
    ],
    metadata={VERSION_KEY: RECORDS_VERSION.encode()},
)


def column_help() -> dict[str, str]:
    """What each column means, in the file's order."""
    return {f.name: f.metadata[b"description"].decode() for f in RECORDS_SCHEMA}
