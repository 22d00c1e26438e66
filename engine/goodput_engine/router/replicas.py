"""What the router knows of its replicas, and where the next request goes.

The one mutable owner of the replicas' state. Probes and requests report to it; the decision
itself is core's. It does no I/O.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec
from yarl import URL

from goodput_core.contract import TOKENIZER_EMULATED
from goodput_core.placement import PLACEMENTS, Placement, PlacementState, ReplicaLoad
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_MS
from goodput_engine.router.prompt_keys import PromptForm, prompt_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from goodput_engine.router.upstreams import Upstream

__all__ = ["EngineReport", "Replica", "ReplicaPool", "read_report"]

# A replica that said 429 is left alone this long, unless one of its requests ends sooner: a
# full queue moves by one then. Longer, and a busy replica would idle for want of requests.
_SATURATED_NS: Final = 250 * NS_PER_MS


class EngineReport(msgspec.Struct, frozen=True):
    """What placement needs of an engine's `GET /control/state`, and of its answers' header.

    `block_size` and `tokenizer` stand in the first only.
    """

    running: int = 0
    waiting: int = 0
    max_waiting: int | None = None
    kv_free_blocks: int = 0
    kv_total_blocks: int = 0
    draining: bool = False
    saturated: bool | None = None
    block_size: int = 0
    tokenizer: str = ""

    @property
    def full(self) -> bool:
        """Whether the engine would refuse one more request."""
        if self.saturated is not None:
            return self.saturated
        return self.max_waiting is not None and self.waiting >= max(1, self.max_waiting)


_REPORT: Final = msgspec.json.Decoder(EngineReport)
_MAX_BLOCK_SIZE: Final = 65_536


def read_report(text: str | bytes) -> EngineReport | None:
    """What an engine says of its load; None for what is no such account."""
    try:
        return _REPORT.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Replica:
    """One replica as the router sees it; not ready until a probe says so.

    Args:
        upstream: where it is.

    Attributes:
        base: its URL, up to the path.
        detail: why it is not ready, for people.
        wake: set to have it probed at once.
        form: how it cuts prompts into blocks, as far as known.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.name: Final = upstream.name
        self.base: Final = str(URL(upstream.url).origin())
        self.detail = "not probed yet"
        self.wake: Final = asyncio.Event()
        self._ready = False
        self._visits: dict[object, Callable[[], None]] = {}
        self.form = PromptForm()
        self._report = EngineReport()
        self._report_ns: int | None = None
        self._saturated_until_ns = 0
        self._load: ReplicaLoad | None = None

    @property
    def ready(self) -> bool:
        """Whether it may get new requests, as far as known."""
        return self._ready and not self._report.draining

    @property
    def in_flight(self) -> int:
        """Requests that this router sent it and that have not ended."""
        return len(self._visits)

    @property
    def saturated(self) -> bool:
        """Whether it refused for load, the last time it was asked."""
        return self._saturated_until_ns > 0

    @property
    def report(self) -> EngineReport:
        """What it last said of itself."""
        return self._report

    def load(self, now_ns: int) -> ReplicaLoad:
        """Its load, as placement wants it; built again only after a change."""
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
            )
        return self._load

    def begin(self, visit: object, leave: Callable[[], None]) -> None:
        """A request goes there.

        Args:
            visit: stands for the request until its `end`.
            leave: called whenever the replica is found to hang: the request may go elsewhere.
        """
        self._visits[visit] = leave
        self._load = None

    def end(self, visit: object, *, served: bool) -> None:
        """A request that went there is over; `served` when it held a place until now."""
        del self._visits[visit]
        if served:
            self._saturated_until_ns = 0
        self._load = None

    def mark_ready(self) -> None:
        """It answers."""
        self._ready = True
        self.detail = ""
        self._load = None

    def mark_gone(self, detail: str) -> None:
        """It does not answer, or says that it is not ready: nothing new until a probe succeeds."""
        self._ready = False
        self.detail = detail
        self._load = None

    def mark_hung(self, detail: str) -> None:
        """It lives and answers no probe: as gone, and what waits there may leave."""
        self.mark_gone(detail)
        for leave in tuple(self._visits.values()):
            leave()

    def mark_saturated(self, now_ns: int) -> None:
        """It refused a request for load."""
        self._saturated_until_ns = max(self._saturated_until_ns, now_ns + _SATURATED_NS)
        self._load = None

    def take_report(self, report: EngineReport, at_ns: int, *, valid_ns: int) -> None:
        """It told its load; of two accounts the newer one stands.

        Args:
            report: what it said.
            at_ns: as of when, as far as known.
            valid_ns: for how long it counts as full if it said so.
        """
        if 0 < report.block_size <= _MAX_BLOCK_SIZE:
            words = report.tokenizer == TOKENIZER_EMULATED
            self.form = PromptForm(block_size=report.block_size, counts_words=words)
        if self._report_ns is not None and at_ns < self._report_ns:
            return
        self._report = report
        self._report_ns = at_ns
        self._saturated_until_ns = at_ns + valid_ns if report.full else 0
        self._load = None


class ReplicaPool:
    """The replicas and the placement of requests on them.

    Args:
        policy: which law places.
    """

    def __init__(self, policy: RouterPolicy) -> None:
        self.policy: Final = policy
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
        """Serve these replicas from now on; requests under way elsewhere go on.

        Returns:
            The replicas that are new and those that left; one that moved is both.
        """
        before = self._replicas
        self._replicas = {}
        for upstream in upstreams:
            kept = before.get(upstream.name)
            same = kept is not None and kept.upstream == upstream
            self._replicas[upstream.name] = kept if kept and same else Replica(upstream)
        added = [r for name, r in self._replicas.items() if before.get(name) is not r]
        left = [r for name, r in before.items() if self._replicas.get(name) is not r]
        return added, left

    def keys_of(self, body: bytes) -> Sequence[int]:
        """What `place` wants to know of a request's prompt; nothing where no law reads it.

        Replicas of one service cut prompts alike, so the first one's way is every one's.
        """
        if self.policy is not RouterPolicy.PREFIX_AFFINITY:
            return ()
        replica = next(iter(self._replicas.values()), None)
        return () if replica is None else prompt_keys(body, replica.form)

    def place(
        self, now_ns: int, keys: Sequence[int] = (), *, but: Collection[str] = ()
    ) -> tuple[Replica | None, Placement]:
        """Choose a replica for one request, none of those in `but`."""
        loads = [r.load(now_ns) for r in self._replicas.values() if r.name not in but]
        self._state, placement = self._place(self._state, loads, keys, now_ns)
        if placement.replica is None:
            return None, placement
        return self._replicas[placement.replica], placement
