"""Abort rule of a run: the maximum error rate of `--abort-on`."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_S, format_duration, parse_duration

__all__ = ["AbortRule", "ErrorRateWatch", "parse_abort_rule"]

_RULE: Final = re.compile(r"error-rate=(\d{1,3}(?:\.\d{1,6})?)%(?:/(.+))?")
_DEFAULT_NS: Final = 30 * NS_PER_S
_MIN_ENDED: Final = 20
# A request shed under load is a valid response, not a failure.
_FAILURES: Final = frozenset({Outcome.ERROR, Outcome.TIMEOUT})


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRule:
    """Abort if more than `limit` of the requests that ended in the last `window_ns` failed.

    Args:
        limit: maximum share of failures.
        window_ns: length of the sliding window.
    """

    limit: Fraction
    window_ns: int = _DEFAULT_NS


def parse_abort_rule(text: str) -> AbortRule:
    """Parse a rule such as `error-rate=5%` or `error-rate=5%/60s`.

    Raises:
        ValueError: the text is not a rule, the percentage is not below 100 %, or the duration is
            invalid.
    """
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a rule; write for example error-rate=5% or ...=5%/60s")
    limit = Fraction(match[1]) / 100
    if limit >= 1:
        raise ValueError(
            f"{text!r} is a rate that no run can exceed; write a percentage below 100%"
        )
    window_ns = _DEFAULT_NS if match[2] is None else parse_duration(match[2])
    if window_ns <= 0:
        raise ValueError(f"{text!r} has an empty window; write for example /30s")
    return AbortRule(limit=limit, window_ns=window_ns)


class ErrorRateWatch:
    """Applies an abort rule to ended requests, if at least 20 of them ended in the window."""

    def __init__(self, rule: AbortRule) -> None:
        self._rule = rule
        self._ended: deque[tuple[int, bool]] = deque()
        self._failed = 0

    def count(self, outcome: Outcome, now_ns: int) -> str | None:
        """Count one request; return a message if the rule holds, else None."""
        failed = outcome in _FAILURES
        self._ended.append((now_ns, failed))
        self._failed += failed
        while self._ended[0][0] < now_ns - self._rule.window_ns:
            self._failed -= self._ended.popleft()[1]
        total = len(self._ended)
        if total < _MIN_ENDED or Fraction(self._failed, total) <= self._rule.limit:
            return None
        span = format_duration(self._rule.window_ns)
        return (
            f"{self._failed} of {total} requests failed within {span}, more than the "
            f"{float(self._rule.limit * 100):g}% of --abort-on"
        )
