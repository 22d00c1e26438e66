"""The configuration of a router, read once: classes, policy, time-outs and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import RouterPolicy
from goodput_core.spec.workloads import SessionAffinitySpec
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.server_options import CLIENT_CONNECTIONS, ConnectionLimits

__all__ = ["ProbeSettings", "RouterLimits", "RouterSettings", "Timeouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits in nanoseconds.

    Args:
        connect_ns: limit for a TCP connection to a replica; after it another replica is used.
        first_byte_ns: limit from the placement to the first token; after it the client gets 504. A
            response that is not streamed arrives when it is complete, so the limit is to its end.
        idle_ns: limit between two reads from a replica after the first token, and for a client
            that reads nothing.
        body_ns: limit for receiving the body of a request.
        idle_drain_ns: time without a running request after which a drain ends although connections
            are open, and time from its start after which requests on new connections get 503.
    """

    connect_ns: int = 2 * NS_PER_S
    first_byte_ns: int = 600 * NS_PER_S
    idle_ns: int = 120 * NS_PER_S
    body_ns: int = 60 * NS_PER_S
    idle_drain_ns: int = 5 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """Limits of memory and retries.

    Args:
        body_bytes: maximum size of a request's body, which is kept for a retry until the first
            token of the response.
        all_bodies_bytes: maximum total size of all bodies; a request above it gets 429.
        held_bytes: maximum bytes of a response that are held back before its first token. After
            them the response is forwarded, and the request cannot be retried.
        retry_percent: long-run number of retries per hundred requests.
        retry_burst: maximum number of consecutive retries after a time without retries.
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
        hung_after_probes: number of consecutive probes without a response after which a replica
            counts as hung. After a refused connection, or a response other than 200, the replica is
            not ready immediately.
        concurrency: maximum number of simultaneous probes.
    """

    interval_ns: int = NS_PER_S
    retry_ns: int = 100 * NS_PER_MS
    timeout_ns: int = 2 * NS_PER_S
    hung_after_probes: int = 2
    concurrency: int = 64

    @property
    def report_valid_ns(self) -> int:
        """Time for which reported saturation is valid: until the next probe has ended."""
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
        health_path: the path at which another server reports its health; None if the manifest names
            none.
        connections: limits of the serving port's connections.
        processes: number of processes among which the router's requests are divided.
        max_num_seqs: number of requests that a replica runs at once, unless it reports another one.
        session_affinity: the header or cookie that names the session of a request; None to place
            all requests by the policy.
        api_key_file: file of the keys that clients must send; None if no key is required.
        tenants_file: file of the tenants and their keys; None without tenants.
    """

    llmservice: str
    policy: RouterPolicy
    classes: Mapping[str, SLOClass]
    default_class: str
    timeouts: Timeouts = Timeouts()
    limits: RouterLimits = RouterLimits()
    probe: ProbeSettings = ProbeSettings()
    health_path: str | None = None
    connections: ConnectionLimits = CLIENT_CONNECTIONS
    processes: int = 1
    max_num_seqs: int = 256
    session_affinity: SessionAffinitySpec | None = None
    api_key_file: Path | None = None
    tenants_file: Path | None = None
