"""The router in virtual time: core's placement law and the router's own rule for retries.

It chooses and keeps what is remembered between two choices; requests and time are its caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.placement import PLACEMENTS, PlacementReason, PlacementState
from goodput_engine.router.retry import RetryBudget
from goodput_engine.router.settings import RouterLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_core.spec.choices import RouterPolicy
    from goodput_replay.emulation.replica import Replica

__all__ = ["VirtualRouter"]

_FULL = "every replica is full; try again shortly"
_NONE_READY = "no replica is ready; try again shortly"


class VirtualRouter:
    """Places requests.

    Args:
        policy: by which law.
        seed: of what the law draws at random.
    """

    def __init__(self, policy: RouterPolicy, *, seed: int) -> None:
        self._place = PLACEMENTS[policy]
        self._state = PlacementState(seed=seed)
        bounds = RouterLimits()
        self._budget = RetryBudget(percent=bounds.retry_percent, burst=bounds.retry_burst)

    def first(self, replicas: Iterable[Replica], keys: Sequence[int], now_ns: int) -> Replica | str:
        """Where a new request goes, or why nowhere."""
        self._budget.earn()
        return self._choose({r.name: r for r in replicas}, keys, now_ns)

    def elsewhere(
        self, replicas: Iterable[Replica], tried: Replica, keys: Sequence[int], now_ns: int
    ) -> Replica | None:
        """Where a request goes that was refused for load, if anywhere."""
        others = {r.name: r for r in replicas if r is not tried}
        chosen = self._choose(others, keys, now_ns)
        return None if isinstance(chosen, str) or not self._budget.spend() else chosen

    def _choose(
        self, replicas: dict[str, Replica], keys: Sequence[int], now_ns: int
    ) -> Replica | str:
        loads = [replica.load(now_ns) for replica in replicas.values()]
        self._state, placement = self._place(self._state, loads, keys, now_ns)
        if placement.replica is not None:
            return replicas[placement.replica]
        return _FULL if placement.reason is PlacementReason.ALL_SATURATED else _NONE_READY
