"""Shared prefixes: find them in the rows of a trace, and draw similar ones for synthetic rows.

Hashes identify a block together with all blocks before it. The blocks of a prompt that were seen
before are therefore its first ones, and every row has one link: the number of its blocks that were
seen before, and the latest row that has them. A synthetic row repeats as many blocks of a synthetic
row that precedes it by about the same time, or by the same number of turns in the same session.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_traces.format.schema import TraceRow

__all__ = [
    "MAX_TURNS_BACK",
    "KnownPrompt",
    "PrefixLink",
    "PrefixObserver",
    "PromptHistory",
    "shared_blocks",
]

MAX_TURNS_BACK: Final = 8
"""Turns of a session that are compared with the next one."""
_MAX_OBSERVED: Final = 1_000_000
_MAX_ROWS: Final = 65_536
_MAX_BLOCKS: Final = 4_000_000
_MAX_TRIED: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLink:
    """The repeated blocks of a row.

    Args:
        blocks: number of the row's first blocks that were seen before.
        lag_ns: time since the latest row that has them.
        last_block: hash of the last of these blocks, which identifies all of them; None if no block
            was seen before.
    """

    blocks: int = 0
    lag_ns: int = 0
    last_block: int | None = None


class PrefixObserver:
    """Find the repeated blocks of each row.

    The latest one to two million blocks are remembered; older ones count as new.
    """

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}  # block → latest arrival
        self._older: dict[int, int] = {}

    def observe(self, row: TraceRow) -> PrefixLink:
        """Return the link of a row, and remember its blocks."""
        hashes, now_ns = row.total_hashes, row.timestamp_start_unix_ns
        if not hashes:
            return PrefixLink()
        # A block can only be known if all blocks before it are.
        known = bisect_left(hashes, True, key=lambda block: not self._is_known(block))
        link = PrefixLink()
        if known:
            last = hashes[known - 1]
            latest_ns = self._recent[last] if last in self._recent else self._older[last]
            # The lag has no meaning if sessions share no clock, and can then be negative.
            link = PrefixLink(blocks=known, lag_ns=max(0, now_ns - latest_ns), last_block=last)
        self._recent.update(dict.fromkeys(hashes, now_ns))
        if len(self._recent) > _MAX_OBSERVED:
            self._older, self._recent = self._recent, {}
        return link

    def _is_known(self, block: int) -> bool:
        return block in self._recent or block in self._older


def shared_blocks(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of blocks that two prompts share."""
    return bisect_left(
        range(min(len(first), len(second))), True, key=lambda at: first[at] != second[at]
    )


@dataclass(slots=True, kw_only=True)
class KnownPrompt:
    """Blocks of an earlier synthetic row.

    Args:
        arrival_ns: arrival of the row.
        blocks: the blocks.
        repeated: number of its first blocks that a later row repeated.
    """

    arrival_ns: int
    blocks: tuple[int, ...]
    repeated: int = 0

    def repeat(self, count: int) -> tuple[int, ...]:
        """Return the first blocks for a later row."""
        self.repeated = max(self.repeated, min(count, len(self.blocks)))
        return self.blocks[:count]


class PromptHistory:
    """The latest synthetic rows, and numbers for new blocks.

    Consecutive numbers are used as hashes, because random numbers do not compress.
    """

    def __init__(self) -> None:
        self._next = 1
        self._prompts: list[KnownPrompt] = []
        self._first = 0  # earlier ones are forgotten
        self._blocks = 0
        self._popular: dict[int, tuple[int, ...]] = {}

    def add(self, arrival_ns: int, prefix: tuple[int, ...], count: int) -> KnownPrompt:
        """Add a row whose `count` blocks begin with a prefix; the other blocks are new.

        Rows must be added in order of arrival.
        """
        blocks = prefix[:count] + self._new_blocks(count - len(prefix))
        prompt = KnownPrompt(arrival_ns=arrival_ns, blocks=blocks)
        self._prompts.append(prompt)
        self._blocks += count
        while len(self._prompts) - self._first > _MAX_ROWS or self._blocks > _MAX_BLOCKS:
            self._blocks -= len(self._prompts[self._first].blocks)
            self._first += 1
        if self._first > _MAX_ROWS:
            del self._prompts[: self._first]
            self._first = 0
        return prompt

    def popular_prefix(self, last_block: int, count: int) -> tuple[int, ...]:
        """Return the blocks that stand for a popular beginning of the source.

        Args:
            last_block: hash of the last block of the beginning, in the source.
            count: number of its blocks.
        """
        if last_block not in self._popular:
            self._popular[last_block] = self._new_blocks(count)
        return self._popular[last_block]

    def find_prefix(self, arrival_ns: int, count: int) -> tuple[int, ...]:
        """Return the first `count` blocks of a row that arrived at about a time.

        The nearest row is used whose blocks were not repeated since. If there is none, another row
        with so many blocks is used, or the one with the most blocks.
        """
        if not count or self._first == len(self._prompts):
            return ()
        middle = bisect_left(
            self._prompts, arrival_ns, lo=self._first, key=lambda prompt: prompt.arrival_ns
        )
        best = self._prompts[min(middle, len(self._prompts) - 1)]
        for distance in range(_MAX_TRIED):
            for at in (middle - distance, middle + distance):
                if not self._first <= at < len(self._prompts):
                    continue
                prompt = self._prompts[at]
                if len(prompt.blocks) >= count > prompt.repeated:
                    return prompt.repeat(count)
                if len(best.blocks) < min(count, len(prompt.blocks)):
                    best = prompt
        return best.repeat(count)

    def _new_blocks(self, count: int) -> tuple[int, ...]:
        start = self._next
        self._next += max(0, count)
        return tuple(range(start, self._next))
