"""Remove texts from a trace and replace its ids with keyed hashes, so that it can be shared.

Ids are replaced with BLAKE2b in keyed mode (RFC 7693), a message authentication code. Without the
key, it cannot be tested whether an id or the hash of a known text occurs in the trace. Equal ids
get equal replacements, so sessions, parents and shared prefixes stay.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import InputError, UsageError
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock
from goodput_traces.format.writer import reject_existing, sort_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from goodput_traces.format.reader import Trace
    from goodput_traces.format.schema import TraceMetadata, TraceRow

__all__ = ["AnonymizeResult", "anonymize_trace", "read_key"]

_TEXTS: Final = ("prompt", "output_text")
# Columns that stay and can contain names of products or customers.
_KEPT_NAMES: Final = ("slo_class", "model_name", "request_type")

_MIN_KEY_BYTES: Final = 16
_MAX_KEY_BYTES: Final = 4096
# A random key of 16 bytes or of hexadecimal digits practically always has as many.
_MIN_DISTINCT_BYTES: Final = 6
_ID_BYTES: Final = 16
_SHOWN_NAMES: Final = 8
_CACHED_BLOCKS: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class AnonymizeResult:
    """Number of rows written, and notes for the user about lost and kept values."""

    num_rows: int
    notes: tuple[str, ...]


def read_key(path: Path) -> bytes:
    """Read a key from a file; white space at the end does not count.

    Raises:
        InputError: the file cannot be read, has fewer than 16 or more than 4096 bytes, or repeats
            few characters.
    """
    try:
        with path.open("rb") as file:
            key = file.read(_MAX_KEY_BYTES + 1).rstrip()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check --key-file") from error
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise InputError(
            f"{path}: a key has {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes; make one with "
            "`openssl rand -hex 32`"
        )
    if len(set(key)) < _MIN_DISTINCT_BYTES:
        raise InputError(
            f"{path}: the key repeats so few characters that it can be guessed; make one with "
            "`openssl rand -hex 32`"
        )
    return key


def anonymize_trace(
    source: Path,
    out: Path,
    *,
    key: bytes | None,
    drop: Collection[str] = (),
    relative_times: bool = False,
    overwrite: bool = False,
    max_decoded_bytes: int | None = None,
) -> AnonymizeResult:
    """Write a trace without texts, with hashed ids.

    Args:
        source: the trace.
        out: the trace to write.
        key: equal keys give equal ids, also in other traces; None for a random key that is
            forgotten.
        drop: optional columns to leave out.
        relative_times: count the arrivals of an absolute clock from the first one.
        overwrite: replace an existing trace.
        max_decoded_bytes: largest decoded size of the source; None for the default of
            `open_trace`.

    Raises:
        TraceError: the source or the output is invalid; no file is left behind.
        UsageError: the column to drop is needed.
    """
    reject_existing(out, overwrite=overwrite, sources=(source,))
    trace = open_trace(source, max_decoded_bytes=max_decoded_bytes)
    if trace.metadata.clock is Clock.SESSION_RELATIVE and "provided_session_id" in drop:
        raise UsageError(
            "goodput trace anonymize: --drop provided_session_id: the sessions of this trace share "
            "no clock, so every row needs its session"
        )
    relative_times = relative_times and trace.metadata.clock is Clock.ABSOLUTE
    rows = _AnonymousRows(
        trace,
        secrets.token_bytes(32) if key is None else key,
        drop=drop,
        zero_ns=trace.first_ns if relative_times else 0,
    )
    metadata = _metadata(trace, relative_times=relative_times)
    if metadata.clock is Clock.SESSION_RELATIVE:
        # The new session ids have another order.
        unsorted = out.with_name(f".{out.name}.{secrets.token_hex(4)}.unsorted")
        try:
            num_rows = write_trace(unsorted, rows, metadata, require_order=False)
            sort_trace(unsorted, out, overwrite=overwrite)
        finally:
            unsorted.unlink(missing_ok=True)
    else:
        num_rows = write_trace(out, rows, metadata, overwrite=overwrite)
    return AnonymizeResult(num_rows=num_rows, notes=tuple(rows.notes()))


def _metadata(trace: Trace, *, relative_times: bool) -> TraceMetadata:
    metadata = replace(
        trace.metadata,
        # The source can contain the name of a file or a person.
        source="anonymized trace",
        floored_output_rows=trace.floored_output_rows,
    )
    return replace(metadata, clock=Clock.TRACE_RELATIVE) if relative_times else metadata


class _AnonymousRows:
    """The anonymous rows of a trace; iterate once, then call `notes`."""

    def __init__(self, trace: Trace, key: bytes, *, drop: Collection[str], zero_ns: int) -> None:
        self._trace = trace
        self._key = blake2b(key, digest_size=64).digest()  # BLAKE2b takes at most 64 bytes
        self._zero_ns = zero_ns
        # The prompts of a session repeat the blocks of its earlier prompts.
        self._hash_block = lru_cache(_CACHED_BLOCKS)(partial(self._hash_number, "block"))
        self._dropped: dict[str, Any] = dict.fromkeys((*_TEXTS, *drop))
        if "total_hashes" in drop:
            self._dropped |= {"total_hashes": (), "block_size": None}
        self._texts = self._texts_alone = 0
        self._names: defaultdict[str, set[str]] = defaultdict(set)

    def __iter__(self) -> Iterator[TraceRow]:
        for row in self._trace.rows():
            if any(getattr(row, name) is not None for name in _TEXTS):
                self._texts += 1
                self._texts_alone += row.prompt is not None and not row.total_hashes
            changed: dict[str, Any] = {
                "timestamp_start_unix_ns": row.timestamp_start_unix_ns - self._zero_ns,
                "request_id": self._hash_text("request", row.request_id),
                "parent_request_id": self._hash_optional("request", row.parent_request_id),
                "provided_session_id": self._hash_optional("session", row.provided_session_id),
                "poor_man_session_id": self._hash_session_number(row.poor_man_session_id),
                "org_id": self._hash_optional("org", row.org_id),
                "total_hashes": tuple(map(self._hash_block, row.total_hashes)),
            }
            kept = replace(row, **changed | self._dropped)
            for name in _KEPT_NAMES:
                value = getattr(kept, name)
                if value is not None and len(self._names[name]) <= _SHOWN_NAMES:
                    self._names[name].add(value)
            yield kept

    def notes(self) -> Iterator[str]:
        """Yield sentences for the user about lost and kept values."""
        if licence := self._trace.metadata.licence:
            yield f"the licence was kept: {licence}"
        if self._texts:
            yield f"the texts of {self._texts:,} rows were removed"
        if self._texts_alone:
            yield (
                f"{self._texts_alone:,} of these rows have no hashes; which prompts share a prefix "
                "is lost for them"
            )
        for name, values in self._names.items():
            shown = sorted(values)[:_SHOWN_NAMES]
            more = ", …" if len(values) > _SHOWN_NAMES else ""
            yield (
                f"{name} was kept: {', '.join(shown)}{more}; leave the column out with "
                f"--drop {name}"
            )

    def _hash_optional(self, kind: str, text: str | None) -> str | None:
        return None if text is None else self._hash_text(kind, text)

    def _hash_text(self, kind: str, text: str) -> str:
        return self._digest(kind, text.encode("utf-8", "surrogatepass"), _ID_BYTES).hex()

    def _hash_session_number(self, number: int | None) -> int | None:
        return None if number is None else self._hash_number("session", number)

    def _hash_number(self, kind: str, number: int) -> int:
        """Hash an int64 to a number from 0 to 2⁶³ − 1."""
        digest = self._digest(kind, number.to_bytes(8, "little", signed=True), 8)
        return int.from_bytes(digest, "little") >> 1

    def _digest(self, kind: str, value: bytes, size: int) -> bytes:
        person = kind.encode()
        return blake2b(value, digest_size=size, key=self._key, person=person).digest()
