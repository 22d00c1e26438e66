"""Import Mooncake's traces and AIPerf's `mooncake_trace`: arrival, lengths, prefix blocks.

Source: Qin et al., "Mooncake", FAST 2025. Each of `hash_ids` identifies a block of 512 tokens; the
last block may be partial. AIPerf adds sessions, delays and literal text. A row with a delay and no
timestamp depends on an earlier response, so its arrival is unknown and the row is rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from goodput_core.units import NS_PER_MS
from goodput_traces.format.schema import Clock, HashSemantics, TraceMetadata, TraceRow
from goodput_traces.importers.base import Importer, ImportOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_traces.importers.record import Record

__all__ = ["MooncakeImporter"]

_BLOCK: Final = 512
_MAX_TIMESTAMP_MS: Final = (2**63 - 1) // NS_PER_MS


class MooncakeImporter(Importer):
    """Import `timestamp` (milliseconds), `input_length`, `output_length`, `hash_ids`."""

    name = "mooncake"
    summary = "Mooncake and AIPerf JSONL: timestamp (ms), input_length, output_length, hash_ids"
    fingerprint: ClassVar[frozenset[str]] = frozenset(
        {"timestamp", "input_length", "output_length"}
    )
    ordered_by: ClassVar[str] = "timestamp"
    known: ClassVar[frozenset[str]] = fingerprint | {
        "hash_ids",
        "session_id",
        "delay",
        "text_input",
        "priority",
        "request_id",
    }

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._block = options.block_size or _BLOCK
        self._rows = 0
        self._resolution_ns = NS_PER_MS
        self._hashed = False

    def convert(self, record: Record) -> Iterator[TraceRow]:
        """Convert a record to one request."""
        self._rows += 1
        prompt_tokens = record.integer("input_length", "input_tokens")
        hashes = record.hashes("hash_ids")
        blocks = -(-prompt_tokens // self._block)
        if hashes and len(hashes) != blocks:
            record.reject(
                "hash_ids",
                f"the row has {len(hashes)} hashes, but {prompt_tokens} tokens in blocks of "
                f"{self._block} need {blocks}; set --block-size to the trace's",
            )
        self._hashed = self._hashed or bool(hashes)
        yield TraceRow(
            request_id=record.optional_text("request_id", "request_id")
            or f"mooncake-{self._rows:07d}",
            timestamp_start_unix_ns=self._arrival_ns(record),
            input_tokens=prompt_tokens,
            output_tokens=self.output_tokens(record, "output_length"),
            prompt=record.optional_text("text_input", "prompt"),
            total_hashes=hashes,
            block_size=self._block if hashes else None,
            provided_session_id=record.optional_text("session_id", "provided_session_id"),
            delay_ms=record.optional_number("delay", "delay_ms"),
            priority=record.optional_integer("priority", "priority"),
        )

    def metadata(self) -> TraceMetadata:
        """Return the metadata; resolution is 1 ns after a fractional timestamp, else 1 ms."""
        return TraceMetadata(
            source=self.options.source,
            licence=self.options.licence,
            clock=Clock.TRACE_RELATIVE,
            timestamp_resolution_ns=self._resolution_ns,
            hash_semantics=HashSemantics.LAST_PARTIAL if self._hashed else HashSemantics.NONE,
            floored_output_rows=self.floored_output_rows,
        )

    def _arrival_ns(self, record: Record) -> int:
        ms = record.optional_number("timestamp")
        if ms is None:
            record.reject(
                "timestamp",
                "the value is missing; a row with only a delay depends on an earlier response, "
                "so its arrival is unknown",
            )
        if not 0 <= ms <= _MAX_TIMESTAMP_MS:
            record.reject(
                "timestamp",
                f"{ms:g} is out of bounds, it must be 0 to {_MAX_TIMESTAMP_MS} milliseconds",
            )
        if ms.is_integer():
            # Parse the original text or integer again: a float rounds large values.
            return record.integer("timestamp", "timestamp_start_unix_ms") * NS_PER_MS
        self._resolution_ns = 1
        return round(ms * NS_PER_MS)
