"""The trace format as Parquet sees it: columns, types, bounds, and the file's own metadata.

Columns shared with AIPerf's `baseten_trace` reader keep its names and meaning. A file written
by another tool may lack our metadata and use narrower or wider integers; the reader copes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

import pyarrow as pa

from goodput_core.units import NS_PER_MS

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
    "REQUIRED_COLUMNS",
    "TEXT_BOUNDS",
    "TRACE_SCHEMA",
    "Clock",
    "HashSemantics",
    "TraceMetadata",
]

FORMAT_VERSION: Final = "1"
COLUMN_NS: Final = "timestamp_start_unix_ns"
COLUMN_MS: Final = "timestamp_start_unix_ms"

TRACE_SCHEMA: Final[pa.Schema] = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field(COLUMN_MS, pa.int64(), nullable=False),
        pa.field(COLUMN_NS, pa.int64(), nullable=False),
        pa.field("input_tokens", pa.int64(), nullable=False),
        pa.field("output_tokens", pa.int64(), nullable=False),
        pa.field("max_output_tokens", pa.int64()),
        pa.field("prompt", pa.string()),
        pa.field("total_hashes", pa.list_(pa.int64())),
        pa.field("block_size", pa.int32()),
        pa.field("provided_session_id", pa.string()),
        pa.field("poor_man_session_id", pa.int64()),
        pa.field("turn", pa.int32()),
        pa.field("parent_request_id", pa.string()),
        pa.field("delay_ms", pa.float64()),
        pa.field("slo_class", pa.string()),
        pa.field("ttft_target_ms", pa.float64()),
        pa.field("tpot_target_ms", pa.float64()),
        pa.field("e2e_target_ms", pa.float64()),
        pa.field("priority", pa.int32()),
        pa.field("request_canceled", pa.int8()),
        pa.field("cancel_after_ms", pa.float64()),
        pa.field("duration_ttft_ms", pa.int64()),
        pa.field("duration_e2e_ms", pa.int64()),
        pa.field("model_name", pa.string()),
        pa.field("org_id", pa.string()),
        pa.field("request_type", pa.string()),
        pa.field("output_text", pa.string()),
    ]
)
# Besides these, one of the two timestamps.
REQUIRED_COLUMNS: Final = ("request_id", "input_tokens", "output_tokens")

# A prompt is built from these numbers, so a hostile file must not be able to ask for a
# terabyte. The largest context on the market is ten million tokens.
MAX_TOKENS: Final = 10_000_000
MAX_HASHES: Final = 10_000_000
_MAX_MS: Final = 366 * 86_400_000  # a year: a longer promise or pause is a wrong unit
_MAX_INT32: Final = 2**31 - 1
_MAX_NAME: Final = 512
_MAX_TEXT: Final = 64 << 20

INT_BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    COLUMN_NS: (0, 2**63 - 1),
    COLUMN_MS: (0, (2**63 - 1) // NS_PER_MS),
    "input_tokens": (1, MAX_TOKENS),
    "output_tokens": (0, MAX_TOKENS),  # zeros are floored to 1 and counted
    "max_output_tokens": (1, MAX_TOKENS),
    "block_size": (1, 1 << 20),
    "turn": (0, _MAX_INT32),
    "request_canceled": (0, 1),
    "duration_ttft_ms": (0, _MAX_MS),
    "duration_e2e_ms": (0, _MAX_MS),
}
# Name → (lowest, whether the lowest itself is allowed, highest); milliseconds.
FLOAT_BOUNDS: Final[Mapping[str, tuple[float, bool, float]]] = {
    "ttft_target_ms": (0.0, False, _MAX_MS),
    "tpot_target_ms": (0.0, False, _MAX_MS),
    "e2e_target_ms": (0.0, False, _MAX_MS),
    "delay_ms": (0.0, True, _MAX_MS),
    "cancel_after_ms": (0.0, True, _MAX_MS),
}
# Name → longest value, bytes.
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


class Clock(StrEnum):
    """What a trace's timestamps count from."""

    ABSOLUTE = "absolute"
    """The Unix epoch."""
    TRACE_RELATIVE = "trace-relative"
    """The trace's own start."""
    SESSION_RELATIVE = "session-relative"
    """Each session's own start: sessions share no clock, so this cannot be replayed as it is."""


class HashSemantics(StrEnum):
    """What the hashes of a row cover."""

    NONE = "none"
    """No hashes."""
    FULL_BLOCKS = "full-blocks"
    """Full blocks only: a row has input_tokens // block_size of them."""
    LAST_PARTIAL = "last-partial"
    """The last block may be partial: a row has ceil(input_tokens / block_size) of them."""
    UNSPECIFIED = "unspecified"
    """The source does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMetadata:
    """What a trace file says about itself.

    Args:
        source: where the requests come from, for people.
        licence: under what terms; empty when unknown.
        clock: what timestamps count from.
        timestamp_resolution_ns: the source's tick, nanoseconds.
        hash_semantics: what `total_hashes` covers.
        floored_output_rows: rows whose zero output tokens were floored to 1 at import.
    """

    source: str = ""
    licence: str = ""
    clock: Clock = Clock.ABSOLUTE
    timestamp_resolution_ns: int = 1
    hash_semantics: HashSemantics = HashSemantics.UNSPECIFIED
    floored_output_rows: int = 0

    def to_key_values(self) -> dict[str, str]:
        """The Parquet file's key-value metadata."""
        return {
            f"{_PREFIX}version": FORMAT_VERSION,
            f"{_PREFIX}source": self.source,
            f"{_PREFIX}licence": self.licence,
            f"{_PREFIX}clock": self.clock.value,
            f"{_PREFIX}timestamp_resolution_ns": str(self.timestamp_resolution_ns),
            f"{_PREFIX}hash_semantics": self.hash_semantics.value,
            f"{_PREFIX}floored_output_rows": str(self.floored_output_rows),
        }

    @classmethod
    def from_key_values(cls, pairs: Mapping[bytes, bytes], *, has_ns: bool) -> TraceMetadata:
        """Read the metadata back; keys that are absent get the defaults of a foreign file.

        Raises:
            ValueError: a key has a value that this version does not know; names the key.
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
                f"metadata {_PREFIX}version is {version[:40]!r}, this version of goodput reads "
                f"{FORMAT_VERSION!r}; upgrade goodput"
            )
        return cls(
            source=text("source", ""),
            licence=text("licence", ""),
            clock=_member(Clock, "clock", text("clock", Clock.ABSOLUTE)),
            timestamp_resolution_ns=number("timestamp_resolution_ns", 1 if has_ns else NS_PER_MS),
            hash_semantics=_member(
                HashSemantics, "hash_semantics", text("hash_semantics", HashSemantics.UNSPECIFIED)
            ),
            floored_output_rows=number("floored_output_rows", 0),
        )


_PREFIX: Final = "goodput.trace."
_E = TypeVar("_E", bound=StrEnum)


def _member(kind: type[_E], key: str, value: str) -> _E:
    try:
        return kind(value)
    except ValueError as error:
        allowed = ", ".join(kind)
        raise ValueError(
            f"metadata {_PREFIX}{key} is {value[:40]!r}, not one of {allowed}"
        ) from error
