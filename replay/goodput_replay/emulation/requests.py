"""Request records, prompt block keys and deadlines in virtual time."""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_US
from goodput_engine.openai.errors import error_body
from goodput_replay.sending.client.chunks import status_sentence
from goodput_replay.sending.client.stream import ResponseReader

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from numpy.typing import NDArray

    from goodput_core.slo.conformance import Deviation
    from goodput_engine.openai.errors import APIError
    from goodput_replay.plan import PlannedRequest, PromptKey

__all__ = ["NO_TIMES", "Deadlines", "block_keys", "make_record", "make_rejected_record"]

_MAX_GAP_US: Final = 2**31 - 1
NO_TIMES: Final[NDArray[np.int64]] = np.empty(0, dtype=np.int64)
"""Token times of a request without tokens."""


def make_record(
    planned: PlannedRequest,
    outcome: Outcome,
    end_ns: int,
    *,
    times: NDArray[np.int64] = NO_TIMES,
    replica: str = "",
    cached_tokens: int | None = None,
    status: int | None = None,
    detail: str = "",
    deviations: tuple[Deviation, ...] = (),
) -> RequestRecord:
    """Return the record of a request that was sent exactly at its scheduled arrival.

    Args:
        planned: the request.
        outcome: outcome of the request.
        end_ns: end time.
        times: token times, shape `[num_tokens]`.
        replica: name of the replica that served the request; empty if no replica did.
        cached_tokens: prompt tokens found in the prefix cache; None if unknown.
        status: HTTP status that a server would respond with; None for 200 with the first token.
        detail: error message.
        deviations: ways in which the response does not conform to the request.
    """
    tokens = len(times)
    return RequestRecord(
        request_id=planned.request_id,
        slo_class=planned.slo_class,
        scheduled_ns=planned.scheduled_ns,
        outcome=outcome,
        sent_ns=planned.scheduled_ns,
        first_token_ns=int(times[0]) if tokens else None,
        last_token_ns=int(times[-1]) if tokens else None,
        end_ns=end_ns,
        gaps_us=_gaps_us(times) if tokens > 1 else (),
        input_tokens=planned.prompt.input_tokens,
        output_tokens=tokens,
        pinned_output_tokens=planned.output_tokens,
        targets=planned.targets,
        cancel_after_ns=planned.cancel_after_ns,
        status=200 if status is None and tokens else status,
        detail=detail,
        replica=replica,
        cached_tokens=cached_tokens,
        deviations=deviations,
    )


def make_rejected_record(
    planned: PlannedRequest,
    error: APIError,
    end_ns: int,
    *,
    times: NDArray[np.int64] = NO_TIMES,
    replica: str = "",
) -> RequestRecord:
    """Return the record that a client makes of an error of the engine or the router.

    After the first token, the error is the last event of the stream.

    Args:
        planned: the request.
        error: the error.
        end_ns: end time.
        times: token times, shape `[num_tokens]`.
        replica: name of the replica that reported the error; empty for the router.
    """
    body = error_body(error)
    status, detail = error.status, status_sentence(error.status, None, body)
    deviations: tuple[Deviation, ...] = ()
    if len(times):
        reader = ResponseReader()
        reader.fail(body)
        status, detail, deviations = 200, reader.failure or "", reader.deviations
    return make_record(
        planned,
        Outcome.SHED if error.retry_after_s else Outcome.ERROR,
        end_ns,
        times=times,
        replica=replica,
        status=status,
        detail=detail,
        deviations=deviations,
    )


def _gaps_us(times: NDArray[np.int64]) -> array[int]:
    """Return the gaps between tokens in whole microseconds, as a client measures them."""
    gaps = np.minimum((times[1:] - times[:-1]) // NS_PER_US, _MAX_GAP_US)
    gaps_us = array("i")
    gaps_us.frombytes(gaps.astype(np.int32).tobytes())
    return gaps_us


_BYTES: Final = 8
# An odd constant with random bits, so that keys differ within a chain and between chains.
_STRIDE: Final = np.uint64(0x9E3779B97F4A7C15)


def block_keys(prompt: PromptKey, block_size: int) -> Sequence[int]:
    """Return one unsigned 64-bit key for each full block of a prompt.

    Args:
        prompt: length, request id and prefix hashes of the prompt.
        block_size: tokens per block of the engine, which can differ from the trace's block size.
    """
    blocks = prompt.input_tokens // block_size
    shared = 0
    if prompt.hashes:
        hashed_tokens = min(prompt.input_tokens, len(prompt.hashes) * prompt.block_size)
        shared = hashed_tokens // block_size
    digest = blake2b(prompt.request_id.encode(), digest_size=_BYTES).digest()
    first_key = int.from_bytes(digest, "little")
    # No other request shares these blocks (this one can reuse them after a preemption), so
    # consecutive numbers suffice as keys.
    first_key >>= 1
    unshared_keys = range(first_key + shared, first_key + blocks)
    if not shared:
        return unshared_keys
    return [*_shared_keys(prompt, block_size, shared), *unshared_keys]


def _shared_keys(prompt: PromptKey, block_size: int, count: int) -> list[int]:
    """Return the keys of the first `count` blocks, which the trace's hashes cover."""
    positions: NDArray[np.int64] = np.arange(1, count + 1)
    covering = -(-positions * block_size // prompt.block_size) - 1
    chain: list[int] = []
    previous = b""
    for trace_hash in prompt.hashes[: int(covering[-1]) + 1]:
        previous = blake2b(previous + str(trace_hash).encode(), digest_size=_BYTES).digest()
        chain.append(int.from_bytes(previous, "little"))
    keys = np.array(chain, dtype=np.uint64)[covering] + positions.astype(np.uint64) * _STRIDE
    shared_keys: list[int] = keys.tolist()
    return shared_keys


class Deadlines:
    """Timeouts and cancellations of live requests.

    Requests time out in the order of their arrivals, so a queue suffices for timeouts. A heap is
    needed only for cancellations.

    Args:
        timeout_ns: time limit from each scheduled arrival.
    """

    __slots__ = ("_cancels", "_timeout_ns", "_timeouts")

    def __init__(self, timeout_ns: int) -> None:
        self._timeout_ns = timeout_ns
        self._timeouts: deque[tuple[int, int]] = deque()
        self._cancels: list[tuple[int, int]] = []

    def add(self, planned: PlannedRequest, rid: int) -> None:
        """Add a request; requests are added in the order of their arrival."""
        cancel_ns = planned.cancel_after_ns
        if cancel_ns is not None and cancel_ns < self._timeout_ns:
            heapq.heappush(self._cancels, (planned.scheduled_ns + cancel_ns, rid))
        else:
            self._timeouts.append((planned.scheduled_ns + self._timeout_ns, rid))

    def next_ns(self, live: Container[int]) -> int | None:
        """Return the next timeout or cancellation of a live request; None if there is none.

        An entry of an ended request is removed when all entries before it are removed.
        """
        timeouts, cancels = self._timeouts, self._cancels
        while timeouts and timeouts[0][1] not in live:
            timeouts.popleft()
        while cancels and cancels[0][1] not in live:
            heapq.heappop(cancels)
        if not cancels:
            return timeouts[0][0] if timeouts else None
        return cancels[0][0] if not timeouts else min(cancels[0][0], timeouts[0][0])

    def take(self, now_ns: int) -> list[tuple[int, Outcome]]:
        """Remove and return the requests that are cancelled or time out; some may have ended."""
        due: list[tuple[int, Outcome]] = []
        while self._cancels and self._cancels[0][0] <= now_ns:
            due.append((heapq.heappop(self._cancels)[1], Outcome.CANCELLED))
        while self._timeouts and self._timeouts[0][0] <= now_ns:
            due.append((self._timeouts.popleft()[1], Outcome.TIMEOUT))
        return due
