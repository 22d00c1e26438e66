"""Base class of importers: each converts the records of one format to rows of a trace.

An importer interprets a source's columns. It must not depend on files, compression or Parquet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from goodput_traces.errors import TraceError
from goodput_traces.format.schema import Clock, HashSemantics, TraceMetadata
from goodput_traces.importers.column_map import ColumnMap

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from goodput_traces.format.schema import TraceRow
    from goodput_traces.importers.record import Record

__all__ = ["ColumnUse", "ImportOptions", "Importer"]

_MAX_DROPPED: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Properties of a source that the file does not contain.

    Args:
        source: origin of the requests; the metadata's `source`.
        licence: licence of the source.
        block_size: tokens per hash, for formats that do not state it.
        column_map: the log's columns by column of the trace.
    """

    source: str = ""
    licence: str = ""
    block_size: int | None = None
    column_map: ColumnMap = field(default_factory=ColumnMap)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnUse:
    """The use of a source's column in a trace, for the preview of an import.

    Args:
        target: column of the trace.
        source: column of the source.
        remark: assumptions about the values; empty if there are none.
    """

    target: str
    source: str
    remark: str = ""


class Importer(ABC):
    """Converter of the records of one import to rows.

    `metadata` and `notes` are final only after the last row.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    required_columns: ClassVar[frozenset[str]]
    """Columns that every record of the format has; the format is recognised by these columns."""
    ordered_by: str
    """The column that determines the order of records."""
    clock: ClassVar[Clock]
    """Origin of the format's timestamps."""
    read_columns: frozenset[str]
    """Columns that are read. All others are dropped, and a note names them."""
    id_column: ClassVar[str] = "request_id"
    """Column from which request ids are built."""
    several_files: ClassVar[bool] = False
    """True if each session has its own clock, so that files can be joined."""
    maps_columns: ClassVar[bool] = False
    """True if a map of columns applies to the format."""
    sorts: bool = False
    """True if the source is not ordered by arrival, so that its rows are always sorted."""

    def __init__(self, options: ImportOptions) -> None:
        self.options = options
        self.resolution_ns = 1
        self.hash_semantics = HashSemantics.NONE
        self.floored_output_rows = 0
        self.num_records = 0
        self._dropped: dict[str, None] = {}

    @classmethod
    def recognises(cls, values: Mapping[str, Any]) -> bool:
        """True if a source whose first record has these values has the format."""
        return cls.required_columns.issubset(values)

    def begin(self, first: Record, columns: Collection[str] | None) -> None:  # noqa: B027 - optional
        """Prepare for a source.

        Args:
            first: the first record.
            columns: all columns of the source; None if later records can have others.

        Raises:
            TraceError: the source does not have a required column.
        """

    def rows(self, records: Iterable[Record]) -> Iterator[tuple[Record, TraceRow]]:
        """Yield the rows with their records, in the source's order.

        Raises:
            RowError: a value that breaks a rule; names the line and the source's column.
            TraceError: no record gave a request.
        """
        record, is_empty = None, True
        for record in records:
            self.num_records += 1
            if not self.read_columns.issuperset(record.values):
                self._note_dropped(record)
            for row in self.convert(record):
                is_empty = False
                yield record, row
        if record is not None and is_empty:
            reasons = "; ".join(self.notes()) or "the records contain no requests"
            raise TraceError(record.path, f"nothing was imported ({reasons}); check the source")

    @abstractmethod
    def convert(self, record: Record) -> Iterable[TraceRow]:
        """Convert one record to rows."""

    def keep_metadata(self, pairs: Mapping[bytes, bytes]) -> None:  # noqa: B027 - optional
        """Keep the metadata of a Parquet source, if the format has it.

        Raises:
            ValueError: a key has an unknown value.
        """

    def metadata(self) -> TraceMetadata:
        """Return the trace's metadata; final after the last row."""
        return TraceMetadata(
            source=self.options.source,
            licence=self.options.licence,
            clock=self.clock,
            timestamp_resolution_ns=self.resolution_ns,
            hash_semantics=self.hash_semantics,
            floored_output_rows=self.floored_output_rows,
        )

    def notes(self) -> list[str]:
        """Return sentences for the user about changed or lost values."""
        notes = []
        if self.floored_output_rows:
            notes.append(
                f"zero output tokens were replaced with 1 in {self.floored_output_rows:,} rows"
            )
        if self._dropped:
            shown = [column or "(unnamed)" for column in self._dropped][:_MAX_DROPPED]
            columns = ", ".join([*shown, *(["…"] if len(self._dropped) > _MAX_DROPPED else [])])
            notes.append(f"unused columns were dropped: {columns}")
        return notes

    def column_uses(self) -> list[ColumnUse]:
        """Return the use of the source's columns, for formats whose columns can vary."""
        return []

    def output_tokens(self, record: Record, column: str) -> int:
        """Return the output tokens; replace zero with 1 and count the replacement."""
        tokens = record.integer(column, "output_tokens")
        if tokens == 0:
            self.floored_output_rows += 1
            return 1
        return tokens

    def _note_dropped(self, record: Record) -> None:
        for column in record.values:
            if column not in self.read_columns and len(self._dropped) <= _MAX_DROPPED:
                self._dropped[column] = None
