"""When what failed is tried again: a pure law of the number of failures.

It knows nothing of processes or services; the caller counts failures and keeps the times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from goodput_core.units import NS_PER_MS, NS_PER_S

__all__ = ["BackOff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """Exponential back-off with jitter, forgotten after a stable run.

    Args:
        first_ns: the delay after the first failure.
        most_ns: no delay is longer, jitter included.
        stable_ns: what was well for this long starts afresh at one failure.
        seed: of the jitter; the same seed gives the same delays.
    """

    first_ns: int = 500 * NS_PER_MS
    most_ns: int = 30 * NS_PER_S
    stable_ns: int = 60 * NS_PER_S
    seed: int = 0

    def delay_ns(self, name: object, failures: int) -> int:
        """How long to wait before trying `name` again after its n-th failure in a row.

        Between three quarters of the exponential delay and all of it, so that those that fail
        together do not return together.
        """
        # The exponent is bounded so that a month of failures does not make a giant integer.
        full = min(self.most_ns, self.first_ns << min(max(failures, 1) - 1, 32))
        draw = random.Random(f"{self.seed}/{name}/{failures}").random()
        return full - int(full * draw / 4)

    def failures(self, before: int, *, ready_ns: int | None, exited_ns: int) -> int:
        """Failures in a row once a process has ended.

        Args:
            before: failures in a row when it was started.
            ready_ns: when it became ready; None: it never did.
            exited_ns: when it ended.
        """
        stable = ready_ns is not None and exited_ns - ready_ns >= self.stable_ns
        return 1 if stable else before + 1
