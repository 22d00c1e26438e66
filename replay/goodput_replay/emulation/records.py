"""From what happened to a request in virtual time to the record that every judge reads."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_US

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from goodput_replay.plan import PlannedRequest

__all__ = ["record_of"]

_MAX_GAP_US: Final = 2**31 - 1
_NOTHING: Final[NDArray[np.int64]] = np.empty(0, dtype=np.int64)


def record_of(
    planned: PlannedRequest,
    outcome: Outcome,
    end_ns: int,
    *,
    times: NDArray[np.int64] = _NOTHING,
    replica: str = "",
    cached_tokens: int | None = None,
    detail: str = "",
) -> RequestRecord:
    """The record of a request.

    Args:
        planned: it; sent exactly when scheduled.
        outcome: how it ended.
        end_ns: when.
        times: of its tokens, shape `[num_tokens]`.
        replica: who served it; empty: nobody.
        cached_tokens: prompt tokens found in the prefix cache; None: unknown.
        detail: what went wrong.
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
        detail=detail,
        replica=replica,
        cached_tokens=cached_tokens,
    )


def _gaps_us(times: NDArray[np.int64]) -> array[int]:
    """Whole microseconds between tokens, as a client that stamps them would count."""
    gaps = np.minimum((times[1:] - times[:-1]) // NS_PER_US, _MAX_GAP_US)
    found = array("i")
    found.frombytes(gaps.astype(np.int32).tobytes())
    return found
