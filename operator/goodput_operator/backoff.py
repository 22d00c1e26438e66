"""Exponential back-off with jitter as a pure function of the number of failures."""

from __future__ import annotations

import random
from dataclasses import dataclass

from goodput_core.units import NS_PER_MS, NS_PER_S

__all__ = ["BackOff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """Delays between attempts, reset after a stable run.

    Args:
        first_ns: the delay after the first failure.
        most_ns: the longest delay, jitter included.
        stable_ns: a process that was ready for this long has failed once when it ends.
        seed: of the jitter; the same seed gives the same delays.
    """

    first_ns: int = 500 * NS_PER_MS
    most_ns: int = 30 * NS_PER_S
    stable_ns: int = 60 * NS_PER_S
    seed: int = 0

    def delay_ns(self, name: object, failures: int) -> int:
        """Return the delay before the next attempt of `name` after consecutive failures.

        It is between three quarters of the exponential delay and all of it, so that attempts that
        fail together are not repeated together.
        """
        # The exponent is bounded so that a month of failures does not make a giant integer.
        full = min(self.most_ns, self.first_ns << min(max(failures, 1) - 1, 32))
        draw = random.Random(f"{self.seed}/{name}/{failures}").random()
        return full - int(full * draw / 4)

    def failures(self, before: int, *, ready_ns: int | None, exited_ns: int) -> int:
        """Return the consecutive failures after a process has ended.

        Args:
            before: consecutive failures when it was started.
            ready_ns: when it became ready; None if it never did.
            exited_ns: when it ended.
        """
        stable = ready_ns is not None and exited_ns - ready_ns >= self.stable_ns
        return 1 if stable else before + 1
