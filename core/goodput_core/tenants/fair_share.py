"""The fair share of tenants while replicas are overloaded.

A router has no queue, so it enforces shares where it accepts requests. While the expected wait for
a first token is short, every request is admitted, so the share of an idle tenant is used by others.
Otherwise the work of the tenants is divided max-min fairly by weight: a tenant below its share
keeps all, the others divide the rest, and a request of a tenant above its share is rejected.

Work is the number of tokens, prompts and outputs, by two measures. The work *in flight* counts at
once, so that a sudden flood is bounded before it has been served. The *recent* work adds served
tokens, which fade within seconds; it bounds a tenant with long prompts, which is served so fast
that little is in flight. A tenant that was rejected lately is *limited*: both measures must then be
below its share. Another tenant may be above it by one measure, or by a quarter, so that its bursts
pass while the limited one floods.

Source: Bertsekas and Gallager, "Data Networks", 1992, for max-min fairness; Sheng et al., "Fairness
in Serving Large Language Models", 2024, for tokens as the measure of service.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["FairShare", "TenantWork", "fair_tokens"]

_LIMITED_NS: Final = 2 * NS_PER_S
"""Time for which a tenant is limited after a rejection: two retries after `Retry-After`."""
_ACTIVE_NS: Final = 60 * NS_PER_S
"""Time for which a tenant is active after a request. A sole active tenant is never rejected."""
_RECENT_NS: Final = 5 * NS_PER_S
"""Time constant with which served tokens fade."""
_FIRST_OUTPUT_TOKENS: Final = 256.0
"""Expected output of a tenant's first request."""
_NEW_OUTPUT: Final = 0.1
"""Weight of one output in the mean of a tenant."""
# Bounds of the expected wait, as parts of the tightest target of a first token.
_BUSY: Final = 0.25
_OVERLOADED: Final = 0.5
_LATE: Final = 1.0
_BURST: Final = 1.25
"""Multiple of its share up to which a tenant that is not limited may exceed it."""
_LIMITED: Final = 15 / 16
"""Less than one, so that two limited tenants cannot admit each other's requests in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantWork:
    """The work of one tenant by one measure.

    Args:
        tokens: number of tokens.
        weight: weight of the tenant, at least 1.
        limited: True if the tenant demands more than it has.
    """

    tokens: float
    weight: int
    limited: bool = False


def fair_tokens(own: TenantWork, others: Iterable[TenantWork]) -> float:
    """Return the max-min fair share of one tenant in the work of all.

    A tenant that is not limited demands what it has. The one in question demands more.

    Args:
        own: the tenant in question.
        others: the other active tenants.
    """
    remaining, weights = own.tokens, own.weight
    content: list[TenantWork] = []
    for other in others:
        remaining += other.tokens
        weights += other.weight
        if not other.limited:
            content.append(other)
    content.sort(key=lambda work: work.tokens / work.weight)
    for work in content:
        if work.tokens * weights > remaining * work.weight:
            break
        remaining -= work.tokens
        weights -= work.weight
    return own.weight * remaining / weights


class _TenantAccount:
    """The state of one tenant."""

    __slots__ = (
        "_served",
        "_served_ns",
        "_tokens",
        "last_ns",
        "output_tokens",
        "rejected_ns",
        "requests",
        "weight",
    )

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.requests = 0
        self.output_tokens = _FIRST_OUTPUT_TOKENS
        self.last_ns = 0
        self.rejected_ns: int | None = None
        self._tokens = 0
        self._served = 0.0
        self._served_ns = 0

    def in_flight(self, now_ns: int) -> TenantWork:
        """Return the tokens of the requests that have not ended."""
        return TenantWork(tokens=self._tokens, weight=self.weight, limited=self.is_limited(now_ns))

    def recent(self, now_ns: int) -> TenantWork:
        """Return the tokens in flight and those served lately."""
        return TenantWork(
            tokens=self._tokens + self._served_at(now_ns),
            weight=self.weight,
            limited=self.is_limited(now_ns),
        )

    def is_limited(self, now_ns: int) -> bool:
        """True if a request was rejected lately."""
        return self.rejected_ns is not None and now_ns - self.rejected_ns < _LIMITED_NS

    def is_active(self, now_ns: int) -> bool:
        """True if a request is in flight or arrived lately."""
        return self.requests > 0 or now_ns - self.last_ns < _ACTIVE_NS

    def begin(self, tokens: int) -> None:
        self.requests += 1
        self._tokens += tokens

    def end(self, tokens: int, served_tokens: int, now_ns: int) -> None:
        self.requests -= 1
        self._tokens -= tokens
        self._served = self._served_at(now_ns) + served_tokens
        self._served_ns = now_ns

    def _served_at(self, now_ns: int) -> float:
        return self._served * math.exp((self._served_ns - now_ns) / _RECENT_NS)


class FairShare:
    """The work of all tenants, and the decisions about new requests.

    Args:
        weights: weight of each tenant, at least 1.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._tenants = {name: _TenantAccount(weight) for name, weight in weights.items()}
        # The others cannot change a decision.
        self._active: dict[str, _TenantAccount] = {}

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Replace the tenants; a removed one is kept until its last request has ended."""
        for name, weight in weights.items():
            self._tenants.setdefault(name, _TenantAccount(weight)).weight = weight
        for name in [n for n, t in self._tenants.items() if n not in weights and not t.requests]:
            del self._tenants[name]
            self._active.pop(name, None)

    def admits(self, tenant: str, pressure: float, now_ns: int) -> bool:
        """Decide about a new request.

        Args:
            tenant: name of the tenant.
            pressure: expected wait for a first token, divided by the tightest target of one, or the
                same for the pace of tokens.
            now_ns: the current time.
        """
        own = self._tenants[tenant]
        own.last_ns = now_ns
        self._active[tenant] = own
        if pressure < _BUSY or not own.requests:
            return True
        self._active = {n: t for n, t in self._active.items() if t.is_active(now_ns)}
        others = [other for other in self._active.values() if other is not own]
        if not others or not _exceeds_share(own, others, pressure, now_ns):
            return True
        own.rejected_ns = now_ns
        return False

    def begin(self, tenant: str, prompt_tokens: int, max_output_tokens: int | None) -> int:
        """Count an admitted request, and return its expected tokens for `end`.

        Args:
            tenant: name of the tenant.
            prompt_tokens: length of the prompt.
            max_output_tokens: maximum length of the output; None if the request has none.
        """
        own = self._tenants[tenant]
        output = own.output_tokens
        if max_output_tokens is not None:
            output = min(output, max_output_tokens)
        tokens = prompt_tokens + round(output)
        own.begin(tokens)
        return tokens

    def end(
        self, tenant: str, tokens: int, *, prompt_tokens: int, output_tokens: int, now_ns: int
    ) -> None:
        """Count the end of a request.

        Args:
            tenant: name of the tenant.
            tokens: the expected tokens that `begin` returned.
            prompt_tokens: prompt tokens that were computed; 0 if the request was not served.
            output_tokens: output tokens that were computed.
            now_ns: the current time.
        """
        own = self._tenants[tenant]
        own.end(tokens, prompt_tokens + output_tokens, now_ns)
        if output_tokens:
            own.output_tokens += _NEW_OUTPUT * (output_tokens - own.output_tokens)


def _exceeds_share(
    own: _TenantAccount, others: list[_TenantAccount], pressure: float, now_ns: int
) -> bool:
    """True if a request must be rejected for the sake of the other tenants.

    While no tenant is limited, some overload is natural: requests of all tenants wait for their
    targets. Only a tenant far above an equal share is rejected then, which is the begin of a flood,
    or the largest one if targets are missed anyway.
    """
    if own.is_limited(now_ns):
        limit = _LIMITED if pressure < _OVERLOADED else _LIMITED / 2 if pressure < _LATE else 0.0
        return any(_parts(own, others, limit, now_ns))
    if any(other.is_limited(now_ns) for other in others):
        return all(_parts(own, others, _BURST, now_ns))
    if pressure < _OVERLOADED:
        return False
    if pressure < _LATE:
        all_work = [tenant.in_flight(now_ns) for tenant in (own, *others)]
        equal = sum(work.tokens for work in all_work) / sum(work.weight for work in all_work)
        return all_work[0].tokens >= _BURST * own.weight * equal
    return all(_parts(own, others, 1.0, now_ns))


def _parts(
    own: _TenantAccount, others: list[_TenantAccount], limit: float, now_ns: int
) -> tuple[bool, bool]:
    """Return for both measures whether a tenant has at least a multiple of its share."""
    flight = own.in_flight(now_ns)
    recent = own.recent(now_ns)
    return (
        flight.tokens >= limit * fair_tokens(flight, [o.in_flight(now_ns) for o in others]),
        recent.tokens >= limit * fair_tokens(recent, [o.recent(now_ns) for o in others]),
    )
