"""Export to Mooncake's JSON lines, as AIPerf's `mooncake_trace` reads them.

In a row with hashes, AIPerf requires one hash per block of the prompt. Blocks without a hash, such
as the partial last block of a prompt, get unique hashes.
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

_DEFAULT_BLOCK_SIZE: Final = 512
_DROPPED: Final = (
    "max_output_tokens",
    "turn",
    "parent_request_id",
    "slo_class",
    "ttft_target_ms",
    "tpot_target_ms",
    "e2e_target_ms",
    "request_canceled",
    "cancel_after_ms",
    "duration_ttft_ms",
    "duration_e2e_ms",
    "model_name",
    "org_id",
    "request_type",
    "output_text",
)


class MooncakeExport:
    """One export: exhaust `lines`, then call `notes`."""

    name = "mooncake"
    summary = "Mooncake and AIPerf JSON lines: timestamp (ms), input_length, output_length, …"

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._block_size: int | None = None
        self._rows_rounded = self._rows_without_text = self._rows_filled = self._rows_cut = 0
        self._dropped: set[str] = set()
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
        dropped = ", ".join(["request_id", *(n for n in _DROPPED if n in self._dropped)])
        notes = [f"the format has no place for these columns, which are lost: {dropped}"]
        if self._zero_ns:
            notes.append("timestamps count from the first arrival; the wall clock is lost")
        if self._rows_rounded:
            notes.append(f"{self._rows_rounded:,} timestamps were rounded down to milliseconds")
        if self._rows_without_text:
            notes.append(
                f"{self._rows_without_text:,} prompts were reduced to their length and hashes"
            )
        if self._rows_filled:
            notes.append(f"{self._rows_filled:,} rows got unique hashes for blocks without a hash")
        if self._rows_cut:
            notes.append(f"{self._rows_cut:,} rows lost the hashes beyond their prompt's blocks")
        if self._block_size not in (None, _DEFAULT_BLOCK_SIZE):
            notes.append(
                f"each hash covers {self._block_size} tokens: use --isl-block-size "
                f"{self._block_size} with AIPerf and --block-size {self._block_size} with "
                "`goodput trace import`"
            )
        return notes

    def _line(self, row: TraceRow, number: int) -> dict[str, Any]:
        since_ns = row.timestamp_start_unix_ns - self._zero_ns
        self._rows_rounded += since_ns % NS_PER_MS != 0
        self._rows_without_text += row.prompt is not None
        self._dropped.update(name for name in _DROPPED if getattr(row, name) is not None)
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
        block_size = row.block_size or _DEFAULT_BLOCK_SIZE
        if self._block_size not in (None, block_size):
            raise TraceError(
                self._trace.path,
                f"row {number} has blocks of {block_size} tokens, but earlier rows have blocks of "
                f"{self._block_size}; Mooncake's format allows one block size per file",
            )
        self._block_size = block_size
        blocks = -(-row.input_tokens // block_size)
        hashes = list(row.total_hashes[:blocks])
        self._rows_cut += len(row.total_hashes) > blocks
        if len(hashes) < blocks:
            self._rows_filled += 1
            hashes += [_unique_hash(row.request_id, index) for index in range(len(hashes), blocks)]
        return hashes


def _unique_hash(request_id: str, index: int) -> int:
    digest = blake2b(f"{request_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
