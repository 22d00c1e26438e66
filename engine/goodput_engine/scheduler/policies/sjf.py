"""Shortest job first, by predicted length."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, ClassVar, Final, Self

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policy import SchedulingPolicy
from goodput_engine.scheduler.prediction import LearnedLengths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.prediction import LengthPredictor, PredictionError
    from goodput_engine.scheduler.request import ScheduledRequest
    from goodput_engine.scheduler.settings import PolicySettings

__all__ = ["ShortestFirst", "SjfPolicy"]

_BETWEEN: Final = 3
"""Starts of the shortest between two that go to those who have waited too long: were each to go
to them, a backlog longer than the patience would end all order by length."""
_AGEING_NS: Final = 30 * NS_PER_S


def _left_tokens(request: ScheduledRequest, predictor: LengthPredictor) -> int:
    """Tokens still to compute: the prompt's are known, the answer's are predicted."""
    answer = predictor.output_tokens(request) - request.sampled_tokens
    return request.total_tokens - request.computed_tokens + answer - 1


def _age(request: ScheduledRequest) -> tuple[int, int]:
    """Since when it waits, the time it ran left out; the smaller, the longer."""
    return request.arrival_ns + request.ran_ns, request.rid


class ShortestFirst:
    """Who has the fewest tokens left goes first, but for one in four who has waited too long.

    Args:
        predictor: of the answers' lengths; the order follows it when it learns.
        patience_ns: waiting that is too long.
    """

    __slots__ = (
        "_by_age",
        "_by_length",
        "_keys",
        "_owed",
        "_patience_ns",
        "_predictor",
        "_revision",
        "_waiting",
    )

    def __init__(self, predictor: LengthPredictor, patience_ns: int) -> None:
        self._predictor = predictor
        self._patience_ns = patience_ns
        self._revision = predictor.revision
        self._owed = 0
        self._waiting: dict[int, ScheduledRequest] = {}
        self._keys: dict[int, tuple[int, int, int]] = {}
        self._by_length: list[tuple[int, int, int]] = []
        self._by_age: list[tuple[int, int]] = []

    def push(self, request: ScheduledRequest) -> None:
        """A new request goes where its length puts it."""
        self._waiting[request.rid] = request
        self._keys[request.rid] = key = self._key(request)
        insort(self._by_length, key)
        insort(self._by_age, _age(request))

    push_back = push
    """A preempted request goes where what it has left puts it."""

    def peek(self, now_ns: int) -> ScheduledRequest | None:
        """Who has waited longest, if that is too long and it is their turn; else the shortest."""
        if not self._waiting:
            return None
        since_ns, rid = self._by_age[0]
        if self._owed or now_ns - since_ns < self._patience_ns:
            if self._revision != self._predictor.revision:
                self._sort()
            rid = self._by_length[0][-1]
        return self._waiting[rid]

    def remove(self, request: ScheduledRequest) -> None:
        """Admitted or cancelled: it waits no more."""
        rid = request.rid
        if rid == self._by_length[0][-1]:
            self._owed = max(0, self._owed - 1)
        elif rid == self._by_age[0][-1]:
            self._owed = _BETWEEN
        del self._waiting[rid]
        del self._by_length[bisect_left(self._by_length, self._keys.pop(rid))]
        del self._by_age[bisect_left(self._by_age, _age(request))]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (self._waiting[key[-1]] for key in self._by_length)

    def _key(self, request: ScheduledRequest) -> tuple[int, int, int]:
        return _left_tokens(request, self._predictor), request.arrival_ns, request.rid

    def _sort(self) -> None:
        """The predictor has learned: predict again."""
        self._revision = self._predictor.revision
        self._keys = {rid: self._key(request) for rid, request in self._waiting.items()}
        self._by_length = sorted(self._keys.values())


class SjfPolicy(SchedulingPolicy):
    """Who has the fewest tokens left starts first; who runs is not displaced by a shorter one.

    Steps are as `sarathi`'s. The answer's length is predicted, from answers of the same class that
    have ended. Out of blocks, who has the most left yields. Of those who have waited for W, the
    one who has waited longest gets every fourth start, and yields after those who had to wait
    less: nobody starves, and however long the queue is, most starts go to the shortest.

    Args:
        predictor: of the answers' lengths; None: one that learns.
        ageing_ns: W; None: half a minute.

    Source: Fu et al., "Efficient LLM Scheduling by Learning to Rank", NeurIPS 2024 (order by
    predicted length, and starvation prevention by a bound on waiting); here the prediction is
    learned while serving rather than by a model that reads the prompt.
    """

    name: ClassVar[Policy] = Policy.SJF
    paced: ClassVar[bool] = True

    def __init__(
        self, *, predictor: LengthPredictor | None = None, ageing_ns: int | None = None
    ) -> None:
        self.predictor: LengthPredictor = LearnedLengths() if predictor is None else predictor
        self._patience_ns = _AGEING_NS if ageing_ns is None else ageing_ns

    @classmethod
    def configured(cls, settings: PolicySettings) -> Self:
        """With the manifest's W."""
        return cls(ageing_ns=settings.ageing_ns)

    def new_queue(self) -> ShortestFirst:
        """The fewest predicted tokens first."""
        return ShortestFirst(self.predictor, self._patience_ns)

    def rank(self, request: ScheduledRequest, view: SchedulerView) -> tuple[int, ...]:  # noqa: ARG002
        """Those with the most left yield, before those who had to wait too long."""
        age = _age(request)
        if request.admitted_ns - age[0] >= self._patience_ns:
            return (0, *age)
        return (1, _left_tokens(request, self.predictor), *age)

    @property
    def prediction_error(self) -> PredictionError:
        """How wrong its predictor was."""
        return self.predictor.error

    def steady(self, view: SchedulerView) -> bool:
        """Nobody ends in such steps; but whose turn it is may change with age."""
        return not len(view.waiting) or view.num_running >= view.limits.max_num_seqs

    def after_step(self, outcome: StepOutcome, view: SchedulerView) -> None:  # noqa: ARG002
        """Learn from those that ended."""
        for progress in outcome.progress:
            if progress.finish_reason is not None:
                self.predictor.learn(progress.request)
