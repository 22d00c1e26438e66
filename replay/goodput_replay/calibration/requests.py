"""The requests of a run, as far as they show what the server computed.

Only the times at which tokens arrived are used, so the server may be of any kind. A run that cannot
show them is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from goodput_core.errors import InputError
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_US
from goodput_replay.runs.record_rows import read_judged
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ObservedRequest", "read_requests"]

_MIN_REQUESTS: Final = 50
_MAX_REQUESTS: Final = 50_000
_MAX_TOKENS: Final = 20_000_000
# Shares of a run, in percent, from which its tokens no longer show the steps of the server.
_MAX_FAILED_PERCENT: Final = 5
_MAX_CACHED_PERCENT: Final = 5
_MAX_JOINED_PERCENT: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedRequest:
    """A request whose tokens arrived.

    Args:
        record: the record of the run.
        arrival_ns: time of the send.
        prompt_tokens: prompt tokens, as counted by the server if it reports them.
        cached_tokens: prompt tokens that were not computed.
        times_ns: arrival times of the tokens, `[num_tokens]`, at least one.
    """

    record: RequestRecord
    arrival_ns: int
    prompt_tokens: int
    cached_tokens: int
    times_ns: NDArray[np.int64]


def read_requests(folder: Path) -> list[ObservedRequest]:
    """Return the requests of a run with tokens, in the order of arrival, at most the first 50,000.

    Raises:
        InputError: the run is invalid or unreadable, or its records do not show the server's steps.
    """
    summary = read_summary(folder)
    if not summary.validity.valid:
        raise InputError(
            f"{folder}: the run is INVALID ({summary.validity.sentence}); replay again"
        )
    if not summary.target.streaming:
        raise InputError(
            f"{folder}: the responses were not streamed, so the times of tokens are unknown; "
            "replay with streaming"
        )
    requests: list[ObservedRequest] = []
    tokens = total = failed = joined = 0
    for record, _ in read_judged(folder):
        total += 1
        times_ns = _token_times(record)
        if times_ns is None:
            failed += record.outcome in {Outcome.ERROR, Outcome.TIMEOUT}
            continue
        joined += record.output_tokens - len(times_ns)
        tokens += record.output_tokens
        if tokens > _MAX_TOKENS:
            raise InputError(
                f"{folder}: the run has more than {_MAX_TOKENS:,} tokens; replay a shorter --window"
            )
        assert record.sent_ns is not None
        prompt = record.reported_input_tokens or record.input_tokens
        requests.append(
            ObservedRequest(
                record=record,
                arrival_ns=record.sent_ns,
                prompt_tokens=max(1, prompt),
                cached_tokens=min(record.cached_tokens or 0, max(0, prompt - 1)),
                times_ns=times_ns,
            )
        )
    _require_usable(folder, requests, total=total, failed=failed, tokens=tokens, joined=joined)
    requests.sort(key=lambda one: one.arrival_ns)
    return requests[:_MAX_REQUESTS]


def _require_usable(
    folder: Path,
    requests: list[ObservedRequest],
    *,
    total: int,
    failed: int,
    tokens: int,
    joined: int,
) -> None:
    several = sum(len(one.times_ns) > 1 for one in requests)
    if several < _MIN_REQUESTS:
        if joined and sum(one.record.output_tokens > 1 for one in requests) >= _MIN_REQUESTS:
            raise InputError(
                f"{folder}: the records have no gaps between tokens; replay without --no-gaps"
            )
        raise InputError(
            f"{folder}: {several} requests received two tokens or more; a calibration needs "
            f"{_MIN_REQUESTS}: replay a longer window"
        )
    if failed * 100 > total * _MAX_FAILED_PERCENT:
        raise InputError(
            f"{folder}: {failed} of {total} requests failed or timed out, and how long the server "
            "computed them is unknown; replay a lower load"
        )
    if joined * 100 > tokens * _MAX_JOINED_PERCENT:
        raise InputError(
            f"{folder}: the server sent {joined:,} of {tokens:,} tokens together with others, so "
            "its steps cannot be distinguished; configure it to stream each token"
        )
    cached = sum(one.cached_tokens for one in requests)
    prompts = sum(one.prompt_tokens for one in requests)
    if cached * 100 > prompts * _MAX_CACHED_PERCENT:
        raise InputError(
            f"{folder}: the server found {cached:,} of {prompts:,} prompt tokens in its prefix "
            "cache; replay prompts without common prefixes, or disable the cache"
        )


def _token_times(record: RequestRecord) -> NDArray[np.int64] | None:
    """Return the times of a request's tokens; None if none arrived."""
    first_ns, last_ns = record.first_token_ns, record.last_token_ns
    if first_ns is None or last_ns is None or record.sent_ns is None:
        return None
    gaps = np.fromiter(record.gaps_us, dtype=np.int64, count=len(record.gaps_us))
    offsets = np.concatenate(([0], np.cumsum(gaps))) * NS_PER_US
    if offsets[-1] > 0:
        # Gaps are rounded to microseconds.
        offsets = np.round(offsets * ((last_ns - first_ns) / offsets[-1])).astype(np.int64)
    times: NDArray[np.int64] = first_ns + offsets
    return times
