"""Export to AIPerf's `baseten_trace` Parquet, which requires a prompt in every row.

A row without text gets one common short word per token, which most tokenizers encode as one
token each. Equal hashes get equal words, so shared prefixes stay shared. All columns and the
metadata of a trace stay in the file: AIPerf ignores unknown columns, and an import restores them.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import shake_128
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_traces.format.reader import Trace
    from goodput_traces.format.schema import TraceRow

__all__ = ["BasetenExport"]

_WORDS: Final = """
the of and to in is that it was for on are as
with his they at be this from have or by one had not
but what all were when we there can an your which their said
if do will each about how up out them then she many some
so these would other into has more her two like him see
""".split()  # noqa: SIM905 - one word a line would be a page


class BasetenExport:
    """One export: exhaust `rows`, then call `notes`."""

    name = "baseten"
    summary = "AIPerf's baseten_trace Parquet, prompts filled in"

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._rows_filled = self._rows_rounded = 0

    def rows(self) -> Iterator[TraceRow]:
        """Yield the trace's rows, each with a prompt."""
        for row in self._trace.rows():
            self._rows_rounded += row.timestamp_start_unix_ns % NS_PER_MS != 0
            if row.prompt is None:
                self._rows_filled += 1
                yield replace(row, prompt=_make_prompt(row))
            else:
                yield row

    def notes(self) -> list[str]:
        """Return sentences for the user about lost or generated values."""
        notes = []
        if self._rows_rounded:
            notes.append(
                f"AIPerf reads milliseconds: it rounds {self._rows_rounded:,} arrivals down "
                "(the file keeps the nanosecond column)"
            )
        if self._rows_filled:
            notes.append(
                f"{self._rows_filled:,} prompts were generated with one word per token; "
                "a tokenizer may count slightly more or fewer tokens"
            )
        return notes


def _make_prompt(row: TraceRow) -> str:
    words: list[str] = []
    block_size = row.block_size or 0
    for block_hash in row.total_hashes:
        count = min(block_size, row.input_tokens - len(words))
        words += _make_words(f"block/{block_hash}", count)
    words += _make_words(f"tail/{row.request_id}", row.input_tokens - len(words))
    return " ".join(words)


def _make_words(key: str, count: int) -> list[str]:
    return [_WORDS[byte & 63] for byte in shake_128(key.encode()).digest(max(0, count))]
