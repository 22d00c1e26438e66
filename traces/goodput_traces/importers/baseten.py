"""Import AIPerf's `baseten_trace` columns and all other columns of Goodput's format.

Meanings follow AIPerf's reader. Columns that only our format has are imported if they exist, so a
trace that was exported, edited or left unsorted is restored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.units import NS_PER_MS
from goodput_traces.format.schema import (
    COLUMN_MS,
    COLUMN_NS,
    ROW_FIELDS,
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


class BasetenImporter(Importer):
    """Import `timestamp_start_unix_ms`, `input_tokens`, `output_tokens` and all known columns."""

    name = "baseten"
    summary = "AIPerf's baseten_trace: timestamp_start_unix_ms, input_tokens, output_tokens, …"
    fingerprint: ClassVar[frozenset[str]] = frozenset({"input_tokens", "output_tokens"})
    ordered_by: ClassVar[str] = COLUMN_MS
    known: ClassVar[frozenset[str]] = frozenset({*ROW_FIELDS, COLUMN_MS})

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._rows = 0
        self._resolution_ns = NS_PER_MS
        self._hashed = False
        self._kept: TraceMetadata | None = None

    def keep_metadata(self, pairs: Mapping[bytes, bytes]) -> None:
        """Keep the metadata of a Parquet source if Goodput wrote it.

        Raises:
            ValueError: a key has an unknown value.
        """
        if any(key.startswith(b"goodput.trace.") for key in pairs):
            self._kept = TraceMetadata.from_key_values(pairs, has_ns=True)

    def convert(self, record: Record) -> Iterator[TraceRow]:
        """Convert a record to one request."""
        self._rows += 1
        hashes = record.hashes("total_hashes")
        block = record.optional_integer("block_size", "block_size") or self.options.block_size
        if hashes and block is None:
            record.reject(
                "block_size",
                "it is missing although the row has total_hashes; set the tokens per hash with "
                "--block-size",
            )
        self._hashed = self._hashed or bool(hashes)

        def text(column: str) -> str | None:
            return record.optional_text(column, column)

        def integer(column: str) -> int | None:
            return record.optional_integer(column, column)

        def number(column: str) -> float | None:
            return record.optional_number(column, column)

        canceled = integer("request_canceled")
        yield TraceRow(
            request_id=text("request_id") or f"baseten-{self._rows:07d}",
            timestamp_start_unix_ns=self._arrival_ns(record),
            input_tokens=record.integer("input_tokens", "input_tokens"),
            output_tokens=self.output_tokens(record, "output_tokens"),
            max_output_tokens=integer("max_output_tokens"),
            prompt=text("prompt"),
            total_hashes=hashes,
            block_size=block if hashes else integer("block_size"),
            provided_session_id=text("provided_session_id"),
            poor_man_session_id=integer("poor_man_session_id"),
            turn=integer("turn"),
            parent_request_id=text("parent_request_id"),
            delay_ms=number("delay_ms"),
            slo_class=text("slo_class"),
            ttft_target_ms=number("ttft_target_ms"),
            tpot_target_ms=number("tpot_target_ms"),
            e2e_target_ms=number("e2e_target_ms"),
            priority=integer("priority"),
            request_canceled=None if canceled is None else canceled == 1,
            cancel_after_ms=number("cancel_after_ms"),
            duration_ttft_ms=integer("duration_ttft_ms"),
            duration_e2e_ms=integer("duration_e2e_ms"),
            model_name=text("model_name"),
            org_id=text("org_id"),
            request_type=text("request_type"),
            output_text=text("output_text"),
        )

    def order_column(self, record: Record) -> str:
        """Return the finer clock if a record has both, as for its arrival."""
        return super().order_column(record) if record.values.get(COLUMN_NS) is None else COLUMN_NS

    def metadata(self) -> TraceMetadata:
        """Return the metadata: an absolute clock unless that of the source states another."""
        kept = self._kept
        return TraceMetadata(
            source=self.options.source if kept is None else kept.source,
            licence=self.options.licence or ("" if kept is None else kept.licence),
            clock=Clock.ABSOLUTE if kept is None else kept.clock,
            timestamp_resolution_ns=(
                self._resolution_ns if kept is None else kept.timestamp_resolution_ns
            ),
            hash_semantics=(
                (HashSemantics.UNSPECIFIED if self._hashed else HashSemantics.NONE)
                if kept is None
                else kept.hash_semantics
            ),
            floored_output_rows=(
                self.floored_output_rows + (0 if kept is None else kept.floored_output_rows)
            ),
        )

    def _arrival_ns(self, record: Record) -> int:
        ns = record.optional_integer(COLUMN_NS, COLUMN_NS)
        if ns is not None:
            self._resolution_ns = 1
            return ns
        return record.integer(COLUMN_MS, COLUMN_MS) * NS_PER_MS
