"""Import any access log: columns are named by a map, known by their names, or guessed from them.

A column with a name of the trace format keeps its meaning. For the columns that every trace needs,
the usual names in other logs are tried in turn, and the preview states each guess.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from goodput_core.errors import did_you_mean
from goodput_core.units import NS_PER_MS
from goodput_traces.errors import NotATraceError, TraceError
from goodput_traces.format.schema import (
    COLUMN_MS,
    COLUMN_NS,
    FLOAT_BOUNDS,
    INT_BOUNDS,
    ROW_FIELDS,
    TEXT_BOUNDS,
    Clock,
    HashSemantics,
    TraceMetadata,
    TraceRow,
)
from goodput_traces.importers.base import ColumnUse, Importer, ImportOptions
from goodput_traces.importers.column_map import (
    ARRIVAL,
    FINISH,
    ColumnMap,
    SourceColumn,
    nested_value,
)
from goodput_traces.importers.times import UNITS_NS, ArrivalReader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from goodput_traces.importers.record import Record

__all__ = ["FixedLogImporter", "LogImporter"]

_DURATION: Final = "duration_e2e_ms"
_REQUIRED: Final = (ARRIVAL, "input_tokens", "output_tokens")
_OPTIONAL: Final = tuple(name for name in ROW_FIELDS if name not in {*_REQUIRED, COLUMN_NS})
_SKIPPING: Final = (
    "records that are not requests to the model, such as health checks, are skipped with --only "
    "COLUMN=VALUE"
)
_KNOWN_ARRIVALS: Final = {COLUMN_NS: "ns", COLUMN_MS: "ms"}
# The first name that the log has is used.
_GUESSES: Final[Mapping[str, tuple[str, ...]]] = {
    ARRIVAL: (
        *("arrival_time", "arrived_at", "received_at", "start_time", "startTime"),
        *("request_timestamp", "created_at", "created", "timestamp", "@timestamp"),
        *("datetime", "time", "ts"),
    ),
    "input_tokens": (
        *("prompt_tokens", "usage.prompt_tokens", "usage.input_tokens", "num_prompt_tokens"),
        *("request_tokens", "input_length", "prompt_length", "tokens_in"),
    ),
    "output_tokens": (
        *("completion_tokens", "usage.completion_tokens", "usage.output_tokens"),
        *("num_completion_tokens", "response_tokens", "generated_tokens", "output_length"),
        *("completion_length", "tokens_out"),
    ),
    "model_name": ("model",),
}


class LogImporter(Importer):
    """Importer of logs with one request per record."""

    name: ClassVar[str] = "log"
    summary: ClassVar[str] = "any access log: columns named with --map or guessed from their names"
    required_columns: ClassVar[frozenset[str]] = frozenset()
    ordered_by = ARRIVAL
    maps_columns: ClassVar[bool] = True
    default_block_size: ClassVar[int | None] = None
    """Tokens per hash of the format, if neither the file nor the options state it."""
    clock: ClassVar[Clock] = Clock.ABSOLUTE
    read_columns = frozenset({*ROW_FIELDS, *_KNOWN_ARRIVALS}).union(
        *({name, name.partition(".")[0]} for names in _GUESSES.values() for name in names)
    )

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._map = options.column_map
        self._sources: dict[str, SourceColumn] = {}
        self._unseen: set[str] = set()
        self._unseen_conditions = {one.column for one in options.column_map.only}
        self._arrivals = ArrivalReader()
        # Parts of the prompt that the hashes of every row so far can cover.
        self._covered = {HashSemantics.FULL_BLOCKS, HashSemantics.LAST_PARTIAL}
        self._skipped = self._unmatched = self._first_unmatched = self._num_candidates = 0
        self._given: set[str] = set()

    @classmethod
    def recognises(cls, values: Mapping[str, Any]) -> bool:
        """True if the columns that every trace needs are known or can be guessed."""
        return all(_find_source(target, values, values) for target in _REQUIRED)

    def begin(self, first: Record, columns: Collection[str] | None) -> None:
        """Choose the source of every column.

        Raises:
            TraceError: the map names a missing column, or no column gives the arrival or a length.
        """
        present = first.values if columns is None else columns
        for target, source in self._map.columns.items():
            if columns is not None or target in {*_REQUIRED, FINISH}:
                _check_column(first, columns, source.names[0], f"for {target}")
        for condition in self._map.only:
            if columns is not None:
                _check_column(first, columns, condition.column, "in a condition")
        sources = dict(self._map.columns)
        required = _REQUIRED[1:] if FINISH in sources else _REQUIRED
        for target in (*required, *_OPTIONAL):
            chosen = sources.get(target) or _find_source(target, present, first.values)
            if chosen is None and target in required:
                raise NotATraceError(
                    first.path,
                    f"no column is known to give {target}; name it with --map {target}=COLUMN "
                    f"(columns: {_list_columns(_leaf_names(first.values) or present)})",
                )
            if chosen is None and columns is None:
                chosen = SourceColumn(names=(target,))  # a later record can have it
            if chosen is not None:
                sources[target] = chosen
        used = ColumnMap(columns=sources, only=self._map.only).column_names()
        self.read_columns = frozenset({*used, *_KNOWN_ARRIVALS})
        self.use_sources(first, sources)

    def use_sources(self, first: Record, sources: Mapping[str, SourceColumn]) -> None:
        """Read every column of the trace from a source.

        Raises:
            TraceError: the arrival has two sources, or its source is not sufficient.
        """
        self._sources = dict(sources)
        if FINISH in sources:
            if ARRIVAL in sources:
                raise TraceError(first.path, "the map names both arrival and finish; remove one")
            if _DURATION not in sources:
                raise TraceError(
                    first.path,
                    "the map names finish, from which the duration of the request is subtracted; "
                    f"add --map {_DURATION}=COLUMN",
                )
        times = sources[FINISH if FINISH in sources else ARRIVAL]
        self._arrivals = ArrivalReader(times.unit)
        self.ordered_by = times.names[0]
        self.sorts = self.sorts or FINISH in sources
        self._unseen = {source.names[0] for source in self._map.columns.values()}
        names = [name for source in sources.values() for name in source.names]
        self.read_columns |= frozenset(names) | self._map.column_names()
        self._path = first.path

    def rows(self, records: Iterable[Record]) -> Iterator[tuple[Record, TraceRow]]:
        """Yield the rows with their records.

        Raises:
            RowError: a value that breaks a rule; names the line and the log's column.
            TraceError: no record has a value in a column that the map names.
        """
        yield from super().rows(records)
        if self._unseen:
            raise TraceError(
                self._path,
                f"no record has a value in the column {min(self._unseen)}; correct or remove it in "
                "the map",
            )

    def convert(self, record: Record) -> Iterable[TraceRow]:
        """Convert a record to one request, or to none if a condition does not hold."""
        if not record.values:
            self._unmatched += 1
            self._first_unmatched = self._first_unmatched or record.number
            return ()
        return self.convert_values(record)

    def convert_values(self, record: Record) -> Iterator[TraceRow]:
        """Convert a record with values, which can be nested, to one request or none."""
        self._num_candidates += 1
        for condition in self._map.only:
            value = nested_value(record.values, condition.column)
            if value is not None:
                self._unseen_conditions.discard(condition.column)
            if not condition.matches(value):
                self._skipped += 1
                return
        columns: dict[str, str] = {}
        values: dict[str, Any] = {}
        for target, source in self._sources.items():
            if target in _REQUIRED:
                columns[target] = source.names[0]
            for name in source.names:
                value = nested_value(record.values, name)
                if value is not None and value != "":
                    columns[target], values[name] = name, value
                    break
        self._unseen.difference_update(values)
        self._given.update(columns)
        flat = replace(record, values=values)
        fields = {target: self._read(flat, target, name) for target, name in columns.items()}
        yield self._make_row(flat, columns, fields)

    def metadata(self) -> TraceMetadata:
        """Return the trace's metadata; final after the last row."""
        return replace(super().metadata(), clock=self._arrivals.clock)

    def notes(self) -> list[str]:
        """Return the numbers of skipped records, and the notes of every importer."""
        notes = []
        if self._skipped:
            notes.append(f"{self._skipped:,} records that --only excludes were skipped")
            notes += [
                f"no record has a value in the column {name} of --only"
                for name in sorted(self._unseen_conditions)
            ]
        if self._unmatched:
            notes.append(
                f"{self._unmatched:,} lines that do not match the line format were skipped, first "
                f"line {self._first_unmatched:,}"
            )
        return notes + super().notes()

    def column_uses(self) -> list[ColumnUse]:
        """Return the source of every column that was read, and the assumptions about it."""
        uses = []
        for target, source in self._sources.items():
            if target not in self._given:
                if target in self._map.columns:
                    remark = "no value in the first rows"
                    uses.append(
                        ColumnUse(target=target, source=" or ".join(source.names), remark=remark)
                    )
                continue
            remarks = ["guessed from its name"] if source.guessed else []
            if target in {ARRIVAL, FINISH}:
                remarks.append(self._arrivals.describe())
            elif source.unit:
                remarks.append(f"in {source.unit}")
            names = " or ".join(source.names)
            uses.append(ColumnUse(target=target, source=names, remark=", ".join(remarks)))
        return uses

    def _read(self, record: Record, target: str, column: str) -> Any:
        """Return the value of one column of the trace."""
        if target in _REQUIRED and record.values.get(column) is None:
            record.reject(column, f"the value is missing; every request needs one, and {_SKIPPING}")
        if target in {ARRIVAL, FINISH}:
            return self._arrivals.read_ns(record, column)
        if target in TEXT_BOUNDS:
            return record.optional_text(column, target)
        if target == "output_tokens":
            return self.output_tokens(record, column)
        if target == "input_tokens":
            return record.integer(column, target)
        if target == "total_hashes":
            return record.hashes(column)
        if target.endswith("_ms"):
            return self._read_ms(record, target, column)
        value = record.values[column]
        if target == "request_canceled" and str(value).lower() in {"true", "false"}:
            return str(value).lower() == "true"
        number = record.optional_integer(column, target)
        return number == 1 if target == "request_canceled" else number

    def _read_ms(self, record: Record, target: str, column: str) -> float | None:
        number = record.optional_number(column)
        if number is None:
            return None
        unit = self._sources[target].unit
        ms = number if unit is None else number * UNITS_NS[unit] / NS_PER_MS
        if target in INT_BOUNDS:
            ms = round(ms)
        record.check_bounds(column, ms, INT_BOUNDS.get(target) or FLOAT_BOUNDS[target])
        return ms

    def _make_row(
        self, record: Record, columns: Mapping[str, str], fields: dict[str, Any]
    ) -> TraceRow:
        self.resolution_ns = self._arrivals.resolution_ns
        arrival_ns = fields.pop(ARRIVAL, None)
        if arrival_ns is None:
            arrival_ns = self._subtract_duration(record, columns, fields)
        if fields.get("total_hashes"):
            size = fields.get("block_size") or self.options.block_size or self.default_block_size
            if size is None:
                record.reject(
                    columns["total_hashes"],
                    "the row has hashes without their size; set the tokens per hash with "
                    "--block-size",
                )
            fields["block_size"] = size
            self._note_blocks(fields["input_tokens"], size, len(fields["total_hashes"]))
        else:
            fields.pop("block_size", None)
        fields["request_id"] = fields.get("request_id") or f"{self.name}-{self._num_candidates:07d}"
        return TraceRow(**{COLUMN_NS: arrival_ns, **fields})

    def _note_blocks(self, tokens: int, block_size: int, hashes: int) -> None:
        """Derive the part of a prompt that hashes cover from their number."""
        if hashes != tokens // block_size:
            self._covered.discard(HashSemantics.FULL_BLOCKS)
        if hashes != -(-tokens // block_size):
            self._covered.discard(HashSemantics.LAST_PARTIAL)
        self.hash_semantics = min(self._covered, default=HashSemantics.UNSPECIFIED)

    def _subtract_duration(
        self, record: Record, columns: Mapping[str, str], fields: dict[str, Any]
    ) -> int:
        if FINISH not in fields:
            record.reject(
                self.ordered_by, "the value is missing; every request needs the time of its end"
            )
        column = self._sources[_DURATION].names[0]
        if _DURATION not in fields:
            record.reject(
                column, "the value is missing; without its duration, the arrival is unknown"
            )
        # The duration is read again, because the recorded outcome is rounded to milliseconds.
        unit_ns = UNITS_NS[self._sources[_DURATION].unit or "ms"]
        duration_ns = round((record.optional_number(columns[_DURATION]) or 0) * unit_ns)
        arrival_ns: int = fields.pop(FINISH) - duration_ns
        if arrival_ns < 0:
            record.reject(column, "the duration is longer than the time of the end; correct it")
        return arrival_ns


class FixedLogImporter(LogImporter):
    """Importer of a published format with one request per record; a map can change a column."""

    sources: ClassVar[Mapping[str, SourceColumn]]
    """Source of each column that the format gives."""
    untried: ClassVar[bool] = False
    """True if the importer follows the documentation of a format and was not tried on a file."""

    @classmethod
    def recognises(cls, values: Mapping[str, Any]) -> bool:
        """True if the values have the required columns."""
        return cls.required_columns.issubset(values)

    def begin(self, first: Record, columns: Collection[str] | None) -> None:  # noqa: ARG002
        """Use the columns of the format, and those that a map names."""
        sources = {**self.sources, **self.options.column_map.columns}
        if FINISH in sources:
            del sources[ARRIVAL]
        self.use_sources(first, sources)

    def notes(self) -> list[str]:
        """Return the notes of logs, and the state of the importer."""
        notes = super().notes()
        if self.untried:
            notes.append(
                f"the importer of {self.name} follows the documented columns and was not tried on "
                "a published file; check the first rows"
            )
        return notes


def _find_source(
    target: str, present: Collection[str], values: Mapping[str, Any]
) -> SourceColumn | None:
    """Return the source of a column that the map does not name, or None if there is none."""
    if target == ARRIVAL:
        for name, unit in _KNOWN_ARRIVALS.items():
            if name in present:
                return SourceColumn(names=(name,), unit=unit)
    elif target in present:
        return SourceColumn(names=(target,))
    for name in _GUESSES.get(target, ()):
        if name in present or nested_value(values, name) is not None:
            return SourceColumn(names=(name,), guessed=True)
    return None


def _check_column(first: Record, columns: Collection[str] | None, name: str, use: str) -> None:
    """Reject a map with a column that the file does not have, directly or nested in another.

    Without the columns of the file, those of its first record count.
    """
    present, holder, advice = columns, "the file", ""
    if present is None:
        present, holder = first.values, f"{first.unit} {first.number}"
        advice = f"; {_SKIPPING}"
    parents = [name[:at] for at, character in enumerate(name) if character == "."]
    if not any(column in present for column in (name, *parents)):
        raise TraceError(
            first.path,
            f"the map names the column {name} {use}, but {holder} only has the columns "
            f"{_list_columns(present)}{did_you_mean(name, present)}{advice}",
        )


def _leaf_names(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the names of all columns, those of nested objects joined by dots."""
    names = []
    for name, value in values.items():
        nested = _leaf_names(value, f"{prefix}{name}.") if isinstance(value, dict) else []
        names += nested or [f"{prefix}{name}"]
    return names


def _list_columns(columns: Collection[str]) -> str:
    return ", ".join(map(str, list(columns)[:12]))[:300]
