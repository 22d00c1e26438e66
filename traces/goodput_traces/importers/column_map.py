"""Maps of a log's columns to columns of the trace format, from the command line or from a file.

This module interprets only the map. It must not read logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import did_you_mean
from goodput_traces.errors import TraceError
from goodput_traces.format.schema import COLUMN_NS, ROW_FIELDS
from goodput_traces.importers.line_format import LineFormat, parse_line_format
from goodput_traces.importers.times import UNITS_NS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = [
    "ARRIVAL",
    "FINISH",
    "ColumnMap",
    "RowFilter",
    "SourceColumn",
    "nested_value",
    "parse_filter",
    "parse_pairs",
    "read_map_file",
]

ARRIVAL: Final = "arrival"
"""Name of the arrival in a map, in any form that `ArrivalReader` reads."""
FINISH: Final = "finish"
"""Name of the time at which a request ended; the arrival is earlier by `duration_e2e_ms`."""
_TARGETS: Final = (ARRIVAL, FINISH, *(name for name in ROW_FIELDS if name != COLUMN_NS))
_MAX_FILE_BYTES: Final = 64 << 10
_MAX_NAME: Final = 512
_FILE_KEYS: Final = ("line", "unmatched", "columns", "only")
_EXAMPLE: Final = "write, for example, arrival=time,input_tokens=usage.prompt_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceColumn:
    """The column of a log from which a column of the trace is filled.

    Args:
        names: name of the column; nested fields are joined by dots. If there are several, the first
            one with a value is used.
        unit: a key of `UNITS_NS` for times and durations; None for the default.
        guessed: True if the column was chosen because of its name.
    """

    names: tuple[str, ...]
    unit: str | None = None
    guessed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter:
    """A condition on the rows to import: a column matches one of several patterns.

    Args:
        column: name of the column.
        patterns: texts in which `*` stands for any characters.
    """

    column: str
    patterns: tuple[str, ...]

    def matches(self, value: Any) -> bool:
        """True if the value, as text, matches a pattern; never for a missing value."""
        if value is None:
            return False
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return any(_matches_pattern(text, pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMap:
    """A map from columns of the trace to columns of a log.

    Args:
        columns: source by column of the trace, or by `ARRIVAL` or `FINISH`.
        only: conditions that a row must satisfy to be imported.
        line: format of the lines, for a log that is neither CSV, JSON lines nor Parquet.
    """

    columns: Mapping[str, SourceColumn] = field(default_factory=dict)
    only: tuple[RowFilter, ...] = ()
    line: LineFormat | None = None

    def merge(self, other: ColumnMap) -> ColumnMap:
        """Return a map with the entries of both; those of `other` replace equal ones."""
        return ColumnMap(
            columns={**self.columns, **other.columns},
            only=self.only + other.only,
            line=other.line or self.line,
        )

    def column_names(self) -> set[str]:
        """Return the names of the log's columns, and of the columns that can contain them."""
        names = {name for source in self.columns.values() for name in source.names}
        names |= {condition.column for condition in self.only}
        return {part for name in names for part in _prefixes(name)}


def parse_pairs(text: str) -> ColumnMap:
    """Parse `arrival=time,input_tokens=usage.prompt_tokens,duration_ttft_ms=ttft:s`.

    Raises:
        ValueError: a pair is invalid or repeated.
    """
    columns: dict[str, SourceColumn] = {}
    for pair in text.split(","):
        target, equals, source = (part.strip() for part in pair.partition("="))
        if not equals or not target or not source:
            raise ValueError(f"{pair!r} is not a pair of columns; {_EXAMPLE}")
        if target in columns:
            raise ValueError(f"{text!r} maps {target} twice; remove one")
        name, colon, unit = source.rpartition(":")
        if not colon or unit not in UNITS_NS:
            name, unit = source, ""
        columns[target] = _source_column(target, name, unit or None)
    return ColumnMap(columns=columns)


def parse_filter(text: str) -> RowFilter:
    """Parse a condition `status=200` or `path=/v1/*`.

    Raises:
        ValueError: the equals sign or the column is missing.
    """
    column, equals, pattern = text.partition("=")
    if not equals or not column.strip():
        raise ValueError(f"{text!r} is not a condition; write, for example, path=/v1/*")
    return RowFilter(column=column.strip(), patterns=(pattern.strip(),))


def read_map_file(path: Path) -> ColumnMap:
    """Read a map from a YAML or JSON file with the keys `columns`, `only`, `line` and `unmatched`.

    Raises:
        TraceError: the file cannot be read, or a key or value is invalid.
        InputError: the file is not YAML.
    """
    import yaml  # noqa: PLC0415 - the argument parser, which loads this module, must be fast

    from goodput_core.spec.manifest import parse_document  # noqa: PLC0415 - likewise

    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror}); check the path") from error
    if len(data) > _MAX_FILE_BYTES:
        raise TraceError(path, f"is larger than {_MAX_FILE_BYTES >> 10} KiB; shorten the map")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise TraceError(path, "is not UTF-8 text; convert it") from error
    document = parse_document(text, source=str(path), yaml=yaml, needed="a map of columns")
    try:
        return _parse_file(document)
    except ValueError as error:
        raise TraceError(path, str(error)) from error


def nested_value(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column or of a nested field, or None if there is none.

    A name with dots is a column of this name, or a field within objects. Keys can have dots
    themselves, as attributes of OpenTelemetry do.
    """
    value = values.get(name)
    if value is not None or "." not in name:
        return value
    at = name.find(".")
    while at >= 0:
        child = values.get(name[:at])
        if isinstance(child, dict):
            value = nested_value(child, name[at + 1 :])
            if value is not None:
                return value
        at = name.find(".", at + 1)
    return None


def _parse_file(document: object) -> ColumnMap:
    top = _mapping(document, "the map")
    _reject_unknown(top, _FILE_KEYS, "")
    line = None
    if "line" in top:
        unmatched = top.get("unmatched", "reject")
        if unmatched not in ("reject", "skip"):
            raise ValueError(f"unmatched: {unmatched!r} is neither reject nor skip")
        try:
            line = parse_line_format(_text(top["line"], "line"), skip_unmatched=unmatched == "skip")
        except ValueError as error:
            raise ValueError(f"line: the format {error}") from error
    columns = {}
    for target, value in _mapping(top.get("columns", {}), "columns").items():
        place = f"columns.{target}"
        if isinstance(value, dict):
            _reject_unknown(value, ("column", "unit"), f"{place}.")
            unit = value.get("unit")
            name = _text(value.get("column"), f"{place}.column")
        else:
            name, unit = _text(value, place), None
        try:
            columns[target] = _source_column(target, name, unit)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    only = []
    for column, value in _mapping(top.get("only", {}), "only").items():
        patterns = value if isinstance(value, list) else [value]
        texts = tuple(_text(pattern, f"only.{column}") for pattern in patterns)
        only.append(RowFilter(column=column, patterns=texts))
    return ColumnMap(columns=columns, only=tuple(only), line=line)


def _source_column(target: str, name: str, unit: object) -> SourceColumn:
    if target not in _TARGETS:
        raise ValueError(
            f"{target[:60]!r} is not a column of a trace, which docs/traces.md lists"
            f"{did_you_mean(target, _TARGETS)}"
        )
    if unit is not None:
        if target not in {ARRIVAL, FINISH} and not target.endswith("_ms"):
            raise ValueError(f"{target} has no unit; remove {unit!r}")
        if unit not in tuple(UNITS_NS):
            raise ValueError(f"{unit!r} is not a unit; use one of {', '.join(UNITS_NS)}")
    if len(name) > _MAX_NAME:
        raise ValueError(f"the name of a column is longer than {_MAX_NAME} characters")
    return SourceColumn(names=(name,), unit=None if unit is None else str(unit))


def _mapping(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{place}: expected names with values")
    return value


def _text(value: object, place: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"{place}: expected text; put it in quotes")
    return str(value)


def _reject_unknown(values: Mapping[str, Any], known: Sequence[str], prefix: str) -> None:
    unknown = next((key for key in values if key not in known), None)
    if unknown is not None:
        raise ValueError(
            f"{prefix}{unknown}: is not one of the keys {', '.join(known)}"
            f"{did_you_mean(unknown, known)}"
        )


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _matches_pattern(text: str, pattern: str) -> bool:
    """True if the text matches a pattern with `*`; each part is searched once."""
    first, *others = pattern.split("*")
    if not others:
        return text == pattern
    if not text.startswith(first):
        return False
    at = len(first)
    *middle, last = others
    for part in middle:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return len(text) - at >= len(last) and text.endswith(last)
