"""Import Azure's LLM inference traces: wall-clock times, and lengths of prompts and outputs.

Source: Patel et al., "Splitwise", ISCA 2024; github.com/Azure/AzurePublicDataset. Timestamps
have ticks of 100 ns (2023) or microseconds with a time zone (2024). A time without a zone is read
as UTC, which shifts all arrivals alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_traces.format.schema import Clock, TraceRow
from goodput_traces.importers.base import Importer, ImportOptions
from goodput_traces.importers.times import ArrivalReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_traces.importers.record import Record

__all__ = ["AzureImporter"]


class AzureImporter(Importer):
    """Importer of Azure's CSV files."""

    name = "azure"
    summary = "Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens"
    required_columns: ClassVar[frozenset[str]] = frozenset(
        {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    )
    ordered_by = "TIMESTAMP"
    clock: ClassVar[Clock] = Clock.ABSOLUTE
    read_columns = required_columns

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._arrivals = ArrivalReader()

    def convert(self, record: Record) -> Iterator[TraceRow]:
        """Convert a record to one request."""
        arrival_ns = self._arrivals.read_ns(record, self.ordered_by)
        self.resolution_ns = self._arrivals.resolution_ns
        yield TraceRow(
            request_id=f"azure-{self.num_records:07d}",
            timestamp_start_unix_ns=arrival_ns,
            input_tokens=record.integer("ContextTokens", "input_tokens"),
            output_tokens=self.output_tokens(record, "GeneratedTokens"),
        )
