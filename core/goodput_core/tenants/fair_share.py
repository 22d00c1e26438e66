"""The max-min fair shares of tenants in the resources of a service.

Shares divide the resources that requests occupy, not tokens, because the time and the memory that a
request costs depend on its lengths. Each of the four resources has a capacity in its own unit:

- `QUEUE`: tokens of prompts without a first token. Its capacity are the tokens that are computed
  within a part of the target of a first token.
- `PLACES`: requests in flight, of which replicas run a limited number.
- `MEMORY`: tokens that the requests in flight hold in KV memory, or will hold.
- `SERVICE`: recently computed tokens. Its capacity is limited while tokens are slower than their
  targets.

A resource is short if the demands for it exceed its capacity. It is then divided max-min fairly by
weight: a tenant below its share keeps all, and the others divide the rest. The demand of a tenant
is its highest use in the last seconds, so that a tenant that uses what is free leaves as much as
the others needed lately. The demand of a tenant that was rejected lately is unlimited.

Source: Bertsekas and Gallager, "Data Networks", 1992, for max-min fairness; Ghodsi et al.,
"Dominant Resource Fairness", 2011, for shares of several resources.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["FairShare", "Resource", "fair_level"]

_LIMITED_NS: Final = 2 * NS_PER_S
"""Time for which the demand of a rejected tenant is unlimited: two retries after `Retry-After`."""
_ACTIVE_NS: Final = 60 * NS_PER_S
"""Time for which a tenant is active after a request. A sole active tenant is never rejected."""
_PEAK_NS: Final = (3 * NS_PER_S, 15 * NS_PER_S, 15 * NS_PER_S, 15 * NS_PER_S)
"""Time constants with which the highest use of each resource fades; prompts leave soon."""
_RECENT_NS: Final = 3 * NS_PER_S
"""Time constant with which served tokens fade."""
_LEVEL_NS: Final = 20_000
"""A level is used for this time per active tenant, so that levels cost little time in all."""
_GROWTH: Final = 1 / 32
"""Growth of the use, as a part of the capacity, after which a level is computed anew."""


class Resource(IntEnum):
    """A resource that tenants share."""

    QUEUE = 0
    PLACES = 1
    MEMORY = 2
    SERVICE = 3


_FLOWS: Final = (Resource.QUEUE, Resource.SERVICE)
"""Resources that every request occupies only shortly."""
_BURST: Final = 1.75
"""Multiple of an equal part of all work, up to which a burst of a tenant is admitted."""
_MOST_QUEUED: Final = 5.0
"""The same as a multiple of the capacity of the queue: three fifths of the tightest target."""
_NO_OTHERS: Final = 1 / 16
"""Part of the capacity up to which the use of the other tenants is ignored."""


def fair_level(capacity: float, demands: Iterable[tuple[float, int]]) -> float:
    """Return the max-min fair share of one unit of weight; infinite if all demands are met.

    Args:
        capacity: the capacity to divide.
        demands: demand and weight of each tenant.
    """
    ordered = sorted((demand / weight, weight) for demand, weight in demands)
    remaining, weights = capacity, sum(weight for _, weight in ordered)
    for ratio, weight in ordered:
        if ratio * weights > remaining:
            return max(0.0, remaining) / weights
        remaining -= ratio * weight
        weights -= weight
    return math.inf


class _TenantAccount:
    """The use of all resources by one tenant."""

    __slots__ = ("_faded_ns", "_peaks", "last_ns", "limited_ns", "requests", "uses", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.requests = 0
        self.last_ns = 0
        self.uses = [0.0] * len(Resource)
        self.limited_ns: list[int | None] = [None] * len(Resource)
        self._peaks = [0.0] * len(Resource)
        self._faded_ns = 0

    def fade(self, now_ns: int) -> None:
        """Let the peaks and the served tokens fade until now."""
        passed_ns = now_ns - self._faded_ns
        if passed_ns <= 0:
            return
        self._faded_ns = now_ns
        peaks = self._peaks
        self.uses[Resource.SERVICE] *= math.exp(-passed_ns / _RECENT_NS)
        for resource, use in enumerate(self.uses):
            peaks[resource] = max(use, peaks[resource] * math.exp(-passed_ns / _PEAK_NS[resource]))

    def add(self, resource: Resource, amount: float) -> None:
        use = self.uses[resource] = self.uses[resource] + amount
        self._peaks[resource] = max(self._peaks[resource], use)

    def is_limited(self, resource: Resource, now_ns: int) -> bool:
        """True if a request was rejected lately because of the resource."""
        rejected_ns = self.limited_ns[resource]
        return rejected_ns is not None and now_ns - rejected_ns < _LIMITED_NS

    def has_flooded(self, resource: Resource, now_ns: int) -> bool:
        """True if a request was rejected lately because of the queue."""
        return resource is Resource.QUEUE and self.is_limited(resource, now_ns)

    def demand(self, resource: Resource, now_ns: int) -> float:
        self.fade(now_ns)
        return math.inf if self.is_limited(resource, now_ns) else self._peaks[resource]

    def is_busy(self, now_ns: int) -> bool:
        """True if a request is in flight or arrived in the last seconds."""
        return self.requests > 0 or now_ns - self.last_ns < _RECENT_NS

    def is_active(self, now_ns: int) -> bool:
        """True if a request is in flight or arrived lately."""
        return self.requests > 0 or now_ns - self.last_ns < _ACTIVE_NS


class _ComputedLevel:
    """The level of one resource, as it was computed last."""

    __slots__ = ("at_ns", "capacity", "level", "total")

    def __init__(self) -> None:
        self.at_ns: int | None = None
        self.capacity = math.inf
        self.level = math.inf
        self.total = 0.0


class FairShare:
    """The use of resources by all tenants, and the decisions about new requests.

    Args:
        weights: weight of each tenant, at least 1.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._tenants = {name: _TenantAccount(weight) for name, weight in weights.items()}
        # The others cannot change a decision.
        self._active: dict[str, _TenantAccount] = {}
        self._pruned_ns = 0
        self._faded_ns = 0
        # Weight of the busy tenants, and the largest of the other active ones, at some time.
        self._weights_ns, self._busy, self._idle = -1, 0, 0
        self._totals = [0.0] * len(Resource)
        self._levels = [_ComputedLevel() for _ in Resource]

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Replace the tenants; a removed one is kept until its last request has ended."""
        for name, weight in weights.items():
            self._tenants.setdefault(name, _TenantAccount(weight)).weight = weight
        for name in [n for n, t in self._tenants.items() if n not in weights and not t.requests]:
            del self._tenants[name]
            self._active.pop(name, None)

    def total(self, resource: Resource, now_ns: int) -> float:
        """Return the use of a resource by all tenants."""
        self._fade(now_ns)
        return self._totals[resource]

    def admits(
        self, tenant: str, needs: Sequence[float], capacities: Sequence[float], now_ns: int
    ) -> bool:
        """Decide about a new request.

        A tenant that uses nothing of a resource is admitted to it, however much its request needs.
        The exception is the queue after a rejection, while the tenant has most of all work.

        Args:
            tenant: name of the tenant.
            needs: use of each resource by the request.
            capacities: capacity of each resource; infinite if it is not limited.
            now_ns: the current time.
        """
        own = self._tenants[tenant]
        own.last_ns = now_ns
        if tenant not in self._active:
            self._active[tenant] = own
            self._weights_ns = -1
        if now_ns - self._pruned_ns >= NS_PER_S:
            self._pruned_ns = now_ns
            self._active = {n: t for n, t in self._active.items() if t.is_active(now_ns)}
        if len(self._active) < 2 or not own.requests:
            return True
        own.fade(now_ns)
        self._fade(now_ns)
        admitted = True
        for resource in Resource:
            use, capacity = own.uses[resource], capacities[resource]
            # A flood of prompts longer than the queue would otherwise have one in it at all times.
            if capacity == math.inf or (use <= 0 and not own.has_flooded(resource, now_ns)):
                continue
            if self._is_innocent(own, resource, needs[resource], capacity, now_ns):
                continue
            if use + needs[resource] > own.weight * self._level(resource, capacity, now_ns):
                admitted = False
                # A prompt that is too long to start in time is no flood.
                too_long = use + needs[resource] > _MOST_QUEUED * capacity
                if resource is not Resource.QUEUE or not (too_long and self._has_part(own, now_ns)):
                    own.limited_ns[resource] = now_ns
        return admitted

    def _is_innocent(
        self, own: _TenantAccount, resource: Resource, need: float, capacity: float, now_ns: int
    ) -> bool:
        """True if a tenant does not make a resource short, or little more than the others do."""
        use, total = own.uses[resource], self._totals[resource]
        is_limited = own.is_limited(resource, now_ns)
        if resource not in _FLOWS:
            return not is_limited and total + need <= capacity
        part = self._part(own, now_ns)
        if is_limited and use <= 0:
            return self._has_part(own, now_ns, _BURST)
        if is_limited:
            # The long prompts of others would entitle a flood to as many tokens in the queue.
            fair = resource is Resource.SERVICE and use <= part * total
            return self._has_part(own, now_ns) and (fair or total + need <= capacity)
        if resource is Resource.QUEUE:
            capacity *= _MOST_QUEUED
            if total + need <= capacity:
                return True
            if use + need > max(capacity, own.uses[Resource.SERVICE]):
                return use <= part * total
            if total - use <= _NO_OTHERS * capacity:
                return True
        return use <= part * total or self._has_part(own, now_ns, _BURST)

    def _part(self, own: _TenantAccount, now_ns: int) -> float:
        """Return an equal part of the busy tenants; of two if the others were only active lately.

        Tenants that used the service in turn would otherwise reduce the part of a constant one.
        """
        if self._weights_ns != now_ns:
            self._weights_ns, self._busy, self._idle = now_ns, 0, 0
            for tenant in self._active.values():
                if tenant.is_busy(now_ns):
                    self._busy += tenant.weight
                else:
                    self._idle = max(self._idle, tenant.weight)
        return own.weight / (self._busy + (self._idle if self._busy <= own.weight else 0))

    def _has_part(self, own: _TenantAccount, now_ns: int, multiple: float = 1.0) -> bool:
        """True if a tenant has at most its part, or a multiple, of waiting and recent work."""
        work = sum(own.uses[flow] for flow in _FLOWS)
        works = sum(self._totals[flow] for flow in _FLOWS)
        return work <= multiple * self._part(own, now_ns) * works

    def begin(self, tenant: str) -> None:
        """Count an admitted request; its use is added by `add`."""
        self._tenants[tenant].requests += 1

    def add(self, tenant: str, resource: Resource, amount: float, now_ns: int) -> None:
        """Change the use of a resource.

        Args:
            tenant: name of the tenant.
            resource: the resource.
            amount: the change; negative if less is used.
            now_ns: the current time.
        """
        own = self._tenants[tenant]
        own.fade(now_ns)
        own.add(resource, amount)
        if resource is Resource.SERVICE:
            self._fade(now_ns)
        self._totals[resource] += amount

    def end(self, tenant: str) -> None:
        """Count the end of a request, whose use was taken back by `add` before."""
        self._tenants[tenant].requests -= 1

    def _fade(self, now_ns: int) -> None:
        """Let the served tokens of all fade until now."""
        if now_ns > self._faded_ns:
            self._totals[Resource.SERVICE] *= math.exp((self._faded_ns - now_ns) / _RECENT_NS)
            self._faded_ns = now_ns

    def _level(self, resource: Resource, capacity: float, now_ns: int) -> float:
        last, total = self._levels[resource], self._totals[resource]
        if (
            last.at_ns is None
            or now_ns - last.at_ns > _LEVEL_NS * len(self._active)
            or total - last.total > _GROWTH * capacity
            or capacity < last.capacity
        ):
            demands = (
                (tenant.demand(resource, now_ns), tenant.weight) for tenant in self._active.values()
            )
            last.level = fair_level(capacity, demands)
            last.at_ns, last.capacity, last.total = now_ns, capacity, total
        return last.level
