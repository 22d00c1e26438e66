"""Request records."""

from __future__ import annotations

from typing import Any

from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_MS

__all__ = ["finished_request", "request_record"]


def request_record(**fields: Any) -> RequestRecord:
    """Return a record with an id, no class and the outcome OK; `fields` replace these."""
    least: dict[str, Any] = {
        "request_id": "r",
        "slo_class": "",
        "scheduled_ns": 0,
        "outcome": Outcome.OK,
    }
    return RequestRecord(**(least | fields))


def finished_request(
    *,
    scheduled_ns: int = 0,
    ttft_ms: float = 100,
    tpot_ms: float = 10,
    tokens: int = 11,
    lag_ms: float = 0,
    **fields: Any,
) -> RequestRecord:
    """Return a complete request of class chat; `fields` replace those of the record.

    Args:
        scheduled_ns: when the request was due.
        ttft_ms: time to the first token, from `scheduled_ns`.
        tpot_ms: time per output token after the first.
        tokens: length of the output.
        lag_ms: send lag.
        fields: any other field of the record.
    """
    first_ns = scheduled_ns + round(ttft_ms * NS_PER_MS)
    last_ns = first_ns + round(tpot_ms * NS_PER_MS) * (tokens - 1)
    times: dict[str, Any] = {
        "slo_class": "chat",
        "scheduled_ns": scheduled_ns,
        "sent_ns": scheduled_ns + round(lag_ms * NS_PER_MS),
        "first_token_ns": first_ns,
        "last_token_ns": last_ns,
        "end_ns": last_ns,
        "output_tokens": tokens,
    }
    return request_record(**(times | fields))
