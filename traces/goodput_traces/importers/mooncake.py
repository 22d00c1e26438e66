"""Import Mooncake's traces and AIPerf's `mooncake_trace`: arrival, lengths, prefix blocks.

Source: Qin et al., "Mooncake", FAST 2025. Each entry of `hash_ids` identifies a block of 512
tokens; the last block may be partial. AIPerf adds sessions, delays and the prompt's text. A row
with a delay and no timestamp is rejected, because its arrival depends on an earlier response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from goodput_core.units import NS_PER_MS
from goodput_traces.format.schema import (
    COLUMN_MS,
    INT_BOUNDS,
    Clock,
    HashSemantics,
    TraceRow,
)
from goodput_traces.importers.base import Importer, ImportOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_traces.importers.record import Record

__all__ = ["MooncakeImporter"]

_DEFAULT_BLOCK_SIZE: Final = 512


class MooncakeImporter(Importer):
    """Importer of Mooncake's and AIPerf's JSON lines; `read_columns` lists the fields."""

    name = "mooncake"
    summary = "Mooncake and AIPerf JSONL: timestamp (ms), input_length, output_length, hash_ids"
    required_columns: ClassVar[frozenset[str]] = frozenset(
        {"timestamp", "input_length", "output_length"}
    )
    ordered_by = "timestamp"
    clock: ClassVar[Clock] = Clock.TRACE_RELATIVE
    read_columns = required_columns | {
        "hash_ids",
        "session_id",
        "delay",
        "text_input",
        "priority",
        "request_id",
    }

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self.resolution_ns = NS_PER_MS
        self._block_size = options.block_size or _DEFAULT_BLOCK_SIZE

    def convert(self, record: Record) -> Iterator[TraceRow]:
        """Convert a record to one request."""
        prompt_tokens = record.integer("input_length", "input_tokens")
        hashes = record.hashes("hash_ids")
        blocks = -(-prompt_tokens // self._block_size)
        if hashes and len(hashes) != blocks:
            record.reject(
                "hash_ids",
                f"there are {len(hashes)} hashes, but {prompt_tokens} tokens in blocks of "
                f"{self._block_size} need {blocks}; set --block-size to the trace's block size",
            )
        if hashes:
            self.hash_semantics = HashSemantics.LAST_PARTIAL
        yield TraceRow(
            request_id=record.optional_text("request_id", "request_id")
            or f"mooncake-{self.num_records:07d}",
            timestamp_start_unix_ns=self._arrival_ns(record),
            input_tokens=prompt_tokens,
            output_tokens=self.output_tokens(record, "output_length"),
            prompt=record.optional_text("text_input", "prompt"),
            total_hashes=hashes,
            block_size=self._block_size if hashes else None,
            provided_session_id=record.optional_text("session_id", "provided_session_id"),
            delay_ms=record.optional_number("delay", "delay_ms"),
            priority=record.optional_integer("priority", "priority"),
        )

    def _arrival_ns(self, record: Record) -> int:
        ms = record.optional_number("timestamp")
        if ms is None:
            record.reject(
                "timestamp",
                "the value is missing; a row with only a delay depends on an earlier response, "
                "so its arrival is unknown",
            )
        record.check_bounds("timestamp", ms, INT_BOUNDS[COLUMN_MS])
        if ms.is_integer():
            # Parse the original text or integer again: a float rounds large values.
            return record.integer("timestamp", COLUMN_MS) * NS_PER_MS
        self.resolution_ns = 1  # the timestamp is a fraction
        return round(ms * NS_PER_MS)
