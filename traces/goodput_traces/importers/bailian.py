"""Import the usage traces of Alibaba's Bailian service (Qwen): JSON lines with chats and blocks.

Source: Wang et al., "KVCache Cache in the Wild", ATC 2025; github.com/alibaba-edu/
qwen-bailian-usagetraces-anon. `timestamp` is in seconds since the start. Each entry of `hash_ids`
identifies a block of 16 tokens, the last of which may be partial. A request names the request
before it in `parent_chat_id`; the first request of a session has -1.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

from goodput_traces.importers.column_map import ARRIVAL, SourceColumn
from goodput_traces.importers.log import FixedLogImporter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from goodput_traces.format.schema import TraceRow
    from goodput_traces.importers.base import ImportOptions
    from goodput_traces.importers.record import Record

__all__ = ["BailianImporter"]

_ROOT: Final = "-1"
# Chats whose session is remembered; a follow-up of an older chat starts a session of its own.
_MAX_CHATS: Final = 1_000_000


class BailianImporter(FixedLogImporter):
    """Importer of Bailian's JSON lines."""

    name: ClassVar[str] = "bailian"
    summary: ClassVar[str] = "Alibaba Bailian (Qwen): chat_id, parent_chat_id, hash_ids (untried)"
    required_columns: ClassVar[frozenset[str]] = frozenset(
        {"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"}
    )
    id_column: ClassVar[str] = "chat_id"
    read_columns = required_columns | {"type", "turn", "hash_ids"}
    sources: ClassVar[Mapping[str, SourceColumn]] = {
        ARRIVAL: SourceColumn(names=("timestamp",), unit="s"),
        "input_tokens": SourceColumn(names=("input_length",)),
        "output_tokens": SourceColumn(names=("output_length",)),
        "request_id": SourceColumn(names=("chat_id",)),
        "parent_request_id": SourceColumn(names=("parent_chat_id",)),
        "turn": SourceColumn(names=("turn",)),
        "request_type": SourceColumn(names=("type",)),
        "total_hashes": SourceColumn(names=("hash_ids",)),
    }
    default_block_size: ClassVar[int | None] = 16
    untried: ClassVar[bool] = True

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def convert_values(self, record: Record) -> Iterator[TraceRow]:
        """Convert a record to one request, in the session of its parent."""
        for row in super().convert_values(record):
            parent = row.parent_request_id
            if parent is None or parent == _ROOT:
                known, session = False, row.request_id
            else:  # if the parent is unknown, the trace starts within the session
                known, session = parent in self._sessions, self._sessions.get(parent, parent)
            self._sessions[row.request_id] = session
            if len(self._sessions) > _MAX_CHATS:
                self._sessions.popitem(last=False)
            yield replace(
                row,
                provided_session_id=session,
                parent_request_id=parent if known else None,
                turn=None if row.turn is None else max(0, row.turn - 1),  # they count from 1
            )
