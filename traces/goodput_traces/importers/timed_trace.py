"""Import the `timed_trace` data set of `vllm bench serve`: JSON lines with times in seconds.

Source: the options `--timed-trace-…` of `vllm bench serve`. Its columns are those of Mooncake with
other units, so the format is never recognised and must be named. `--map arrival=timestamp:ms` is
vLLM's `--timed-trace-sec-multiplier 0.001`, and `--block-size` its `--timed-trace-chunk-hash-size`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from goodput_traces.importers.column_map import ARRIVAL, SourceColumn
from goodput_traces.importers.log import FixedLogImporter

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TimedTraceImporter"]


class TimedTraceImporter(FixedLogImporter):
    """Importer of vLLM's timed traces."""

    name: ClassVar[str] = "timed_trace"
    summary: ClassVar[str] = "vLLM's timed_trace: timestamp (s), input_length, … (untried)"
    read_columns = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})
    sources: ClassVar[Mapping[str, SourceColumn]] = {
        ARRIVAL: SourceColumn(names=("timestamp",), unit="s"),
        "input_tokens": SourceColumn(names=("input_length",)),
        "output_tokens": SourceColumn(names=("output_length",)),
        "total_hashes": SourceColumn(names=("hash_ids",)),
    }
    default_block_size: ClassVar[int | None] = 16
    untried: ClassVar[bool] = True

    @classmethod
    def recognises(cls, values: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Return False: the columns are those of Mooncake's format."""
        return False
