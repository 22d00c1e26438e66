"""Signs of overload that a router sees in its streams, without a report from the replicas.

The first is the wait for a first token, which it expects from the streams that have none yet. By
Little's law, a new stream waits for the prompt tokens of such streams divided by the rate at which
they are computed. The rate is measured while some stream waits without a pause, because it would
otherwise be the rate of arrivals. Until it is known, the fastest start of a stream behind others
stands for it, and before that, the age of the oldest waiting stream is the estimate.
"""

from __future__ import annotations

import math
from typing import Final

from goodput_core.units import NS_PER_S

__all__ = ["FirstTokenWait", "TokenPace"]

_BUSY_NS: Final = NS_PER_S
"""Shortest time without a pause from which a rate is measured."""
_LEAST_WAIT_NS: Final = NS_PER_S // 20
"""Streams that start sooner do not wait."""
_VALID_NS: Final = 60 * NS_PER_S
"""Time for which a measured rate is used."""
_NEW: Final = 0.3
"""Weight of a new measurement of the rate."""
_TOKENS_PER_START: Final = 500
"""Prompt tokens that take as long as the start of a stream itself."""
_PACE_NS: Final = NS_PER_S
"""Time constant with which the pace of ended streams is forgotten."""
_VALID_PACE_NS: Final = 5 * NS_PER_S
"""Time for which the pace is used after the last stream."""
_CALM: Final = 0.7
"""Share of the TPOT target up to which slower tokens are no overload."""
_NEARLY_BEST: Final = 1.1
"""The same as a multiple of the fastest pace."""


class FirstTokenWait:
    """The streams without a token, and the wait that a new one can expect."""

    __slots__ = (
        "_best_ns",
        "_best_per_s",
        "_busy_ns",
        "_measured_ns",
        "_per_s",
        "_started",
        "_tokens",
        "_waiting",
    )

    def __init__(self) -> None:
        self._waiting: dict[object, tuple[int, int, int]] = {}
        self._best_per_s = 0.0
        self._best_ns = 0
        self._tokens = 0
        self._busy_ns = 0
        self._started = 0
        self._measured_ns = 0
        self._per_s: float | None = None

    def begin(self, stream: object, prompt_tokens: int, now_ns: int) -> None:
        """Record that a stream is sent to a replica."""
        if not self._waiting:
            self._busy_ns, self._started = now_ns, 0
        tokens = prompt_tokens + _TOKENS_PER_START
        self._tokens += tokens
        self._waiting[stream] = now_ns, tokens, self._tokens

    def end(self, stream: object, now_ns: int, *, started: bool) -> None:
        """Record the first token of a stream, or its end without one; later calls do nothing."""
        began = self._waiting.pop(stream, None)
        if began is None:
            return
        self._tokens -= began[1]
        if started:
            self._started += began[1]
            self._note_wait(began[2], now_ns - began[0], now_ns)
        busy_ns = now_ns - self._busy_ns
        if busy_ns < _BUSY_NS:
            return
        per_s = self._started * NS_PER_S / busy_ns
        old = self._rate(now_ns)
        self._per_s = per_s if old is None else old + _NEW * (per_s - old)
        self._measured_ns = self._busy_ns = now_ns
        self._started = 0

    def expected_ns(self, now_ns: int) -> int:
        """Return the expected wait of a new stream; at least the age of the oldest waiting one."""
        if not self._waiting:
            return 0
        oldest_ns = now_ns - next(iter(self._waiting.values()))[0]
        rate = self._rate(now_ns) or self._best_rate(now_ns)
        if not rate:
            return oldest_ns
        return max(oldest_ns, round(self._tokens * NS_PER_S / rate))

    def _note_wait(self, tokens: int, wait_ns: int, now_ns: int) -> None:
        if wait_ns >= _LEAST_WAIT_NS:
            self._best_per_s = max(self._best_rate(now_ns), tokens * NS_PER_S / wait_ns)
            self._best_ns = now_ns

    def _best_rate(self, now_ns: int) -> float:
        """Return the highest rate at which the tokens ahead of a stream were started."""
        return self._best_per_s * math.exp((self._best_ns - now_ns) / _VALID_NS)

    def _rate(self, now_ns: int) -> float | None:
        """Return the prompt tokens started per second while streams waited; None if unknown."""
        return self._per_s if now_ns - self._measured_ns < _VALID_NS else None


class TokenPace:
    """The time per token of the streams that ended lately, relative to their targets."""

    __slots__ = ("_at_ns", "_best", "_sum", "_weight")

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
        self._at_ns = 0
        self._best = math.inf

    def end(self, tpot_ns: float, target_ns: int, now_ns: int) -> None:
        """Record the mean time per token of a stream."""
        fade = math.exp((self._at_ns - now_ns) / _PACE_NS)
        self._sum = self._sum * fade + tpot_ns / target_ns
        self._weight = self._weight * fade + 1
        self._at_ns = now_ns
        self._best = min(self._best, self._sum / self._weight)

    def pressure(self, now_ns: int) -> float:
        """Return the overload: 0 up to a calm pace, 1 if tokens are as slow as they may be.

        Tokens that were never clearly faster than their target are slow for another reason.
        """
        calm = max(_CALM, _NEARLY_BEST * self._best)
        if now_ns - self._at_ns > _VALID_PACE_NS or calm >= 1:
            return 0.0
        return max(0.0, (self._sum / self._weight - calm) / (1 - calm))
