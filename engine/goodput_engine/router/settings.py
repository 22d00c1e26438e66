"""What a router is told once, at its start: classes, policy, time-outs and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_S

__all__ = ["ProbeSettings", "RouterLimits", "RouterSettings", "Timeouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the router waits, in nanoseconds.

    Args:
        connect_ns: for a TCP connection to a replica; then the request goes elsewhere.
        first_byte_ns: from the request's placement to the first token, or the first byte of an
            answer that is not streamed; then 504. Such an answer has its
            first byte at its end.
        idle_ns: between two chunks of an answer, and for a client that reads nothing.
        body_ns: for the client to send its whole request.
        parting_ns: from the order to stop, for clients to leave connections that they keep open.
    """

    connect_ns: int = 2 * NS_PER_S
    first_byte_ns: int = 600 * NS_PER_S
    idle_ns: int = 120 * NS_PER_S
    body_ns: int = 60 * NS_PER_S
    parting_ns: int = 5 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """How much the router holds.

    Args:
        body_bytes: of one request; kept until its first token, for one retry.
        all_bodies_bytes: of all requests' bodies together; then 429.
        held_bytes: of an answer before its first token; beyond it the answer is passed on as
            it is and can no longer be retried.
        retry_percent: retries per hundred requests, in the long run.
        retry_burst: retries in a row that a quiet router may make.
    """

    body_bytes: int = 32 << 20
    all_bodies_bytes: int = 512 << 20
    held_bytes: int = 64 << 10
    retry_percent: int = 10
    retry_burst: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How replicas are watched.

    Args:
        interval_ns: between two probes of a replica.
        quick_ns: the first pause before a replica that failed is asked again; it doubles up to
            `interval_ns`.
        timeout_ns: for one probe.
        strikes: probes in a row that may go unanswered before a replica counts as gone; a
            refused connection or a plain "not ready" counts at once.
        concurrency: probes under way at a time.
    """

    interval_ns: int = NS_PER_S
    quick_ns: int = 50 * NS_PER_MS
    timeout_ns: int = 2 * NS_PER_S
    strikes: int = 2
    concurrency: int = 64

    @property
    def report_valid_ns(self) -> int:
        """How long a replica's word that it is full counts: until the next is due."""
        return self.interval_ns + self.timeout_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Everything a router knows before its first request.

    Args:
        llmservice: the service's name, a label of every metric.
        policy: which replica a request goes to.
        classes: the promises by class name, in the manifest's order.
        default_class: the class of a request that names none.
    """

    llmservice: str
    policy: RouterPolicy
    classes: Mapping[str, SLOClass]
    default_class: str
    timeouts: Timeouts = Timeouts()
    limits: RouterLimits = RouterLimits()
    probe: ProbeSettings = ProbeSettings()
