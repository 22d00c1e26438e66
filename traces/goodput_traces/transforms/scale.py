"""Scale the number of requests with unchanged timestamps, so that bursts keep their length.

Halving timestamps would double the rate, but also shorten a burst of 40 seconds to 20 seconds. A
scale of 2 doubles the height of the burst instead. Above 1, rows are copied with the same
timestamp. Below 1, complete sessions are dropped.

For each session (or row without a session), one number from 0 to 1 is drawn from its id and the
seed. Instance `k` of the session exists if the number is below `scale − k`. A session kept at 0.3
is therefore also kept at 0.5 and copied at 1.3 and 1.5, for any window.

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

    A copy follows the original with the same arrival and a new request id, session and parent
    (`id~1`, `id~2` …). Its hashes are salted: copies share prefixes with each other exactly as
    their originals do, and share none with the originals. A copy has no prompt text, because the
    same text would share its prefix with the original.

    Args:
        rows: rows in order of arrival.
        scale: mean number of instances of each request.
        seed: selects the instances. With the same seed, a larger scale selects all instances of
            a smaller one.
    """
    if scale == 1:
        yield from rows
        return
    copies = ceil(scale)
    salts = [_make_salt(seed, copy) for copy in range(copies)]
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
    return _hash_number(key, _DRAW_BITS)


def _make_salt(seed: int, copy: int) -> int:
    return _hash_number(f"{seed}/salt/{copy}", _DRAW_BITS) & _HASH_MASK


def _hash_number(key: str, bits: int) -> int:
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
        # Exclusive-or is one-to-one: salted hashes are equal if and only if the hashes are equal.
        total_hashes=tuple(block ^ salt for block in row.total_hashes),
    )
