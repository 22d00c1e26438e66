"""The last fifteen minutes of a service: judged requests by second, and samples of its load."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.slo.attainment import SecondCounts
from goodput_replay.watch.readings import MAX_CLASSES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from goodput_replay.watch.readings import EngineLoad, RouterView

__all__ = ["WINDOW_S", "LoadSample", "ObservedChange", "ServiceHistory", "make_sample"]

WINDOW_S: Final = 900
_MAX_CHANGES: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """The load of a service at one time.

    Args:
        at_s: Unix time.
        ready: replicas that get requests.
        replicas: listed replicas.
        in_flight: requests without an outcome.
        running, waiting: requests in the engines.
        kv_used: share of the KV blocks in use; None if unknown.
        token_budget: smallest token budget of the engines; None if unknown.
    """

    at_s: float
    ready: int
    replicas: int
    in_flight: int
    running: int
    waiting: int
    kv_used: float | None
    token_budget: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedChange:
    """A decision of the control laws, or a change of the service that was observed.

    Args:
        at_s: Unix time.
        knob: TokenBudget or Replicas.
        reason: reason code of a decision; empty for an observed change.
        message: sentence.
        applied: False if the decision is only a recommendation.
    """

    at_s: float
    knob: str
    reason: str
    message: str
    applied: bool = True


class ServiceHistory:
    """Collects the readings of a service, in bounded memory.

    Attributes:
        samples: samples of the load, one a second.
        changes: the latest changes, the newest first.
    """

    def __init__(self) -> None:
        self.samples: deque[LoadSample] = deque(maxlen=WINDOW_S)
        self.changes: deque[ObservedChange] = deque(maxlen=_MAX_CHANGES)
        self._epoch = ""
        self._end_s = 0
        self._seconds: dict[str, dict[int, tuple[int, int]]] = {}

    @property
    def next_s(self) -> int:
        """First second of the router's clock that was not read yet."""
        return self._end_s

    def add(self, router: RouterView, engines: Mapping[str, EngineLoad], at_s: float) -> None:
        """Add a reading.

        Args:
            router: state of the router.
            engines: load of the engines that were read, by name.
            at_s: Unix time of the reading.
        """
        self.add_seconds(router)
        sample = make_sample(router, engines, at_s)
        if self.samples:
            self.changes.extendleft(_compare(self.samples[-1], sample))
        self.samples.append(sample)

    def add_seconds(self, router: RouterView) -> None:
        """Add the judged requests of a reading, and no sample of the load."""
        assert router.seconds is not None, "checked by the reader"
        if router.epoch != self._epoch:
            self._epoch = router.epoch
            self._seconds.clear()
        seconds = router.seconds
        first_s, self._end_s = seconds.end_s - WINDOW_S, seconds.end_s
        for name, mine in list(self._seconds.items()):
            for second in [s for s in mine if not first_s <= s < seconds.end_s]:
                del mine[second]
            if not mine:
                del self._seconds[name]
        for name, counts in seconds.classes.items():
            if name not in self._seconds and len(self._seconds) >= MAX_CLASSES:
                continue
            mine = self._seconds.setdefault(name, {})
            pairs = zip(counts.good, counts.total, strict=True)
            for second, pair in enumerate(pairs, start=seconds.first_s):
                if second >= first_s:
                    mine[second] = pair

    def counts(self) -> dict[str, SecondCounts]:
        """Return the judged requests of each class by second, up to the last reading."""
        first_s = max(
            min((min(one) for one in self._seconds.values() if one), default=self._end_s - 1),
            self._end_s - WINDOW_S,
        )
        seconds = range(first_s, max(self._end_s, first_s + 1))
        return {
            name: SecondCounts(
                good=[mine.get(s, (0, 0))[0] for s in seconds],
                total=[mine.get(s, (0, 0))[1] for s in seconds],
            )
            for name, mine in self._seconds.items()
        }


def make_sample(router: RouterView, engines: Mapping[str, EngineLoad], at_s: float) -> LoadSample:
    """Return the load that a router and its engines reported at a Unix time."""
    total = sum(one.kv_total_blocks or 0 for one in router.replicas)
    free = sum(one.kv_free_blocks or 0 for one in router.replicas)
    budgets = [one.token_budget for one in engines.values() if one.token_budget]
    return LoadSample(
        at_s=at_s,
        ready=sum(one.ready for one in router.replicas),
        replicas=len(router.replicas),
        in_flight=router.in_flight,
        running=sum(one.running or 0 for one in router.replicas),
        waiting=sum(one.waiting or 0 for one in router.replicas),
        kv_used=max(0.0, 1 - free / total) if total else None,
        token_budget=min(budgets, default=None),
    )


def _compare(before: LoadSample, after: LoadSample) -> Iterator[ObservedChange]:
    if before.replicas != after.replicas:
        yield ObservedChange(
            at_s=after.at_s,
            knob="Replicas",
            reason="",
            message=f"replicas {before.replicas} → {after.replicas}",
        )
    if None not in {before.token_budget, after.token_budget} and (
        before.token_budget != after.token_budget
    ):
        yield ObservedChange(
            at_s=after.at_s,
            knob="TokenBudget",
            reason="",
            message=f"token budget {before.token_budget:,} → {after.token_budget:,}",
        )
