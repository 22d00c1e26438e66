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
        first_ns: delay after the first failure.
        max_ns: longest delay, jitter included.
        stable_ns: time after which a ready process is stable; the end of a stable process counts as
            a first failure.
        seed: seed of the jitter; the same seed gives the same delays.
    """

    first_ns: int = 500 * NS_PER_MS
    max_ns: int = 30 * NS_PER_S
    stable_ns: int = 60 * NS_PER_S
    seed: int = 0

    def delay_ns(self, name: object, failures: int) -> int:
        """Return the delay before the next attempt of `name` after consecutive failures.

        The jitter shortens the exponential delay by up to a quarter, so that attempts that fail
        together are not repeated together.
        """
        # The exponent is bounded so that a month of failures does not make a giant integer.
        full = min(self.max_ns, self.first_ns << min(max(failures, 1) - 1, 32))
        draw = random.Random(f"{self.seed}/{name}/{failures}").random()
        return full - int(full * draw / 4)

    def count_failures(self, failures: int, *, ready_ns: int | None, exited_ns: int) -> int:
        """Return the consecutive failures after a process has ended.

        Args:
            failures: consecutive failures when the process was started.
            ready_ns: time at which the process became ready; None if it never did.
            exited_ns: time at which the process ended.
        """
        stable = ready_ns is not None and exited_ns - ready_ns >= self.stable_ns
        return 1 if stable else failures + 1
