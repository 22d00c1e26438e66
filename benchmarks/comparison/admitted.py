"""The admitted requests of `slo`, counted apart where their targets can be ensured.

A scheduler can ensure an end-to-end (E2E) target if an idle engine meets it even with the longest
output that the request may have. It can ensure all other targets. For the other requests, `slo`
predicts the chance to be in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.steptime import StepShape
from goodput_engine.scheduler.policies.slo.policy import SloPolicy
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_engine.device.profile import DeviceProfile
    from goodput_engine.scheduler.admission import Rejection, Removal
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["Admitted", "PredictingSloPolicy", "is_ensurable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The requests that `slo` admitted, counted apart.

    Args:
        sure, sure_kept: requests whose targets could be ensured, and those of them in time.
        others, others_kept: the other requests, and those of them in time.
        predicted: sum of the chances of the others at their admission.
    """

    sure: int = 0
    sure_kept: int = 0
    others: int = 0
    others_kept: int = 0
    predicted: float = 0.0

    @property
    def sure_share(self) -> float:
        """Share in time of the requests whose targets could be ensured; 1 without any."""
        return self.sure_kept / self.sure if self.sure else 1.0

    @property
    def difference(self) -> float:
        """Share of the others that were in time, less the predicted share; 0 without any."""
        return (self.others_kept - self.predicted) / self.others if self.others else 0.0

    @property
    def kept_share(self) -> float:
        """Share of all admitted requests that were in time; 1 without any."""
        admitted = self.sure + self.others
        return (self.sure_kept + self.others_kept) / admitted if admitted else 1.0

    def plus(self, other: Admitted) -> Admitted:
        """Add the requests of another run."""
        return Admitted(
            sure=self.sure + other.sure,
            sure_kept=self.sure_kept + other.sure_kept,
            others=self.others + other.others,
            others_kept=self.others_kept + other.others_kept,
            predicted=self.predicted + other.predicted,
        )


def is_ensurable(
    profile: DeviceProfile, *, prompt_tokens: int, output_limit: int | None, e2e_ns: int | None
) -> bool:
    """Return True if an idle device meets the E2E target even with the longest output.

    Args:
        profile: the device.
        prompt_tokens: length of the prompt.
        output_limit: limit of the output; None for the model's.
        e2e_ns: the target; None for none.
    """
    if e2e_ns is None:
        return True
    limit = profile.max_model_tokens - prompt_tokens if output_limit is None else output_limit
    prompt = StepShape.of(chunks=[(0, prompt_tokens)])
    decode = StepShape.of(decodes=1, decode_context_tokens=prompt_tokens + limit // 2)
    longest_ns = profile.form.step_ns(prompt) + (limit - 1) * profile.form.step_ns(decode)
    return longest_ns <= e2e_ns


class PredictingSloPolicy(SloPolicy):
    """`slo` with a record of the chance of each admitted request.

    Args:
        chances: receives the chance to meet the E2E target, by rid.
        counts: returns True for a request whose chance is recorded; None for all requests.
    """

    def __init__(
        self,
        chances: dict[int, float],
        counts: Callable[[ScheduledRequest], bool] | None = None,
    ) -> None:
        super().__init__()
        self._chances = chances
        self._counts = counts
        self._open: dict[int, float] = {}
        """Chances of the undecided requests before the last step; they may start in it."""

    def reject(self, request: ScheduledRequest) -> Rejection | None:
        """Decide as `slo` does."""
        rejection = super().reject(request)
        if rejection is None and request.rid not in self._undecided.by_rid:
            self._record(self._chances, request)
        return rejection

    def waiting_to_reject(self) -> Iterable[Removal]:
        """Decide as `slo` does on the requests that wait for it."""
        waited = dict(self._undecided.by_rid)
        for rid, request in waited.items():
            if request.state is not RequestState.WAITING and rid in self._open:
                self._chances[rid] = self._open[rid]
        for removal in super().waiting_to_reject():
            self._chances.pop(removal.request.rid, None)
            yield removal
        self._open.clear()
        for rid, request in waited.items():
            if request.state is RequestState.WAITING:
                is_open = rid in self._undecided.by_rid
                self._record(self._open if is_open else self._chances, request)

    def displaced_waiting(self, request: ScheduledRequest) -> Iterable[Removal]:
        """Return the requests that `slo` displaces, which are no longer admitted."""
        for removal in super().displaced_waiting(request):
            self._chances.pop(removal.request.rid, None)
            yield removal

    def _record(self, chances: dict[int, float], request: ScheduledRequest) -> None:
        if self._counts is None or self._counts(request):
            chances[request.rid] = self._admission.chance(request, self._look())
