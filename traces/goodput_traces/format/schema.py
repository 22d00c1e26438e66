"""The trace format without I/O: rows, columns, bounds, order, and the file's metadata.

Columns that AIPerf's `baseten_trace` reader also reads have the same name and meaning there. This
module must not import pyarrow, because argument parsers load it and must be fast.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_MS, ms_to_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "COLUMN_MS",
    "COLUMN_NS",
    "FLOAT_BOUNDS",
    "FORMAT_VERSION",
    "INT_BOUNDS",
    "MAX_HASHES",
    "MAX_TOKENS",
    "OPTIONAL_COLUMNS",
    "REQUIRED_COLUMNS",
    "ROW_FIELDS",
    "TEXT_BOUNDS",
    "Clock",
    "ColumnBounds",
    "HashSemantics",
    "TraceMetadata",
    "TraceRow",
]

FORMAT_VERSION: Final = "1"
COLUMN_NS: Final = "timestamp_start_unix_ns"
COLUMN_MS: Final = "timestamp_start_unix_ms"
# In addition, one of the two timestamps is required.
REQUIRED_COLUMNS: Final = ("request_id", "input_tokens", "output_tokens")

# Prompts are built from these numbers, so a hostile file must not be able to request a
# terabyte. The largest context length on the market is ten million tokens.
MAX_TOKENS: Final = 10_000_000
MAX_HASHES: Final = 10_000_000
_MAX_MS: Final = 366 * 86_400_000  # a year; a longer target or pause has the wrong unit
_MAX_NAME: Final = 512
_MAX_TEXT: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnBounds:
    """The allowed values of a column.

    Args:
        lowest: minimum.
        highest: maximum.
        above: True if the minimum itself is not allowed.
    """

    lowest: int
    highest: int
    above: bool = False

    def allow(self, value: float) -> bool:
        """True if the value is within the bounds; it must not be NaN."""
        return self.lowest <= value <= self.highest and not (self.above and value == self.lowest)

    def __str__(self) -> str:
        return (
            f"{'above' if self.above else 'at least'} {self.lowest:,} and at most {self.highest:,}"
        )


_INT32: Final = ColumnBounds(lowest=-(2**31), highest=2**31 - 1)
_INT64: Final = ColumnBounds(lowest=-(2**63), highest=2**63 - 1)
_TOKENS: Final = ColumnBounds(lowest=1, highest=MAX_TOKENS)
_DURATION_MS: Final = ColumnBounds(lowest=0, highest=_MAX_MS)
_TARGET_MS: Final = ColumnBounds(lowest=0, highest=_MAX_MS, above=True)
INT_BOUNDS: Final[Mapping[str, ColumnBounds]] = {
    COLUMN_NS: ColumnBounds(lowest=0, highest=_INT64.highest),
    COLUMN_MS: ColumnBounds(lowest=0, highest=_INT64.highest // NS_PER_MS),
    "input_tokens": _TOKENS,
    "output_tokens": ColumnBounds(lowest=0, highest=MAX_TOKENS),  # zeros are read as 1 and counted
    "max_output_tokens": _TOKENS,
    "block_size": ColumnBounds(lowest=1, highest=1 << 20),
    "poor_man_session_id": _INT64,
    "turn": ColumnBounds(lowest=0, highest=_INT32.highest),
    "priority": _INT32,
    "request_canceled": ColumnBounds(lowest=0, highest=1),
    "duration_ttft_ms": _DURATION_MS,
    "duration_e2e_ms": _DURATION_MS,
}
FLOAT_BOUNDS: Final[Mapping[str, ColumnBounds]] = {
    "ttft_target_ms": _TARGET_MS,
    "tpot_target_ms": _TARGET_MS,
    "e2e_target_ms": _TARGET_MS,
    "delay_ms": _DURATION_MS,
    "cancel_after_ms": _DURATION_MS,
}
# Column → longest value, bytes.
TEXT_BOUNDS: Final[Mapping[str, int]] = {
    "request_id": _MAX_NAME,
    "prompt": _MAX_TEXT,
    "provided_session_id": _MAX_NAME,
    "parent_request_id": _MAX_NAME,
    "slo_class": 63,
    "model_name": _MAX_NAME,
    "org_id": _MAX_NAME,
    "request_type": _MAX_NAME,
    "output_text": _MAX_TEXT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace. Field names equal the columns of the Parquet format.

    Args:
        request_id: unique within the trace. The requests of two runs of a trace are matched by it.
        timestamp_start_unix_ns: arrival, nanoseconds since the Unix epoch for an absolute clock,
            since the start of the trace or of the session for a relative clock.
        input_tokens: prompt length, at least 1.
        output_tokens: output length, at least 1; zeros are read as 1 and counted.
        max_output_tokens: the limit that the client set; scheduling policies see this length
            and not `output_tokens`.
        prompt: the prompt's text, if the trace has it.
        total_hashes: one hash per block of the prompt, in order. Equal hashes mean that the prompts
            agree up to and including the block. Empty if the prefix structure is unknown. Hashes
            beyond the prompt's blocks belong to the output.
        block_size: tokens per hash; not None if `total_hashes` is not empty.
        provided_session_id: the session id given by the source.
        poor_man_session_id: a session id that the source derived because the client gave none.
        turn: position within the session, from 0.
        parent_request_id: the request whose response precedes this request.
        delay_ms: think time between the parent's response and this request, milliseconds.
        slo_class: the SLO class.
        ttft_target_ms: the row's own TTFT target, milliseconds.
        tpot_target_ms: the row's own TPOT target, milliseconds.
        e2e_target_ms: the row's own end-to-end target, milliseconds.
        priority: a larger value is more urgent.
        request_canceled: True if the source's client cancelled the request.
        cancel_after_ms: time of the cancellation, milliseconds after arrival.
        duration_ttft_ms: recorded TTFT, milliseconds; not used by a replay.
        duration_e2e_ms: recorded duration, milliseconds; not used by a replay.
        model_name: the model that served the request.
        org_id: the organisation that sent the request.
        request_type: the source's name for the kind of request.
        output_text: the output's text, if the trace has it.
    """

    request_id: str
    timestamp_start_unix_ns: int
    input_tokens: int
    output_tokens: int
    max_output_tokens: int | None = None
    prompt: str | None = None
    total_hashes: tuple[int, ...] = ()
    block_size: int | None = None
    provided_session_id: str | None = None
    poor_man_session_id: int | None = None
    turn: int | None = None
    parent_request_id: str | None = None
    delay_ms: float | None = None
    slo_class: str | None = None
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    e2e_target_ms: float | None = None
    priority: int | None = None
    request_canceled: bool | None = None
    cancel_after_ms: float | None = None
    duration_ttft_ms: int | None = None
    duration_e2e_ms: int | None = None
    model_name: str | None = None
    org_id: str | None = None
    request_type: str | None = None
    output_text: str | None = None

    @property
    def targets(self) -> Targets:
        """The row's own targets; they override those of its class."""
        return Targets(
            ttft_ns=None if self.ttft_target_ms is None else ms_to_ns(self.ttft_target_ms),
            tpot_ns=None if self.tpot_target_ms is None else ms_to_ns(self.tpot_target_ms),
            e2e_ns=None if self.e2e_target_ms is None else ms_to_ns(self.e2e_target_ms),
        )

    @property
    def session_id(self) -> str | None:
        """The provided session id, or the derived one, or None."""
        if self.provided_session_id is not None:
            return self.provided_session_id
        return None if self.poor_man_session_id is None else str(self.poor_man_session_id)

    @property
    def cancel_after_ns(self) -> int | None:
        """Time of the client's cancellation, nanoseconds after arrival; None if not cancelled."""
        return None if self.cancel_after_ms is None else ms_to_ns(self.cancel_after_ms)


ROW_FIELDS: Final = tuple(field.name for field in fields(TraceRow))
OPTIONAL_COLUMNS: Final = tuple(
    field.name for field in fields(TraceRow) if field.default is not MISSING
)


class Clock(StrEnum):
    """Origin of a trace's timestamps."""

    ABSOLUTE = "absolute"
    """The Unix epoch."""
    TRACE_RELATIVE = "trace-relative"
    """The start of the trace."""
    SESSION_RELATIVE = "session-relative"
    """The start of each session. Sessions share no clock, so a replay chooses their starts."""


class HashSemantics(StrEnum):
    """Part of the prompt that a row's hashes cover."""

    NONE = "none"
    """No hashes."""
    FULL_BLOCKS = "full-blocks"
    """Full blocks only: a row has input_tokens // block_size hashes."""
    LAST_PARTIAL = "last-partial"
    """The last block may be partial: a row has ceil(input_tokens / block_size) hashes."""
    UNSPECIFIED = "unspecified"
    """The source does not state which blocks have hashes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMetadata:
    """Key-value metadata of a trace file.

    Args:
        source: origin of the requests, free text.
        licence: licence of the source; empty if unknown.
        clock: origin of the timestamps.
        timestamp_resolution_ns: tick of the source's timestamps, nanoseconds.
        hash_semantics: part of the prompt that `total_hashes` covers.
        floored_output_rows: rows whose zero output tokens became 1 at import.
    """

    source: str = ""
    licence: str = ""
    clock: Clock = Clock.ABSOLUTE
    timestamp_resolution_ns: int = 1
    hash_semantics: HashSemantics = HashSemantics.UNSPECIFIED
    floored_output_rows: int = 0

    def to_key_values(self) -> dict[str, str]:
        """Return the key-value metadata of the Parquet file."""
        values = {"version": FORMAT_VERSION}
        values |= {field.name: str(getattr(self, field.name)) for field in fields(self)}
        return {f"{_PREFIX}{name}": value for name, value in values.items()}

    @classmethod
    def from_key_values(cls, pairs: Mapping[bytes, bytes], *, has_ns: bool) -> TraceMetadata:
        """Decode the metadata; absent keys get the defaults for files of other tools.

        Args:
            pairs: key-value metadata of the Parquet file.
            has_ns: True if arrivals have nanoseconds, False if they have milliseconds.

        Raises:
            ValueError: a key has an unknown value; names the key.
        """

        def text(key: str, default: str) -> str:
            raw = pairs.get(f"{_PREFIX}{key}".encode())
            return default if raw is None else raw.decode("utf-8", "replace")[:4096]

        def number(key: str, default: int) -> int:
            raw = text(key, str(default))
            if not (raw.isascii() and raw.isdigit() and len(raw) < 19):
                raise ValueError(f"metadata {_PREFIX}{key} is {raw[:40]!r}, not a whole number")
            return int(raw)

        version = text("version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"metadata {_PREFIX}version is {version[:40]!r}, but this version of goodput reads "
                f"{FORMAT_VERSION!r}; upgrade goodput"
            )
        return cls(
            source=text("source", ""),
            licence=text("licence", ""),
            clock=_parse_member(Clock, "clock", text("clock", Clock.ABSOLUTE)),
            timestamp_resolution_ns=number("timestamp_resolution_ns", 1 if has_ns else NS_PER_MS),
            hash_semantics=_parse_member(
                HashSemantics, "hash_semantics", text("hash_semantics", HashSemantics.UNSPECIFIED)
            ),
            floored_output_rows=number("floored_output_rows", 0),
        )


_PREFIX: Final = "goodput.trace."
_E = TypeVar("_E", bound=StrEnum)


def _parse_member(kind: type[_E], key: str, value: str) -> _E:
    try:
        return kind(value)
    except ValueError as error:
        allowed = ", ".join(kind)
        raise ValueError(
            f"metadata {_PREFIX}{key} is {value[:40]!r}, not one of {allowed}"
        ) from error
