"""Shortest job first, by predicted output length."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, ClassVar, Final, Self

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.prediction import LearnedLengths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.policy import PolicySettings
    from goodput_engine.scheduler.prediction import LengthPredictor, PredictionError
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["ShortestFirst", "SjfPolicy"]

_STARTS_BETWEEN: Final = 3
"""Number of starts by length between two starts of overdue requests. Without the starts by length,
a queue in which every request is overdue would be served first come, first served."""
_AGEING_NS: Final = 30 * NS_PER_S


def _left_tokens(request: ScheduledRequest, predictor: LengthPredictor) -> int:
    """Return the number of tokens left to compute in the prompt and the predicted output."""
    output = predictor.output_tokens(request) - request.sampled_tokens
    return request.total_tokens - request.computed_tokens + output - 1


def _age(request: ScheduledRequest) -> tuple[int, int]:
    """Return a sort key, lower for a longer wait; running time is not part of the wait."""
    return request.arrival_ns + request.ran_ns, request.rid


class ShortestFirst:
    """The waiting requests, by predicted tokens; every fourth start is for an overdue request.

    The tokens of a preempted request that are computed count too, whether or not they must be
    computed again: the request needs as many blocks as before. Otherwise a long request that was
    swapped shortly before its end would wait for many blocks at the head of the queue.

    Args:
        predictor: predicts output lengths.
        patience_ns: waiting time after which a request is overdue.
    """

    __slots__ = (
        "_by_age",
        "_by_length",
        "_keys",
        "_next",
        "_patience_ns",
        "_predictor",
        "_revision",
        "_starts_until_overdue",
        "_waiting",
    )

    def __init__(self, predictor: LengthPredictor, patience_ns: int) -> None:
        self._predictor = predictor
        self._patience_ns = patience_ns
        self._revision = predictor.revision
        self._starts_until_overdue = 0
        self._next: int | None = None
        """The rid of the request that is to start."""
        self._waiting: dict[int, ScheduledRequest] = {}
        self._keys: dict[int, tuple[int, int, int]] = {}
        self._by_length: list[tuple[int, int, int]] = []
        self._by_age: list[tuple[int, int]] = []

    def push(self, request: ScheduledRequest) -> None:
        """Add a new or preempted request by its predicted number of tokens."""
        self._waiting[request.rid] = request
        self._keys[request.rid] = key = self._key(request)
        insort(self._by_length, key)
        insort(self._by_age, _age(request))

    requeue = push

    def peek(self, now_ns: int) -> ScheduledRequest | None:
        """Return the shortest request, or the oldest if an overdue request is to start."""
        if not self._waiting:
            return None
        waits_from_ns, rid = self._by_age[0]
        if self._starts_until_overdue or now_ns - waits_from_ns < self._patience_ns:
            if self._revision != self._predictor.revision:
                self._sort()
            rid = self._by_length[0][-1]
        self._next = rid
        return self._waiting[rid]

    def remove(self, request: ScheduledRequest) -> None:
        """Remove an admitted or cancelled request."""
        rid = request.rid
        if rid != self._next:
            pass  # a cancelled request starts nothing
        elif rid == self._by_length[0][-1]:
            self._starts_until_overdue = max(0, self._starts_until_overdue - 1)
        elif rid == self._by_age[0][-1]:
            self._starts_until_overdue = _STARTS_BETWEEN
        del self._waiting[rid]
        del self._by_length[bisect_left(self._by_length, self._keys.pop(rid))]
        del self._by_age[bisect_left(self._by_age, _age(request))]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (self._waiting[key[-1]] for key in self._by_length)

    def _key(self, request: ScheduledRequest) -> tuple[int, int, int]:
        tokens = request.input_tokens + self._predictor.output_tokens(request)
        return tokens, request.arrival_ns, request.rid

    def _sort(self) -> None:
        """Predict again after the predictor has learned."""
        self._revision = self._predictor.revision
        self._keys = {rid: self._key(request) for rid, request in self._waiting.items()}
        self._by_length = sorted(self._keys.values())


class SjfPolicy(SarathiPolicy):
    """`sarathi`, but the request with the fewest tokens starts first.

    Output lengths are predicted from finished outputs of the same class. A waiting request never
    displaces a longer running one. If blocks run out, the request with the most tokens left is
    evicted.

    A request that has waited for `ageing_ns` is overdue. Every fourth start is for the oldest
    overdue request. Requests that were overdue at admission are evicted last, so no request
    starves. All other starts are for the shortest request.

    Args:
        predictor: predicts output lengths; None for one that learns.
        ageing_ns: waiting time after which a request is overdue; None for 30 s.

    Source: Fu et al., "Efficient LLM Scheduling by Learning to Rank", NeurIPS 2024 (order by
    predicted length, and a bound of the waiting time against starvation). In the paper a model
    predicts the length from the prompt; this policy learns lengths while serving.
    """

    name: ClassVar[Policy] = Policy.SJF

    def __init__(
        self, *, predictor: LengthPredictor | None = None, ageing_ns: int | None = None
    ) -> None:
        self.predictor: LengthPredictor = LearnedLengths() if predictor is None else predictor
        self._patience_ns = _AGEING_NS if ageing_ns is None else ageing_ns

    @classmethod
    def configured(cls, settings: PolicySettings) -> Self:
        """Build the policy with the ageing time of a manifest."""
        return cls(ageing_ns=settings.ageing_ns)

    def new_queue(self) -> ShortestFirst:
        """Return a queue that is ordered by predicted tokens."""
        return ShortestFirst(self.predictor, self._patience_ns)

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The most tokens left first; requests that were overdue at admission last."""
        age = _age(request)
        if request.admitted_ns - age[0] >= self._patience_ns:
            return (0, *age)
        return (1, _left_tokens(request, self.predictor), *age)

    @property
    def prediction_error(self) -> PredictionError:
        """Error of the predictor."""
        return self.predictor.error

    def can_fast_forward(self) -> bool:
        """True unless a waiting request could start: its age may change the order."""
        view = self.view
        return not len(view.waiting) or view.num_running >= view.limits.max_num_seqs

    def after_step(self, outcome: StepOutcome) -> None:
        """Learn from the requests that ended."""
        for progress in outcome.progress:
            if progress.finish_reason is not None:
                self.predictor.learn(progress.request, self.view.running())

    def before_cancel(self, request: ScheduledRequest) -> None:
        """Learn that the output would have been longer."""
        self.predictor.censor(request)
