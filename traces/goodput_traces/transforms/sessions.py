"""Start the sessions of a trace whose sessions share no clock.

Such a trace has the times within each session, and no times between sessions. A replay therefore
chooses when each session starts, and says so. The starts are a Poisson process with a given rate,
independent of responses. Within a session, the recorded times stay.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import count, groupby
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_traces.format.schema import TraceRow

__all__ = ["SessionArrivals", "parse_session_arrivals", "start_sessions"]

_TEXT: Final = re.compile(r"poisson:(\d{1,6}(?:\.\d{1,9})?)/(s|min|h)", re.ASCII)
_SECONDS: Final = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionArrivals:
    """Sessions start as a Poisson process.

    Args:
        rate_per_s: mean number of sessions that start per second, above 0.
        text: the process as on the command line.
    """

    rate_per_s: Fraction
    text: str


def parse_session_arrivals(text: str) -> SessionArrivals:
    """Parse `poisson:0.2/s`, `poisson:6/min` or `poisson:90/h`.

    Raises:
        ValueError: the text is not such a process.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None or not Fraction(match[1]):
        raise ValueError(
            f"{text!r} is not a process of session starts; write, for example, poisson:0.2/s, "
            "poisson:6/min or poisson:90/h"
        )
    return SessionArrivals(rate_per_s=Fraction(match[1]) / _SECONDS[match[2]], text=text.strip())


def start_sessions(
    rows: Iterable[TraceRow], arrivals: SessionArrivals, *, seed: int
) -> Iterator[TraceRow]:
    """Yield the rows in the order of arrival, on one clock that starts at 0.

    Sessions start in the order of the trace. Only the rows of sessions that have started and are
    not yet complete are kept in memory.

    Args:
        rows: rows by session, and by time within each session.
        arrivals: the process of session starts.
        seed: seed of the starts.
    """
    rng = random.Random(f"{seed}/sessions")
    rate_per_ns = float(arrivals.rate_per_s) / NS_PER_S
    pending: list[tuple[int, int, TraceRow]] = []
    order = count()
    start_ns = 0
    for _, session in groupby(rows, key=lambda row: row.session_id):
        start_ns += round(rng.expovariate(rate_per_ns))
        while pending and pending[0][0] < start_ns:
            yield heappop(pending)[2]
        for row in session:
            at_ns = start_ns + row.timestamp_start_unix_ns
            heappush(pending, (at_ns, next(order), replace(row, timestamp_start_unix_ns=at_ns)))
    while pending:
        yield heappop(pending)[2]
