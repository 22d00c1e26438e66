"""The base class of importers: records of one format in, rows of a trace and notes out.

An importer interprets a source's columns. It must not know files, compression or Parquet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from goodput_traces.format.schema import Clock, order_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_traces.format.schema import TraceMetadata, TraceRow
    from goodput_traces.importers.record import Record

__all__ = ["ImportOptions", "Importer"]

_SORT_REMEDY: Final = "sort the file, or add --sort"
_MAX_DROPPED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Facts that the user adds to a source.

    Args:
        source: origin of the requests; the metadata's `source`.
        licence: licence of the source.
        block_size: tokens per hash, for formats that do not state it.
    """

    source: str = ""
    licence: str = ""
    block_size: int | None = None


class Importer(ABC):
    """Convert the records of one import into rows; then read `metadata` and `notes`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    fingerprint: ClassVar[frozenset[str]]
    """Columns that every record of the format has; the format is recognised by them."""
    ordered_by: ClassVar[str]
    """The column that determines the order of records."""
    known: ClassVar[frozenset[str]]
    """Columns that are read; the others are dropped, and named in a note."""
    id_column: ClassVar[str] = "request_id"
    """The column that makes request ids."""
    several_files: ClassVar[bool] = False
    """True if sessions have clocks of their own, so that files can be joined."""

    def __init__(self, options: ImportOptions) -> None:
        self.options = options
        self.floored_output_rows = 0
        self._dropped: dict[str, None] = {}

    def rows(
        self, records: Iterable[Record], *, ordered: bool = False
    ) -> Iterator[tuple[Record, TraceRow]]:
        """The rows with their records, streamed in the source's order.

        Args:
            records: of the source.
            ordered: refuse rows that are not in the order of a trace.

        Raises:
            RowError: a value that breaks a rule; names the line and the source's column.
        """
        by_session = self.metadata().clock is Clock.SESSION_RELATIVE
        before = ("", -1)
        for record in records:
            if not self.known.issuperset(record.values):
                self._note_dropped(record)
            for row in self.convert(record):
                if ordered:
                    session = (row.provided_session_id or "") if by_session else ""
                    now = (session, row.timestamp_start_unix_ns)
                    problem = order_problem(before, now, _SORT_REMEDY)
                    if problem is not None:
                        record.refuse(self.order_column(record), problem)
                    before = now
                yield record, row

    def order_column(self, record: Record) -> str:  # noqa: ARG002 - some formats have two clocks
        """The column that determines the order of this record."""
        return self.ordered_by

    @abstractmethod
    def convert(self, record: Record) -> Iterable[TraceRow]:
        """The rows of one record."""

    @abstractmethod
    def metadata(self) -> TraceMetadata:
        """The trace's metadata; final after the last row."""

    def notes(self) -> list[str]:
        """Sentences for the user about changed or lost values."""
        notes = []
        if self.floored_output_rows:
            notes.append(f"{self.floored_output_rows:,} rows with zero output tokens were set to 1")
        if self._dropped:
            notes.append(f"columns that a trace does not keep: {', '.join(self._dropped)}")
        return notes

    def output_tokens(self, record: Record, column: str) -> int:
        """Output tokens, with zero floored to 1 and counted."""
        tokens = record.integer(column, "output_tokens")
        if tokens == 0:
            self.floored_output_rows += 1
            return 1
        return tokens

    def _note_dropped(self, record: Record) -> None:
        for column in record.values:
            if column not in self.known and len(self._dropped) < _MAX_DROPPED:
                self._dropped[column] = None
