"""More or fewer requests with the trace's bursts preserved: timestamps are never touched.

Dividing timestamps would turn a 40-second burst into a 20-second one; here a burst keeps its
length and grows or shrinks in height. Above 1, rows get copies at the same instant; below 1,
whole sessions are dropped.

One number per session (or per row that has none), drawn from its id and the seed, decides for
every scale: instance `k` of it exists when that number is below `scale − k`. So what is chosen
at 0.3 is chosen at 0.5, has its copy at 1.3 and 1.5, and nothing depends on where a window
starts.

Source: Sajal et al., "TraceUpscaler", EuroSys 2024, on why scaled timestamps distort a trace.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from fractions import Fraction

    from goodput_traces.format.schema import TraceRow

__all__ = ["scale_rate"]

_DRAW_BITS: Final = 64
_HASH_MASK: Final = (1 << 63) - 1


def scale_rate(rows: Iterable[TraceRow], scale: Fraction, *, seed: int) -> Iterator[TraceRow]:
    """Scale the number of requests by about `scale`.

    A copy has a fresh request id, session and parent (`id~1`, `id~2` …), keeps the original's
    instant and follows it directly. Its hashes are salted: copies share prefixes among
    themselves exactly as the originals do, and nothing with the originals. It carries no
    prompt text, which would hit the original's cache: lengths and hashes stand for it.

    Args:
        rows: in order of arrival.
        scale: how many instances of each request there are on average.
        seed: chooses which; equal seeds choose nested sets across scales.
    """
    if scale == 1:
        yield from rows
        return
    copies = ceil(scale)
    salts = [_salt(seed, copy) for copy in range(copies)]
    # `draw / 2**64 < scale - k` in integers, exact.
    limits = [(scale - k) * (1 << _DRAW_BITS) for k in range(copies)]
    for row in rows:
        draw = _draw(seed, row)
        for copy in range(copies):
            if draw >= limits[copy]:
                break
            yield row if copy == 0 else _copy(row, copy, salts[copy])


def _draw(seed: int, row: TraceRow) -> int:
    session = row.session_id
    key = f"{seed}/row/{row.request_id}" if session is None else f"{seed}/session/{session}"
    return _number(key, _DRAW_BITS)


def _salt(seed: int, copy: int) -> int:
    return _number(f"{seed}/salt/{copy}", _DRAW_BITS) & _HASH_MASK


def _number(key: str, bits: int) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=bits // 8).digest(), "little")


def _copy(row: TraceRow, copy: int, salt: int) -> TraceRow:
    session = row.session_id
    parent = row.parent_request_id
    return replace(
        row,
        request_id=f"{row.request_id}~{copy}",
        provided_session_id=None if session is None else f"{session}~{copy}",
        poor_man_session_id=None,
        parent_request_id=None if parent is None else f"{parent}~{copy}",
        prompt=None,
        # Exclusive-or is one-to-one: equal stays equal, different stays different.
        total_hashes=tuple(block ^ salt for block in row.total_hashes),
    )
