"""Import AIPerf's `baseten_trace` columns and all other columns of Goodput's format.

Columns have the meaning of AIPerf's reader. Columns that only Goodput's format has are imported if
the file has them, so a trace can be exported, edited or sorted, and imported again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from goodput_core.units import NS_PER_MS
from goodput_traces.format.schema import (
    COLUMN_MS,
    COLUMN_NS,
    FLOAT_BOUNDS,
    INT_BOUNDS,
    REQUIRED_COLUMNS,
    ROW_FIELDS,
    TEXT_BOUNDS,
    Clock,
    HashSemantics,
    TraceMetadata,
    TraceRow,
)
from goodput_traces.importers.base import Importer, ImportOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from goodput_traces.importers.record import Record

__all__ = ["BasetenImporter"]

_OPTIONAL_INTEGERS: Final = tuple(
    name
    for name in INT_BOUNDS
    if name not in {*REQUIRED_COLUMNS, COLUMN_NS, COLUMN_MS, "block_size", "request_canceled"}
)


class BasetenImporter(Importer):
    """Importer of files with AIPerf's or Goodput's columns; `read_columns` lists them."""

    name = "baseten"
    summary = "AIPerf's baseten_trace: timestamp_start_unix_ms, input_tokens, output_tokens, …"
    required_columns: ClassVar[frozenset[str]] = frozenset({"input_tokens", "output_tokens"})
    ordered_by = COLUMN_MS
    clock: ClassVar[Clock] = Clock.ABSOLUTE
    read_columns = frozenset({*ROW_FIELDS, COLUMN_MS})

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self.resolution_ns = NS_PER_MS
        self._source_metadata: TraceMetadata | None = None

    @classmethod
    def recognises(cls, values: Mapping[str, Any]) -> bool:
        """True if the values have lengths and one of the two timestamps."""
        return super().recognises(values) and (COLUMN_NS in values or COLUMN_MS in values)

    def keep_metadata(self, pairs: Mapping[bytes, bytes]) -> None:
        """Keep the metadata of a Parquet source if Goodput wrote it.

        Raises:
            ValueError: a key has an unknown value.
        """
        if any(key.startswith(b"goodput.trace.") for key in pairs):
            self._source_metadata = TraceMetadata.from_key_values(pairs, has_ns=True)

    def convert(self, record: Record) -> Iterator[TraceRow]:
        """Convert a record to one request."""
        hashes = record.hashes("total_hashes")
        block_size = record.optional_integer("block_size", "block_size")
        if hashes:
            self.hash_semantics = HashSemantics.UNSPECIFIED
            block_size = block_size or self.options.block_size
            if block_size is None:
                record.reject(
                    "block_size",
                    "the value is missing although the row has total_hashes; set the tokens per "
                    "hash with --block-size",
                )
        columns: dict[str, Any] = {
            **{name: record.optional_text(name, name) for name in TEXT_BOUNDS},
            **{name: record.optional_number(name, name) for name in FLOAT_BOUNDS},
            **{name: record.optional_integer(name, name) for name in _OPTIONAL_INTEGERS},
        }
        canceled = record.optional_integer("request_canceled", "request_canceled")
        yield TraceRow(
            **columns
            | {
                "request_id": columns["request_id"] or f"baseten-{self.num_records:07d}",
                COLUMN_NS: self._arrival_ns(record),
                "input_tokens": record.integer("input_tokens", "input_tokens"),
                "output_tokens": self.output_tokens(record, "output_tokens"),
                "total_hashes": hashes,
                "block_size": block_size,
                "request_canceled": None if canceled is None else canceled == 1,
            }
        )

    def metadata(self) -> TraceMetadata:
        """Return the source's metadata if it has any; otherwise, the clock is absolute."""
        metadata = super().metadata()
        source = self._source_metadata
        if source is None:
            return metadata
        return replace(
            source,
            licence=metadata.licence or source.licence,
            floored_output_rows=metadata.floored_output_rows + source.floored_output_rows,
        )

    def _arrival_ns(self, record: Record) -> int:
        ns = record.optional_integer(COLUMN_NS, COLUMN_NS)
        if ns is not None:
            self.resolution_ns = 1
            self.ordered_by = COLUMN_NS
            return ns
        return record.integer(COLUMN_MS, COLUMN_MS) * NS_PER_MS
