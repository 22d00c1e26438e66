"""The configuration of a router, read once: classes, policy, time-outs and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.server_options import CLIENT_CONNECTIONS, ConnectionLimits

__all__ = ["ProbeSettings", "RouterLimits", "RouterSettings", "Timeouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits in nanoseconds.

    Args:
        connect_ns: limit for a TCP connection to a replica; then another replica is used.
        first_byte_ns: limit from the placement to the first token; then 504. For a response that
            is not streamed, the limit is to the first byte, which is sent when it is complete.
        idle_ns: limit between two chunks of a response, and for a client that reads nothing.
        body_ns: limit for receiving the body of a request.
        parting_ns: time from the start of a drain after which idle connections are closed.
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
        body_bytes: largest body of one request, stored until its first token for a retry.
        all_bodies_bytes: largest total of all bodies; then 429.
        held_bytes: most bytes of a response to hold back before its first token. A longer response
            is forwarded without waiting for the token and cannot be retried.
        retry_percent: long-run number of retries per hundred requests.
        retry_burst: most consecutive retries after a time without any.
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
        interval_ns: interval between two probes of a ready replica.
        retry_ns: pause before a failed replica is probed again; it doubles after each further
            failure, up to `interval_ns`.
        timeout_ns: time limit of one probe.
        strikes: number of consecutive probes without a response after which a replica counts as
            hung. A refused connection or the response "not ready" counts at once.
        concurrency: largest number of simultaneous probes.
    """

    interval_ns: int = NS_PER_S
    retry_ns: int = 100 * NS_PER_MS
    timeout_ns: int = 2 * NS_PER_S
    strikes: int = 2
    concurrency: int = 64

    @property
    def report_valid_ns(self) -> int:
        """Time for which a report of saturation is valid: until the end of the next probe."""
        return self.interval_ns + self.timeout_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Settings of a router.

    Args:
        llmservice: the service's name, a label of every metric.
        policy: placement policy.
        classes: SLO classes by name, in the manifest's order.
        default_class: the class of a request that names none.
        timeouts: time limits.
        limits: limits of memory and retries.
        probe: settings of the probes.
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
