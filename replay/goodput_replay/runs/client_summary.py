"""The client's part of `summary.json`: its processes, their resource usage and their stalls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

__all__ = ["ClientSummary", "SenderSummary", "StallSummary"]


def _doc(description: str) -> Meta:
    return Meta(description=description)


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSummary:
    """A span in which the client's event loop did not run."""

    start_s: Annotated[float, _doc("Start, seconds since time zero of the run.")]
    end_s: Annotated[float, _doc("End, seconds since time zero of the run.")]
    stalled_s: Annotated[
        float,
        Meta(
            description="Time in the span during which the loop did not run, seconds; less than "
            "its length if several stalls were merged."
        ),
    ]
    sender: Annotated[int, _doc("Number of the sender, as in records.parquet.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSummary:
    """One of several processes that sent the requests of a run."""

    shard: Annotated[
        int | None, _doc("Number of the shard that it belongs to, from 1; null without shards.")
    ]
    requests: Annotated[int, _doc("Requests that it recorded, warm-up requests included.")]
    cpu_s: Annotated[float, _doc("Its CPU seconds.")]
    peak_in_flight: Annotated[int, _doc("Maximum number of its requests in flight.")]
    loop_lag_p99_ms: Annotated[float, _doc("p99 delay of its event loop, milliseconds.")]
    loop_lag_max_ms: Annotated[float, _doc("Maximum delay of its event loop, milliseconds.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSummary:
    """Resource usage of the client."""

    cpu_s: Annotated[float, _doc("CPU seconds of all processes of the client.")]
    cpus: Annotated[int, _doc("CPUs available to the client.")]
    peak_in_flight: Annotated[
        int,
        _doc("Maximum number of requests in flight; of several senders, the sum of their maxima."),
    ]
    stalls: Annotated[
        tuple[StallSummary, ...],
        Meta(
            description="Stalls of the event loop of at least 10 ms, in order; at most 1,000 of "
            "each sender, beyond which neighbours are merged."
        ),
    ] = ()
    senders: Annotated[
        tuple[SenderSummary, ...],
        _doc("The processes that sent the requests; empty if it was one process."),
    ] = ()
