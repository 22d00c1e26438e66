"""The admission of requests of tenants: what they use of a service, and how much there is of it.

A router has no queue, so it enforces shares where it accepts requests. While no resource is short,
every request is admitted. What a stream uses is updated while its tokens arrive. The module needs
no report of the replicas but the number of requests that they run, and the size of their KV memory.
Both may be unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.tenants.congestion import START_TOKENS, PromptRate, TokenPace
from goodput_core.tenants.fair_share import FairShare, Resource
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.slo.targets import SLOClass

__all__ = ["ServiceCapacity", "TenantAdmission", "TenantRequest"]

_ACTIVE_NS: Final = 60 * NS_PER_S
_DEFAULT_TARGET_NS: Final = NS_PER_S
"""Target of a first token if no class has one."""
_QUEUE: Final = 0.12
"""Part of the tightest target of a first token for which prompts may wait."""
_FULL: Final = 0.9
"""Part of places and memory that may be used."""
_OBSERVE_NS: Final = 100 * NS_PER_MS
"""Shortest time between two observations of all streams."""
_OBSERVE_EACH_NS: Final = 50_000
"""The same for each stream in flight, so that observations cost little time in all."""
_FIRST_OUTPUT_TOKENS: Final = 256.0
"""Expected output of a tenant's first request."""
_NEW_OUTPUT: Final = 0.1
"""Weight of one output in the mean of a tenant."""
_MORE: Final = 1.5
"""Expected length of an output, as a multiple of its present length."""
_CONTEXT_TOKENS: Final = 1000.0
"""Tokens of context whose reading takes as long as the computation of one token."""
_FULL_NS: Final = 60 * NS_PER_S
"""Time in which the number of requests that saturated all replicas may double."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCapacity:
    """The capacity of the replicas that are ready.

    Args:
        replicas: number of them.
        places: number of requests that they run at once; infinite if unknown.
        memory_tokens: size of their KV memory; infinite if unknown.
        saturated: True if no replica can take a request.
    """

    replicas: int = 1
    places: float = math.inf
    memory_tokens: float = math.inf
    saturated: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class TenantRequest:
    """A request of a tenant, and what it uses of the service.

    Args:
        tenant: name of the tenant.
        slo_class: name of its class.
        prompt_tokens: length of the prompt.
        max_output_tokens: maximum length of the output; None if the request has none.
        streamed: True if its tokens are seen when they are computed.

    Attributes:
        began_ns: time of its admission.
        started: True after its first token.
        queued: tokens that it has in the queue.
        output_tokens: expected length of the output.
        tokens: output tokens seen so far.
        seen_ns: time of the last observation after its first token; None before.
    """

    tenant: str
    slo_class: str
    prompt_tokens: int
    max_output_tokens: int | None = None
    streamed: bool = True
    began_ns: int = 0
    started: bool = False
    queued: float = 0.0
    output_tokens: float = 0.0
    tokens: int = 0
    seen_ns: int | None = None


class _TenantOutputs:
    """The lengths of a tenant's outputs."""

    __slots__ = ("expected", "mean", "requests")

    def __init__(self) -> None:
        self.mean = _FIRST_OUTPUT_TOKENS
        self.requests = 0
        self.expected = 0.0

    @property
    def next(self) -> float:
        """The expected length of the next output; outputs that have not ended may be longer."""
        return max(self.mean, self.expected / self.requests if self.requests else 0.0)


class TenantAdmission:
    """The requests in flight of all tenants, and the decisions about new ones.

    Args:
        classes: the service's classes by name.
        weights: weight of each tenant.
    """

    def __init__(self, classes: Mapping[str, SLOClass], weights: Mapping[str, int]) -> None:
        targets = {name: slo_class.targets for name, slo_class in classes.items()}
        self._first_ns = {n: t.first_token_ns for n, t in targets.items() if t.first_token_ns}
        self._pace = TokenPace({n: t.tpot_ns for n, t in targets.items() if t.tpot_ns})
        self._rate = PromptRate()
        self._share = FairShare(weights)
        self._class_used_ns: dict[str, int] = {}
        self._outputs = {name: _TenantOutputs() for name in weights}
        self._live: dict[TenantRequest, None] = {}
        self._observed_ns = 0
        self._reported_wait_ns = 0
        self._reported_ns = 0
        self._full_requests = math.inf
        self._full_ns = 0

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Replace the tenants; a removed one is kept until its last request has ended."""
        self._share.set_weights(weights)
        for name in weights:
            self._outputs.setdefault(name, _TenantOutputs())
        for name in [n for n, o in self._outputs.items() if n not in weights and not o.requests]:
            del self._outputs[name]

    def knows(self, tenant: str) -> bool:
        """True if requests of the tenant can be admitted."""
        return tenant in self._outputs

    def admit(self, request: TenantRequest, capacity: ServiceCapacity, now_ns: int) -> bool:
        """Decide about a request; an admitted one is counted until `end`."""
        self._class_used_ns[request.slo_class] = now_ns
        share, outputs = self._share, self._outputs[request.tenant]
        queued = float(request.prompt_tokens + START_TOKENS)
        request.output_tokens = outputs.next
        if request.max_output_tokens is not None:
            request.output_tokens = min(request.output_tokens, request.max_output_tokens)
        memory = request.prompt_tokens + request.output_tokens
        capacities = self._capacities(capacity, now_ns)
        if not share.admits(request.tenant, (queued, 1.0, memory, 0.0), capacities, now_ns):
            return False
        request.began_ns, request.queued = now_ns, queued
        share.begin(request.tenant)
        for resource, amount in (
            (Resource.QUEUE, queued),
            (Resource.PLACES, 1.0),
            (Resource.MEMORY, memory),
        ):
            share.add(request.tenant, resource, amount, now_ns)
        outputs.requests += 1
        outputs.expected += request.output_tokens
        self._live[request] = None
        return True

    def send(self, request: TenantRequest, replica: str, now_ns: int) -> None:
        """Record that an admitted request is sent to a replica, or to another one."""
        if request.streamed and not request.started:
            self._rate.begin(request, replica, request.queued, now_ns)

    def start(self, request: TenantRequest, now_ns: int) -> None:
        """Record the first token of a stream, or the begin of another response."""
        if not request.started:
            request.started = True
            self._rate.end(request, now_ns, started=True)
            self._leave_queue(request, now_ns)
            self._share.add(request.tenant, Resource.SERVICE, request.prompt_tokens, now_ns)

    def observation_due(self, now_ns: int) -> bool:
        """True if `observe` is to be called for each stream; then False for a while."""
        interval_ns = max(_OBSERVE_NS, _OBSERVE_EACH_NS * len(self._live))
        if now_ns - self._observed_ns < interval_ns:
            return False
        self._observed_ns = now_ns
        # It is not seen when the first token of such a response is computed.
        wait_ns = max(self._reported_wait_ns, _OBSERVE_NS)
        for request in self._live:
            if not request.streamed and now_ns - request.began_ns > wait_ns:
                self._leave_queue(request, now_ns)
        return True

    def observe(
        self, request: TenantRequest, tokens: int, now_ns: int, *, paced: bool = True
    ) -> None:
        """Count the tokens of a stream.

        Args:
            request: an admitted request.
            tokens: output tokens so far.
            now_ns: the current time.
            paced: False if they do not arrive at the pace of the replica, because the client reads
                slowly.
        """
        if request.seen_ns is not None and paced:
            self._pace.note(
                request.slo_class, tokens - request.tokens, now_ns - request.seen_ns, now_ns
            )
        request.seen_ns = now_ns if tokens and paced else None
        self._count_tokens(request, tokens, now_ns)

    def end(
        self,
        request: TenantRequest,
        *,
        prompt_tokens: int,
        output_tokens: int,
        now_ns: int,
        ttft_ns: float | None = None,
        tpot_ns: float | None = None,
    ) -> None:
        """Count the end of a request.

        Args:
            request: an admitted request.
            prompt_tokens: prompt tokens that were computed; 0 if the request was not served.
            output_tokens: output tokens that were computed.
            now_ns: the current time.
            ttft_ns: time to the first token of a response that was not streamed; None if unknown.
            tpot_ns: the mean time per token of such a response; None if unknown.
        """
        if ttft_ns is not None:
            self._reported_wait_ns, self._reported_ns = round(ttft_ns), now_ns
        if tpot_ns is not None:
            self._pace.note(request.slo_class, 1, round(tpot_ns), now_ns)
        share, outputs = self._share, self._outputs[request.tenant]
        if not request.started:
            self._rate.end(request, now_ns, started=False)
            self._leave_queue(request, now_ns)
            share.add(request.tenant, Resource.SERVICE, prompt_tokens, now_ns)
        self._count_tokens(request, output_tokens, now_ns)
        share.add(request.tenant, Resource.PLACES, -1.0, now_ns)
        memory = request.prompt_tokens + request.output_tokens
        share.add(request.tenant, Resource.MEMORY, -memory, now_ns)
        share.end(request.tenant)
        outputs.requests -= 1
        outputs.expected -= request.output_tokens
        if output_tokens:
            outputs.mean += _NEW_OUTPUT * (output_tokens - outputs.mean)
        del self._live[request]

    def _leave_queue(self, request: TenantRequest, now_ns: int) -> None:
        if request.queued:
            self._share.add(request.tenant, Resource.QUEUE, -request.queued, now_ns)
            request.queued = 0.0

    def _count_tokens(self, request: TenantRequest, tokens: int, now_ns: int) -> None:
        """Count new output tokens, and expect a longer output if it is nearly as long."""
        new = tokens - request.tokens
        if new <= 0:
            return
        context = request.prompt_tokens + tokens
        cost = new * (1 + context / _CONTEXT_TOKENS)
        self._share.add(request.tenant, Resource.SERVICE, cost, now_ns)
        request.tokens = tokens
        expected = tokens * _MORE
        if request.max_output_tokens is not None:
            expected = min(expected, max(tokens, request.max_output_tokens))
        if expected > request.output_tokens:
            more = expected - request.output_tokens
            request.output_tokens = expected
            self._outputs[request.tenant].expected += more
            self._share.add(request.tenant, Resource.MEMORY, more, now_ns)

    def _capacities(self, capacity: ServiceCapacity, now_ns: int) -> tuple[float, ...]:
        """Return the capacity of each resource in the order of `Resource`."""
        share = self._share
        targets_ns = [
            self._first_ns[name]
            for name, used_ns in self._class_used_ns.items()
            if now_ns - used_ns < _ACTIVE_NS and name in self._first_ns
        ]
        limit_ns = round(_QUEUE * min(targets_ns, default=_DEFAULT_TARGET_NS))
        queue = capacity.replicas * self._rate.tokens_within(limit_ns, now_ns)
        if now_ns - self._reported_ns < NS_PER_S and self._reported_wait_ns > limit_ns:
            # A response that is not streamed shows its wait when it ends.
            seen = share.total(Resource.QUEUE, now_ns) * limit_ns / self._reported_wait_ns
            queue = min(queue, seen)
        if capacity.saturated:
            self._full_requests, self._full_ns = share.total(Resource.PLACES, now_ns), now_ns
        places = min(
            capacity.places, self._full_requests * (1 + (now_ns - self._full_ns) / _FULL_NS)
        )
        slow_down = self._pace.excess(now_ns)
        service = share.total(Resource.SERVICE, now_ns) / slow_down if slow_down > 1 else math.inf
        return queue, _FULL * places, _FULL * capacity.memory_tokens, service
