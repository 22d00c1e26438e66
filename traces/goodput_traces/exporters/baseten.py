"""AIPerf's `baseten_trace` Parquet: our own columns, with the `prompt` that AIPerf requires.

Rows without text get words: one common short word per token, which most tokenizers keep as one
token each, the same words for the same hash, so shared prefixes stay shared. Our own columns
and metadata stay in the file; AIPerf ignores them, and an import finds them again.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import shake_128
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS
from goodput_traces.writer import write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from goodput_traces.reader import Trace
    from goodput_traces.row import TraceRow

__all__ = ["BasetenExport"]

_WORDS: Final = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
    "what",
    "all",
    "were",
    "when",
    "we",
    "there",
    "can",
    "an",
    "your",
    "which",
    "their",
    "said",
    "if",
    "do",
    "will",
    "each",
    "about",
    "how",
    "up",
    "out",
    "them",
    "then",
    "she",
    "many",
    "some",
    "so",
    "these",
    "would",
    "other",
    "into",
    "has",
    "more",
    "her",
    "two",
    "like",
    "him",
    "see",
)


class BasetenExport:
    """One export; `write`, then `notes`."""

    name = "baseten"
    summary = "AIPerf's baseten_trace Parquet, prompts filled in"

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._filled = self._rounded = 0

    def write(self, out: Path, *, overwrite: bool) -> int:
        """Write the file and return the number of rows.

        Raises:
            TraceError: the trace cannot be read, or the file not be written.
        """
        return write_trace(out, self._rows(), self._trace.metadata, overwrite=overwrite)

    def notes(self) -> list[str]:
        """What was lost or made up."""
        notes = []
        if self._rounded:
            notes.append(
                f"AIPerf reads milliseconds: {self._rounded:,} arrivals lose their fraction there "
                "(the nanosecond column is kept)"
            )
        if self._filled:
            notes.append(
                f"{self._filled:,} prompts are made-up words, one per token; a tokenizer may "
                "count them a little differently"
            )
        return notes

    def _rows(self) -> Iterator[TraceRow]:
        for row in self._trace.rows():
            self._rounded += row.timestamp_start_unix_ns % NS_PER_MS != 0
            if row.prompt is None:
                self._filled += 1
                yield replace(row, prompt=_prompt(row))
            else:
                yield row


def _prompt(row: TraceRow) -> str:
    words: list[str] = []
    block = row.block_size or 0
    for block_hash in row.total_hashes:
        words += _words(f"block/{block_hash}", min(block, row.input_tokens - len(words)))
    words += _words(f"tail/{row.request_id}", row.input_tokens - len(words))
    return " ".join(words)


def _words(key: str, count: int) -> list[str]:
    return [_WORDS[byte & 63] for byte in shake_128(key.encode()).digest(max(0, count))]
