"""The configuration of a router, read once: classes, policy, time-outs and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.http_server import CLIENT_CONNECTIONS, ConnectionLimits

__all__ = ["ProbeSettings", "RouterLimits", "RouterSettings", "Timeouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits in nanoseconds.

    Args:
        connect_ns: for a TCP connection to a replica; then another replica is used.
        first_byte_ns: from the placement to the first token, or to the first byte of a response
            that is not streamed, which comes when it is complete; then 504.
        idle_ns: between two chunks of a response, and for a client that reads nothing.
        body_ns: for the body of a request to arrive.
        parting_ns: from the start of a drain, for clients to leave idle connections.
    """

    connect_ns: int = 2 * NS_PER_S
    first_byte_ns: int = 600 * NS_PER_S
    idle_ns: int = 120 * NS_PER_S
    body_ns: int = 60 * NS_PER_S
    parting_ns: int = 5 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """Limits of memory and retries.

    Args:
        body_bytes: of one request, kept until its first token for a retry.
        all_bodies_bytes: of all bodies together; then 429.
        held_bytes: of a response before its first token. A longer one is forwarded as it is and
            cannot be retried.
        retry_percent: retries per hundred requests, in the long run.
        retry_burst: consecutive retries after a quiet time.
    """

    body_bytes: int = 32 << 20
    all_bodies_bytes: int = 512 << 20
    held_bytes: int = 64 << 10
    retry_percent: int = 10
    retry_burst: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """Probing of replicas.

    Args:
        interval_ns: between two probes of a replica.
        quick_ns: the first pause before a failed replica is probed again; it doubles up to
            `interval_ns`.
        timeout_ns: for one probe.
        strikes: consecutive probes without an answer after which a replica counts as gone. A
            refused connection or the answer "not ready" counts at once.
        concurrency: simultaneous probes.
    """

    interval_ns: int = NS_PER_S
    quick_ns: int = 50 * NS_PER_MS
    timeout_ns: int = 2 * NS_PER_S
    strikes: int = 2
    concurrency: int = 64

    @property
    def report_valid_ns(self) -> int:
        """How long a report of saturation is valid: until the next probe's end."""
        return self.interval_ns + self.timeout_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """A router.

    Args:
        llmservice: the service's name, a label of every metric.
        policy: places requests on replicas.
        classes: SLO classes by name, in the manifest's order.
        default_class: the class of a request that names none.
        timeouts: time limits.
        limits: of memory and retries.
        probe: of replicas.
        connections: limits of the serving port's connections.
    """

    llmservice: str
    policy: RouterPolicy
    classes: Mapping[str, SLOClass]
    default_class: str
    timeouts: Timeouts = Timeouts()
    limits: RouterLimits = RouterLimits()
    probe: ProbeSettings = ProbeSettings()
    connections: ConnectionLimits = CLIENT_CONNECTIONS
