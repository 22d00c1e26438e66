"""The sessions and single requests of a trace, in bounded memory.

A unit is a session, or a request without one. Units are chosen by a hash of their id: all of them
if they have at most 200,000 requests, otherwise a share that is halved until they fit. The choice
does not depend on the order of rows, and a session is chosen completely or not at all.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

from goodput_traces.format.schema import TraceRow
from goodput_traces.synthesis.prefixes import MAX_TURNS_BACK, PrefixLink, shared_blocks

__all__ = ["TraceUnit", "UnitRequest", "UnitSample"]

_MAX_TURNS: Final = 200_000
_MAX_SESSION: Final = 4_096
_MAX_TAIL_BLOCKS: Final = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRequest:
    """One request of a unit.

    Args:
        row: the row without text, hashes and recorded outcomes.
        blocks: number of hashes of the row.
        link: blocks that the row shares with rows of other units.
        back: number of turns to the one with which it shares `back_blocks` blocks; 0 if it shares
            more with another unit, or nothing.
        back_blocks: number of blocks shared with that turn.
        has_parent: True if the source states that the turn before this one is its parent.
    """

    row: TraceRow
    blocks: int
    link: PrefixLink
    back: int = 0
    back_blocks: int = 0
    has_parent: bool = False


@dataclass(slots=True, kw_only=True)
class TraceUnit:
    """A session, or a request without one."""

    is_session: bool
    turns: list[UnitRequest] = field(default_factory=list)

    @property
    def start_ns(self) -> int:
        """Arrival of the first turn."""
        return self.turns[0].row.timestamp_start_unix_ns

    @property
    def length_ns(self) -> int:
        """Time from the first turn to the last."""
        return self.turns[-1].row.timestamp_start_unix_ns - self.start_ns


class UnitSample:
    """Collect units from the rows of a trace.

    Args:
        max_turns: maximum number of requests in the chosen units.

    Attributes:
        share: share of all units that is chosen.
    """

    def __init__(self, max_turns: int = _MAX_TURNS) -> None:
        self.share = 1.0
        self._max_turns = max_turns
        self._turns = 0
        self._units: dict[int, TraceUnit] = {}
        # Hashes and id of the latest turns of each session, the latest first.
        self._tails: OrderedDict[int, list[tuple[str, tuple[int, ...]]]] = OrderedDict()
        self._tail_blocks = 0

    @property
    def units(self) -> list[TraceUnit]:
        """The chosen units, in order of their start."""
        return sorted(self._units.values(), key=lambda unit: unit.start_ns)

    def add(self, row: TraceRow, link: PrefixLink) -> None:
        """Add a row; the rows of a session must be in order of arrival."""
        session = row.session_id
        name = f"row/{row.request_id}" if session is None else f"session/{session}"
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        if key >= self.share * 2.0**64:
            return
        unit = self._units.get(key)
        if unit is None:
            unit = self._units[key] = TraceUnit(is_session=session is not None)
        elif len(unit.turns) >= _MAX_SESSION:
            return
        turn = UnitRequest(row=_strip(row), blocks=len(row.total_hashes), link=link)
        if session is not None:
            turn = self._link_turn(key, row, turn)
        unit.turns.append(turn)
        self._turns += 1
        while self._turns > self._max_turns and len(self._units) > 1:
            self._halve()

    def _link_turn(self, key: int, row: TraceRow, turn: UnitRequest) -> UnitRequest:
        """Compare a request with the latest ones of its session."""
        tail = self._tails.pop(key, [])
        self._tail_blocks -= sum(len(blocks) for _, blocks in tail)
        best, back = 0, 0
        for distance, (_, blocks) in enumerate(tail, start=1):
            shared = shared_blocks(blocks, row.total_hashes)
            if shared > best:
                best, back = shared, distance
        if best >= turn.link.blocks > 0:
            turn = replace(turn, back=back, back_blocks=best)
        if tail and row.parent_request_id == tail[0][0]:
            turn = replace(turn, has_parent=True)
        tail = [(row.request_id, row.total_hashes), *tail[: MAX_TURNS_BACK - 1]]
        self._tails[key] = tail
        self._tail_blocks += sum(len(blocks) for _, blocks in tail)
        while self._tail_blocks > _MAX_TAIL_BLOCKS and len(self._tails) > 1:
            _, oldest = self._tails.popitem(last=False)
            self._tail_blocks -= sum(len(blocks) for _, blocks in oldest)
        return turn

    def _halve(self) -> None:
        self.share /= 2
        limit = self.share * 2.0**64
        self._units = {key: unit for key, unit in self._units.items() if key < limit}
        self._turns = sum(len(unit.turns) for unit in self._units.values())
        for key in [key for key in self._tails if key >= limit]:
            self._tail_blocks -= sum(len(blocks) for _, blocks in self._tails.pop(key))


def _strip(row: TraceRow) -> TraceRow:
    """Return the row without values that a synthetic row must not have, or that it gets anew."""
    return replace(
        row,
        request_id="",
        prompt=None,
        output_text=None,
        org_id=None,
        total_hashes=(),
        provided_session_id=None,
        poor_man_session_id=None,
        parent_request_id=None,
        duration_ttft_ms=None,
        duration_e2e_ms=None,
    )
