"""Signs of overload that a router sees in its streams, without a report from the replicas.

The first is the rate at which replicas compute prompts, from which follows how many can wait for
how long. Streams that waited show it: a wait grows with the prompt tokens that the replica had when
the stream was sent. Before enough streams have waited, the oldest one that waits shows it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["START_TOKENS", "PromptRate", "TokenPace"]

START_TOKENS: Final = 50
"""Prompt tokens that take as long as the start of a stream itself."""
_LEAST_WAIT_NS: Final = 100 * NS_PER_MS
"""Streams that start sooner did not wait for others."""
_VALID_NS: Final = 60 * NS_PER_S
"""Time constant with which waits and the fastest prompt are forgotten."""
_KNOWN_NS: Final = NS_PER_S
"""Sum of such waits from which the rate is known."""
_MOST: Final = 3.0
"""Highest rate, as a multiple of that without the constant part of a wait."""
_PACE_NS: Final = NS_PER_S
"""Time constant with which the pace is forgotten."""
_VALID_PACE_NS: Final = 5 * NS_PER_S
"""Time for which the pace is used after the last observation."""
_FEWEST_TOKENS: Final = 50
"""Tokens from which a pace is known."""
_CALM: Final = 0.8
"""Part of the TPOT target up to which slower tokens are no overload."""
_NEARLY_BEST: Final = 1.1
"""The same as a multiple of the fastest pace."""


class _Waits:
    """Fading sums over streams that started: the tokens that their replica had, and their waits."""

    __slots__ = ("_at_ns", "_count", "_products", "_squares", "_tokens", "_wait_ns")

    def __init__(self) -> None:
        self._at_ns = 0
        self._count = 0.0
        self._tokens = 0.0
        self._wait_ns = 0.0
        self._squares = 0.0
        self._products = 0.0

    def note(self, tokens: float, wait_ns: int, now_ns: int) -> None:
        fade = self._fade(now_ns)
        self._at_ns = now_ns
        self._count = self._count * fade + 1
        self._tokens = self._tokens * fade + tokens
        self._wait_ns = self._wait_ns * fade + wait_ns
        self._squares = self._squares * fade + tokens * tokens
        self._products = self._products * fade + tokens * wait_ns

    def wait_ns(self, now_ns: int) -> float:
        """Return the sum of the waits."""
        return self._wait_ns * self._fade(now_ns)

    @property
    def per_s(self) -> float:
        """Tokens per second of wait."""
        return self._tokens * NS_PER_S / self._wait_ns

    @property
    def additional_per_s(self) -> float:
        """The same of additional tokens, by least squares; 0 if the waits do not grow with them.

        A wait also has a constant part: the rest of the running step, and the decodes of its own.
        """
        slope = self._count * self._products - self._tokens * self._wait_ns
        spread = self._count * self._squares - self._tokens * self._tokens
        return spread * NS_PER_S / slope if slope > 0 else 0.0

    def _fade(self, now_ns: int) -> float:
        return math.exp((self._at_ns - now_ns) / _VALID_NS)


class PromptRate:
    """The prompt tokens that one replica computes per second."""

    __slots__ = ("_all", "_alone_ns", "_alone_per_s", "_long", "_tokens", "_waiting")

    def __init__(self) -> None:
        # Replica, time and tokens of each stream, and the tokens that the replica had with it.
        self._waiting: dict[object, tuple[str, int, float, float]] = {}
        self._tokens: dict[str, float] = {}
        self._all, self._long = _Waits(), _Waits()
        self._alone_per_s = 0.0
        self._alone_ns = 0

    def begin(self, stream: object, replica: str, tokens: float, now_ns: int) -> None:
        """Record that a stream is sent to a replica."""
        self.end(stream, now_ns, started=False)
        ahead = self._tokens[replica] = self._tokens.get(replica, 0.0) + tokens
        self._waiting[stream] = replica, now_ns, tokens, ahead

    def end(self, stream: object, now_ns: int, *, started: bool) -> None:
        """Record the first token of a stream, or its end without one; later calls do nothing."""
        began = self._waiting.pop(stream, None)
        if began is None:
            return
        replica, began_ns, tokens, ahead = began
        self._tokens[replica] -= tokens
        if self._tokens[replica] < 1:
            del self._tokens[replica]
        wait_ns = now_ns - began_ns
        if not started or wait_ns <= 0:
            return
        alone_per_s = max(0.0, tokens - START_TOKENS) * NS_PER_S / wait_ns
        if alone_per_s > self._fastest(now_ns):
            self._alone_per_s, self._alone_ns = alone_per_s, now_ns
        self._all.note(ahead, wait_ns, now_ns)
        if wait_ns >= _LEAST_WAIT_NS:
            self._long.note(ahead, wait_ns, now_ns)

    def tokens_within(self, limit_ns: int, now_ns: int) -> float:
        """Return the tokens that a replica computes in some time; infinite if unknown."""
        if self._long.wait_ns(now_ns) >= _KNOWN_NS:
            # Prompts in a prefix cache start much sooner than they could be computed.
            least = self._long.per_s
            fastest = max(self._all.additional_per_s, self._fastest(now_ns))
            return max(least, min(fastest, _MOST * least)) * limit_ns / NS_PER_S
        if not self._waiting:
            return math.inf
        _, began_ns, _, ahead = next(iter(self._waiting.values()))
        age_ns = now_ns - began_ns
        return ahead * limit_ns / age_ns if age_ns > limit_ns else math.inf

    def _fastest(self, now_ns: int) -> float:
        return self._alone_per_s * math.exp((self._alone_ns - now_ns) / _VALID_NS)


class TokenPace:
    """The time per token of the streams in flight, relative to the targets of their classes.

    Args:
        targets_ns: target of the time per token of each class that has one.
    """

    __slots__ = ("_best", "_classes", "_targets_ns")

    def __init__(self, targets_ns: Mapping[str, int]) -> None:
        self._targets_ns = dict(targets_ns)
        self._classes: dict[str, tuple[float, float, int]] = {}
        self._best: dict[str, float] = {}

    def note(self, slo_class: str, tokens: int, passed_ns: int, now_ns: int) -> None:
        """Record the tokens that a stream got in some time."""
        target_ns = self._targets_ns.get(slo_class)
        if target_ns is None:
            return
        time, count, at_ns = self._classes.get(slo_class, (0.0, 0.0, now_ns))
        fade = math.exp((at_ns - now_ns) / _PACE_NS)
        time, count = time * fade + passed_ns / target_ns, count * fade + tokens
        self._classes[slo_class] = time, count, now_ns
        if count >= _FEWEST_TOKENS:
            self._best[slo_class] = min(self._best.get(slo_class, math.inf), time / count)

    def excess(self, now_ns: int) -> float:
        """Return the time per token, divided by that from which replicas are overloaded.

        It is the largest one of all classes. Tokens that were never clearly faster than their
        target are slow for another reason.
        """
        excess = 0.0
        for slo_class, (time, count, at_ns) in self._classes.items():
            slow = max(_CALM, _NEARLY_BEST * self._best.get(slo_class, math.inf))
            if slow < 1 and now_ns - at_ns < _VALID_PACE_NS:
                excess = max(excess, time / max(count, 1.0) / slow)
        return excess
