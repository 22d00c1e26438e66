"""Import Weka's coding-agent sessions: one session per line, each with its own clock.

Source: kv-cache-tester (Callan Fox). The time `t` of a request is in seconds since the session's
start; `api_time`, `think_time` and `ttft` are durations in seconds; lengths are in tokens. Hashes
cover full blocks of 64 tokens and are comparable only within a session. Entries of type `subagent`
are markers that contain requests; the times of these requests count from the time of the marker.

Subagents work beside the main agent. A request follows the previous request of its own agent, and
the first one of a subagent follows that of the main agent. `think_time` counts from the last
response of the same agent that has an `api_time`. It is therefore dropped if that response is not
the one that the request follows.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar, Final

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_traces.format.schema import Clock, HashSemantics, TraceRow
from goodput_traces.importers.base import Importer, ImportOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_traces.importers.record import Record

__all__ = ["WekaImporter"]

_MAX_REQUESTS: Final = 1_000_000


class WekaImporter(Importer):
    """Importer of Weka's JSON lines: one session per line."""

    name = "weka"
    summary = "Weka coding-agent sessions: id, block_size, requests (one session per line)"
    required_columns: ClassVar[frozenset[str]] = frozenset({"id", "block_size", "requests"})
    ordered_by = "id"
    clock: ClassVar[Clock] = Clock.SESSION_RELATIVE
    id_column: ClassVar[str] = "id"
    several_files: ClassVar[bool] = True
    read_columns = required_columns | {
        "models",
        "hash_id_scope",
        "tool_tokens",
        "system_tokens",
        "totals",
    }

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self.resolution_ns = NS_PER_S
        self.hash_semantics = HashSemantics.FULL_BLOCKS
        self._markers = 0
        self._tick_ns = 0

    def convert(self, record: Record) -> Iterator[TraceRow]:
        """Convert a session to its requests in order of time; ties keep the order of the source."""
        session = record.optional_text("id", "provided_session_id")
        if not session:
            record.reject("id", "the session has no id; give every session an id")
        if record.namespace:
            session = f"{record.namespace}/{session}"
        block_size = record.integer("block_size", "block_size")
        requests = _get_list(record, "requests")
        flat = sorted(self._flatten(record, requests), key=lambda item: item[0])
        salt = _session_salt(session)
        latest: dict[str | None, TraceRow] = {}
        for turn, (arrival_ns, agent, request) in enumerate(flat):
            self._tick_ns = gcd(self._tick_ns, arrival_ns)
            self.resolution_ns = self._tick_ns or NS_PER_S
            row = self._row(
                session, turn, arrival_ns, agent, request, salt=salt, block_size=block_size
            )
            before = latest.get(agent) or latest.get(None)
            if before is not None:
                counts = agent in latest and before.duration_e2e_ms is not None
                row = replace(
                    row,
                    parent_request_id=before.request_id,
                    delay_ms=row.delay_ms if counts else None,
                )
            latest[agent] = row
            yield row

    def notes(self) -> list[str]:
        """Return the notes of every importer, and notes about markers and the clock."""
        notes = super().notes()
        if self._markers:
            notes.append(
                f"{self._markers:,} subagent markers were replaced with the requests nested in them"
            )
        notes.append("sessions share no clock: a replay of this trace needs --session-arrivals")
        return notes

    def _flatten(
        self, record: Record, requests: list[Any]
    ) -> Iterator[tuple[int, str | None, Record]]:
        for at, values in enumerate(requests):
            request = record.nested(f"requests[{at}]", values)
            start_ns = request.time_ns("t")
            if values.get("type") != "subagent":
                yield start_ns, None, request
                continue
            self._markers += 1
            agent = request.optional_text("agent_id", "request_type") or f"agent-{at}"
            for child_at, child_values in enumerate(_get_list(request, "requests")):
                child = request.nested(f"requests[{child_at}]", child_values)
                # Times of nested requests count from the time of the marker: in the published
                # trace, the first request in each of the 25 markers has the time 0.0.
                yield start_ns + child.time_ns("t"), agent, child

    def _row(
        self,
        session: str,
        turn: int,
        arrival_ns: int,
        agent: str | None,
        request: Record,
        *,
        salt: int,
        block_size: int,
    ) -> TraceRow:
        prompt_tokens = request.integer("in", "input_tokens")
        hashes = request.hashes("hash_ids")
        if len(hashes) > -(-prompt_tokens // block_size):
            request.reject(
                "hash_ids",
                f"{len(hashes)} hashes are too many for {prompt_tokens} tokens in blocks of "
                f"{block_size}; correct or remove the record",
            )
        think_ns = request.duration_ns("think_time")
        ttft_ns = request.duration_ns("ttft")
        e2e_ns = request.duration_ns("api_time")
        return TraceRow(
            request_id=f"{session}/{turn:05d}",
            timestamp_start_unix_ns=arrival_ns,
            input_tokens=prompt_tokens,
            output_tokens=self.output_tokens(request, "out"),
            total_hashes=tuple([block_hash ^ salt for block_hash in hashes]),
            block_size=block_size if hashes else None,
            provided_session_id=session,
            turn=turn,
            delay_ms=None if think_ns is None else think_ns / NS_PER_MS,
            duration_ttft_ms=None if ttft_ns is None else round(ttft_ns / NS_PER_MS),
            duration_e2e_ms=None if e2e_ns is None else round(e2e_ns / NS_PER_MS),
            model_name=request.optional_text("model", "model_name"),
            request_type=agent or request.optional_text("type", "request_type"),
        )


def _get_list(record: Record, column: str) -> list[Any]:
    value = record.values.get(column)
    if not isinstance(value, list):
        record.reject(column, "the value is not a list of requests; correct or remove the record")
    if len(value) > _MAX_REQUESTS:
        record.reject(column, f"more than {_MAX_REQUESTS:,} requests; split the session")
    return value


def _session_salt(session: str) -> int:
    """Return a 63-bit salt that makes a session's hashes distinct from those of other sessions.

    Exclusive-or with the salt is one-to-one, so distinct hashes of one session stay distinct.
    """
    return int.from_bytes(blake2b(session.encode(), digest_size=8).digest(), "little") >> 1
