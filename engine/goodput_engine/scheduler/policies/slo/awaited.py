"""Prefix hits of waiting requests: those on prompts that are still being computed, too.

The prefix cache holds only what has been computed. Of several requests with the same prefix that
arrive together, the first one computes it. The others start after that, and find it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.scheduler.policies.slo.forecast import Forecast
    from goodput_engine.scheduler.policies.slo.prompts import Prompt
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["AwaitedPrefixes"]

_COMPUTING: Final = (RequestState.WAITING, RequestState.PREFILLING)
_ENDED: Final = (RequestState.FINISHED, RequestState.CANCELLED)
_MOST_HASHES: Final = 1 << 16
"""Hashes that are kept before those of computed prompts are removed."""


class AwaitedPrefixes:
    """The full blocks of admitted prompts that are not in the prefix cache yet.

    Args:
        view: the scheduler.
    """

    __slots__ = ("_computes", "_limit", "_view")

    def __init__(self, view: SchedulerView) -> None:
        self._view = view
        self._computes: dict[int, ScheduledRequest] = {}
        """By the hash of a block: the request that computes it."""
        self._limit = _MOST_HASHES

    def expect(self, request: ScheduledRequest) -> None:
        """Predict the prefix hits of a request that has not started."""
        size, hashes = self._view.block_size, request.block_hashes
        self._view.expect_hits(request)
        begin = at = request.cached_tokens // size
        # The last token of a prompt is always computed.
        end = min(len(hashes), (request.input_tokens - 1) // size)
        while at < end:
            other = self._computes.get(hashes[at])
            if other is None or not _precedes(other, request):
                break
            at += 1
        request.awaited_tokens = (at - begin) * size

    def add(self, request: ScheduledRequest) -> None:
        """Add a request that is admitted and has not started."""
        computes, hashes = self._computes, request.block_hashes
        begin = request.expected_hits // self._view.block_size
        for at in range(begin, len(hashes)):
            computes[hashes[at]] = request
        if len(computes) > self._limit:
            left = {key: other for key, other in computes.items() if other.state in _COMPUTING}
            self._computes, self._limit = left, max(_MOST_HASHES, 2 * len(left))

    def to_start(self, prompts: Iterable[Prompt], forecast: Forecast) -> list[ScheduledRequest]:
        """Return the requests of these prompts that wait, without those whose prefix is computed.

        They start when another request has computed it. That one is due first.
        """
        return [
            prompt.request
            for prompt in prompts
            if prompt.request.state is RequestState.WAITING
            and not self._is_computed(prompt.request, forecast)
        ]

    def _is_computed(self, request: ScheduledRequest, forecast: Forecast) -> bool:
        """Return True if another request still computes a part of a prompt.

        Nothing more is expected of one that has ended, is late, or was evicted.
        """
        if not request.awaited_tokens:
            return False
        end = request.expected_hits // self._view.block_size
        last = request.block_hashes[end - 1]
        if self._view.is_cached(last):
            return False
        other = self._computes.get(last)
        evicted = (
            other is not None and other.state is RequestState.WAITING and other.admitted_tokens
        )
        if other is None or evicted or other.state in _ENDED or other.rid in forecast.lost:
            request.awaited_tokens = 0
            return False
        return True


def _precedes(other: ScheduledRequest, request: ScheduledRequest) -> bool:
    """Return True if the prompt of another request is computed before that of a new one."""
    if other is request or other.state not in _COMPUTING or other.priority < request.priority:
        return False
    return _due_ns(other) <= _due_ns(request)


def _due_ns(request: ScheduledRequest) -> float:
    targets = request.targets
    limits = [limit for limit in (targets.ttft_ns, targets.e2e_ns) if limit is not None]
    return request.arrival_ns + min(limits, default=float("inf"))
