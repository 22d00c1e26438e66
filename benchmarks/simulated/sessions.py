"""A service with outages, and users who wait for each answer: the load of causal sessions.

Sessions start at random. A user sends the next request a think time after the answer before it,
and after an outage all users who waited go on at once. Fewer requests are therefore sent in an
outage than at other times. The long-run share of misses is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from benchmarks.simulated.processes import Windows

__all__ = ["CausalSessions"]

_WARM_UP = 5
"""Mean lengths of a session, and mean times between outages, before a window."""


@dataclass(frozen=True, kw_only=True)
class CausalSessions:
    """Sessions with geometric numbers of requests, geometric think times, and outages.

    A request in an outage misses, and is answered at the end of the outage. Any other one is
    answered in its second. Times are whole seconds.

    Args:
        per_s: mean rate of requests.
        requests: mean number of requests of a session.
        think_s: mean think time.
        outage_s: length of each outage.
        miss: long-run share of misses, from which the frequency of the outages follows.
    """

    per_s: float
    requests: float
    think_s: float
    outage_s: int
    miss: float

    @cached_property
    def start_chance(self) -> float:
        """Chance that an outage starts in a second after one without an outage."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if self._miss_at(middle) < self.miss:
                low = middle
            else:
                high = middle
        return low

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Windows:
        """Draw windows from the stationary process."""
        starts_per_s, go_on = self.per_s / self.requests, 1 - 1 / self.requests
        cycle_s = 1 / self.start_chance + self.outage_s
        warm_s = math.ceil(_WARM_UP * max(self.requests * self.think_s, cycle_s))
        thinking = rng.poisson(starts_per_s * go_on * self.requests * self.think_s, windows)
        waiting = np.zeros(windows, dtype=np.int64)
        left_s = np.zeros(windows, dtype=np.int64)  # rest of the outage
        healthy_before = np.ones(windows, dtype=bool)
        total = np.zeros((seconds, windows), dtype=np.int64)
        missed = np.zeros_like(total)
        for second in range(-warm_s, seconds):
            begins = healthy_before & (rng.random(windows) < self.start_chance)
            left_s = np.where(begins, self.outage_s, np.maximum(left_s - 1, 0))
            out = left_s > 0
            again = rng.binomial(thinking, 1 / self.think_s)
            sent = again + rng.poisson(starts_per_s, windows)
            if second >= 0:
                total[second] = sent
                missed[second] = np.where(out, sent, 0)
            # Requests of an outage are answered in its last second.
            answered = np.where(out, np.where(left_s == 1, waiting + sent, 0), sent)
            waiting = np.where(out & (left_s > 1), waiting + sent, 0)
            thinking = thinking - again + rng.binomial(answered, go_on)
            healthy_before = ~out
        return Windows(total=total.T.copy(), missed=missed.T.copy())

    def _miss_at(self, start_chance: float) -> float:
        """Return the share of misses if outages start with this chance.

        The expected number of thinking users follows linear equations, both within an outage and
        between two of them, whose numbers of seconds are geometric. Their solution for the start of
        an outage gives the expected number of requests in it.
        """
        if not start_chance:
            return 0.0
        starts_per_s, go_on = self.per_s / self.requests, 1 - 1 / self.requests
        stays = (1 - 1 / self.think_s) ** self.outage_s
        usual = starts_per_s * (self.requests - 1) * self.think_s
        decay = 1 - 1 / (self.think_s * self.requests)
        # Mean of decay**seconds, for at least one second between two outages.
        left = start_chance * decay / (1 - (1 - start_chance) * decay)
        in_outage = starts_per_s * self.outage_s
        kept = stays + go_on * (1 - stays)
        at_start = (usual + left * (go_on * in_outage - usual)) / (1 - left * kept)
        cycle_s = 1 / start_chance + self.outage_s
        return (in_outage + at_start * (1 - stays)) / (self.per_s * cycle_s)
