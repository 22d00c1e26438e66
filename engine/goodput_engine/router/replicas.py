"""The state of the replicas and the placement of requests on them.

This module is the only owner of that state; probes and requests report to it. The placement
policies are those of `goodput_core.placement`. The module does no I/O.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

import msgspec
from yarl import URL

from goodput_core.contract import FOREIGN_HEALTH_PATHS, PATH_READY, TOKENIZER_EMULATED
from goodput_core.placement import PLACEMENTS, Placement, PlacementState, ReplicaLoad
from goodput_core.slo.importance import Importance  # noqa: TC001 - msgspec reads the annotations
from goodput_core.spec.choices import RouterPolicy
from goodput_core.tenants.admission import ServiceCapacity
from goodput_core.units import NS_PER_MS
from goodput_engine.router.prompt_keys import PromptForm, prompt_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from goodput_engine.router.upstreams import Upstream

__all__ = ["EngineReport", "Replica", "ReplicaPool", "read_report"]

# If a replica without load reports responds with 429 or 503, it gets no request for this time, or
# until one of its requests ends. A longer pause could leave the replica idle.
_SATURATED_NS: Final = 250 * NS_PER_MS


class EngineReport(msgspec.Struct, frozen=True):
    """The load of an engine, from its `GET /control/state` or the header of a response.

    Only `GET /control/state` has `block_size`, `tokenizer` and `max_num_seqs`.
    """

    running: int = 0
    waiting: int = 0
    max_waiting: int | None = None
    kv_free_blocks: int = 0
    kv_total_blocks: int = 0
    draining: bool = False
    saturated: bool | None = None
    displaceable: Importance | None = None
    block_size: int = 0
    tokenizer: str = ""
    max_num_seqs: int = 0

    @property
    def full(self) -> bool:
        """True if the engine is saturated; without its own judgement, if its queue is full."""
        if self.saturated is not None:
            return self.saturated
        return self.max_waiting is not None and self.waiting >= max(1, self.max_waiting)


_REPORT: Final = msgspec.json.Decoder(EngineReport)
_MAX_BLOCK_SIZE: Final = 65_536


def read_report(text: str | bytes) -> EngineReport | None:
    """Return the load that an engine reports; None if the payload is invalid."""
    try:
        return _REPORT.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Replica:
    """The router's view of one replica, which is not ready until a probe succeeds.

    Args:
        upstream: the replica's addresses.
        health_path: the path of the manifest at which another server is probed first; None if it
            names none.

    Attributes:
        base: the replica's URL without a path.
        detail: reason why the replica is not ready; empty if it is ready.
        wake: event that triggers an immediate probe.
        form: form of the replica's prompts; the default until a report contains one.
        max_num_seqs: number of requests that it runs at once; 0 if it reports none.
        health_paths: paths to probe; the first that the server has is used.
    """

    def __init__(self, upstream: Upstream, health_path: str | None = None) -> None:
        self.upstream = upstream
        self.name: Final = upstream.name
        self.base: Final = str(URL(upstream.url).origin())
        self.detail = "not probed yet"
        self.wake: Final = asyncio.Event()
        paths: tuple[str, ...] = (PATH_READY,)
        # Only Goodput's engine has an admin port; another server may have another path.
        if upstream.admin_url is None:
            named = () if health_path is None else (health_path,)
            paths = tuple(dict.fromkeys((*named, *paths, *FOREIGN_HEALTH_PATHS)))
        self.health_paths = paths
        self._ready = False
        self._requests: dict[object, Callable[[], None]] = {}
        self.form = PromptForm()
        self.max_num_seqs = 0
        self._report = EngineReport()
        self._report_ns: int | None = None
        self._saturated_until_ns = 0
        self._load: ReplicaLoad | None = None

    @property
    def ready(self) -> bool:
        """True if the replica is ready and not draining."""
        return self._ready and not self._report.draining

    @property
    def in_flight(self) -> int:
        """Number of this router's requests that have not ended on the replica."""
        return len(self._requests)

    @property
    def saturated(self) -> bool:
        """True if the latest report or response indicated saturation, which expires."""
        return self._saturated_until_ns > 0

    @property
    def report(self) -> EngineReport:
        """The replica's latest report."""
        return self._report

    def load(self, now_ns: int) -> ReplicaLoad:
        """Return the replica's load for placement, cached until it changes."""
        if self._saturated_until_ns and now_ns >= self._saturated_until_ns:
            self._saturated_until_ns = 0
            self._load = None
        if self._load is None:
            report = self._report
            self._load = ReplicaLoad(
                name=self.name,
                in_flight=self.in_flight,
                waiting=report.waiting,
                kv_used_blocks=max(0, report.kv_total_blocks - report.kv_free_blocks),
                kv_total_blocks=report.kv_total_blocks,
                ready=self._ready,
                saturated=self.saturated,
                draining=report.draining,
                displaceable=report.displaceable,
            )
        return self._load

    def begin(self, request: object, on_hung: Callable[[], None]) -> None:
        """Record that a request is sent to the replica.

        Args:
            request: identifies the request until its `end`.
            on_hung: called each time that the replica is marked as hung.
        """
        self._requests[request] = on_hung
        self._load = None

    def end(self, request: object, *, served: bool) -> None:
        """Record the end of a request; `served` is True if the replica had accepted it."""
        del self._requests[request]
        if served:
            self._saturated_until_ns = 0
        self._load = None

    def mark_ready(self) -> None:
        """Record a successful probe."""
        self._ready = True
        self.detail = ""
        self._load = None

    def mark_not_ready(self, detail: str) -> None:
        """Send the replica no new requests until a probe succeeds."""
        self._ready = False
        self.detail = detail
        self._load = None

    def mark_hung(self, detail: str) -> None:
        """Send the replica no new requests, and move requests without a response to others."""
        self.mark_not_ready(detail)
        for on_hung in tuple(self._requests.values()):
            on_hung()

    def mark_saturated(self, now_ns: int) -> None:
        """Record that the replica rejected a request because of load."""
        self._saturated_until_ns = max(self._saturated_until_ns, now_ns + _SATURATED_NS)
        self._load = None

    def take_report(self, report: EngineReport, at_ns: int, *, valid_ns: int) -> None:
        """Store a report, unless a newer one is stored.

        Args:
            report: the report.
            at_ns: time of the report.
            valid_ns: time for which reported saturation is valid.
        """
        if 0 < report.block_size <= _MAX_BLOCK_SIZE:
            counts_words = report.tokenizer == TOKENIZER_EMULATED
            self.form = PromptForm(block_size=report.block_size, counts_words=counts_words)
            self.max_num_seqs = max(0, report.max_num_seqs)
        if self._report_ns is not None and at_ns < self._report_ns:
            return
        self._report = report
        self._report_ns = at_ns
        self._saturated_until_ns = at_ns + valid_ns if report.full else 0
        self._load = None


class ReplicaPool:
    """The replicas and the placement of requests on them.

    Args:
        policy: the placement policy.
        health_path: see `Replica`.
    """

    def __init__(self, policy: RouterPolicy, health_path: str | None = None) -> None:
        self.policy: Final = policy
        self._health_path: Final = health_path
        self._place: Final = PLACEMENTS[policy]
        self._state = PlacementState()
        self._replicas: dict[str, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def set_upstreams(
        self, upstreams: Iterable[Upstream]
    ) -> tuple[Sequence[Replica], Sequence[Replica]]:
        """Replace the replicas; requests on removed replicas continue.

        Returns:
            The added and the removed replicas; a replica with a new address is in both.
        """
        previous = self._replicas
        self._replicas = {}
        for upstream in upstreams:
            replica = previous.get(upstream.name)
            if replica is None or replica.upstream != upstream:
                replica = Replica(upstream, self._health_path)
            self._replicas[upstream.name] = replica
        added = [r for name, r in self._replicas.items() if previous.get(name) is not r]
        removed = [r for name, r in previous.items() if self._replicas.get(name) is not r]
        return added, removed

    def capacity(self, now_ns: int, *, max_num_seqs: int, processes: int = 1) -> ServiceCapacity:
        """Return this process's part of the capacity of the replicas that are ready.

        Args:
            now_ns: the current time.
            max_num_seqs: number of requests that a replica runs at once, if it reports none.
            processes: number of processes of this router.
        """
        replicas = [replica for replica in self._replicas.values() if replica.ready]
        memory = [r.report.kv_total_blocks * r.form.block_size for r in replicas]
        return ServiceCapacity(
            replicas=len(replicas) or 1,
            places=sum(r.max_num_seqs or max_num_seqs for r in replicas) / processes or math.inf,
            memory_tokens=sum(memory) / processes if replicas and all(memory) else math.inf,
            saturated=bool(replicas) and all(r.load(now_ns).saturated for r in replicas),
        )

    def prompt_keys_of(self, body: bytes) -> Sequence[int]:
        """Return the prompt keys of a request for `place`; empty if the policy does not use them.

        All replicas of a service have the same prompt form, so that of the first replica is used.
        """
        if self.policy is not RouterPolicy.PREFIX_AFFINITY:
            return ()
        replica = next(iter(self._replicas.values()), None)
        return () if replica is None else prompt_keys(body, replica.form)

    def place(
        self,
        now_ns: int,
        keys: Sequence[int] = (),
        *,
        exclude: Collection[str] = (),
        importance: Importance | None = None,
        session: bytes | None = None,
    ) -> tuple[Replica | None, Placement]:
        """Choose a replica for one request.

        Args:
            now_ns: the current time.
            keys: the request's prompt keys.
            exclude: names of replicas that are not chosen.
            importance: the request's importance; None if it displaces no other request.
            session: identifies the request's session; None if it has none.
        """
        loads = [r.load(now_ns) for r in self._replicas.values() if r.name not in exclude]
        self._state, placement = self._place(
            self._state, loads, keys, now_ns, importance=importance, session=session
        )
        if placement.replica is None:
            return None, placement
        return self._replicas[placement.replica], placement
