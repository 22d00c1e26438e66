"""Export to Mooncake's JSON lines, as AIPerf's `mooncake_trace` reads them.

AIPerf requires one hash per block of the prompt, including a partial last block. If a trace has
hashes of full blocks only, each last block gets a unique hash.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from goodput_core.units import NS_PER_MS
from goodput_traces.errors import TraceError
from goodput_traces.format.schema import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_traces.format.reader import Trace
    from goodput_traces.format.schema import TraceRow

__all__ = ["MooncakeExport"]

_DEFAULT_BLOCK: Final = 512


class MooncakeExport:
    """One export: exhaust `lines`, then call `notes`."""

    name = "mooncake"
    summary = "Mooncake and AIPerf JSON lines: timestamp (ms), input_length, output_length, …"

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._block: int | None = None
        self._rounded = self._texts = self._tails = self._cut = 0
        # With milliseconds since 1970, a replay would send the first request after 50 years.
        self._zero_ns = trace.first_ns if trace.metadata.clock is Clock.ABSOLUTE else 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the file's JSON objects, one per row.

        Raises:
            TraceError: the trace cannot be read, or has blocks of two sizes.
        """
        for number, row in enumerate(self._trace.rows(), start=1):
            yield self._line(row, number)

    def notes(self) -> list[str]:
        """Return sentences for the user about lost or changed values."""
        notes = [
            "the format has no request ids, classes, targets or recorded outcomes; they are lost"
        ]
        if self._zero_ns:
            notes.append("timestamps count from the first arrival; the wall clock is lost")
        if self._rounded:
            notes.append(f"{self._rounded:,} timestamps were rounded down to milliseconds")
        if self._texts:
            notes.append(f"{self._texts:,} prompts were reduced to their length and hashes")
        if self._tails:
            notes.append(f"{self._tails:,} rows got unique hashes for blocks without a hash")
        if self._cut:
            notes.append(f"{self._cut:,} rows lost the hashes beyond their prompt's blocks")
        if self._block not in (None, _DEFAULT_BLOCK):
            notes.append(
                f"hashes cover {self._block} tokens: give AIPerf --isl-block-size {self._block}, "
                f"and `goodput trace import` --block-size {self._block}"
            )
        return notes

    def _line(self, row: TraceRow, number: int) -> dict[str, Any]:
        since_ns = row.timestamp_start_unix_ns - self._zero_ns
        self._rounded += since_ns % NS_PER_MS != 0
        self._texts += row.prompt is not None
        line: dict[str, Any] = {
            "timestamp": since_ns // NS_PER_MS,
            "input_length": row.input_tokens,
            "output_length": row.output_tokens,
        }
        if row.total_hashes:
            line["hash_ids"] = self._hashes(row, number)
        if row.session_id is not None:
            line["session_id"] = row.session_id
        if row.delay_ms is not None:
            line["delay"] = row.delay_ms
        if row.priority is not None:
            line["priority"] = row.priority
        return line

    def _hashes(self, row: TraceRow, number: int) -> list[int]:
        block = row.block_size or _DEFAULT_BLOCK
        if self._block not in (None, block):
            raise TraceError(
                self._trace.path,
                f"row {number} has blocks of {block} tokens, rows before it of {self._block}; "
                "Mooncake's format has one size per file",
            )
        self._block = block
        blocks = -(-row.input_tokens // block)
        hashes = list(row.total_hashes[:blocks])
        self._cut += len(row.total_hashes) > blocks
        if len(hashes) < blocks:
            self._tails += 1
            hashes += [_unique_hash(row.request_id, at) for at in range(len(hashes), blocks)]
        return hashes


def _unique_hash(request_id: str, block: int) -> int:
    digest = blake2b(f"{request_id}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
