"""Import Azure's LLM inference traces: wall-clock times, and lengths of prompts and outputs.

Source: Patel et al., "Splitwise", ISCA 2024; github.com/Azure/AzurePublicDataset. Timestamps
have ticks of 100 ns (2023) or microseconds with a time zone (2024). A time without a zone is read
as UTC, which shifts all arrivals alike.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, ClassVar, Final

from goodput_core.units import NS_PER_S
from goodput_traces.format.schema import COLUMN_NS, INT_BOUNDS, Clock, TraceRow
from goodput_traces.importers.base import Importer, ImportOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_traces.importers.record import Record

__all__ = ["AzureImporter"]

_TIME: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?\s*(Z|[+-]\d{2}:?\d{2})?", re.ASCII
)
_NANOSECONDS: Final = re.compile(r"\d{18,19}", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class AzureImporter(Importer):
    """Importer of Azure's CSV files."""

    name = "azure"
    summary = "Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens"
    required_columns: ClassVar[frozenset[str]] = frozenset(
        {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    )
    ordered_by = "TIMESTAMP"
    clock: ClassVar[Clock] = Clock.ABSOLUTE
    read_columns: ClassVar[frozenset[str]] = required_columns

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self.resolution_ns = NS_PER_S

    def convert(self, record: Record) -> Iterator[TraceRow]:
        """Convert a record to one request."""
        yield TraceRow(
            request_id=f"azure-{self.num_records:07d}",
            timestamp_start_unix_ns=self._arrival_ns(record),
            input_tokens=record.integer("ContextTokens", "input_tokens"),
            output_tokens=self.output_tokens(record, "GeneratedTokens"),
        )

    def _arrival_ns(self, record: Record) -> int:
        value = record.values.get("TIMESTAMP")
        if isinstance(value, datetime):  # a Parquet column of timestamps
            self._note_digits(6)
            moment = value if value.tzinfo else value.replace(tzinfo=UTC)
            return _check_arrival(record, (moment - _EPOCH) // timedelta(microseconds=1) * 1000)
        text = str(value or "").strip()
        if _NANOSECONDS.fullmatch(text):
            self._note_digits(9)
            return record.integer("TIMESTAMP", "timestamp_start_unix_ns")
        match = _TIME.fullmatch(text)
        if match is None:
            record.reject(
                "TIMESTAMP",
                f"{text[:60]!r} is not a time; write it like 2023-11-16 18:15:46.6805900",
            )
        day, clock, fraction, zone = match.groups(default="")
        try:
            moment = datetime.fromisoformat(f"{day}T{clock}{zone or 'Z'}")
        except ValueError as error:
            record.reject("TIMESTAMP", f"{text[:60]!r} is not a time ({error}); correct it")
        # A datetime has microseconds, so the digits of the fraction are parsed separately.
        self._note_digits(len(fraction))
        seconds = (moment - _EPOCH) // timedelta(seconds=1)
        return _check_arrival(record, seconds * NS_PER_S + int(fraction.ljust(9, "0")))

    def _note_digits(self, digits: int) -> None:
        """Reduce the resolution to the tick of a time with this number of fractional digits."""
        self.resolution_ns = min(self.resolution_ns, 10 ** (9 - digits))


def _check_arrival(record: Record, arrival_ns: int) -> int:
    if not INT_BOUNDS[COLUMN_NS].allow(arrival_ns):
        side = "before 1970" if arrival_ns < 0 else "after 2262"
        shown = str(record.values["TIMESTAMP"])[:60]
        record.reject("TIMESTAMP", f"{shown!r} is {side}; correct it")
    return arrival_ns
