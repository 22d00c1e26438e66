"""Parts of `summary.json` that other packages compute: the client, the emulated fleet, sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

__all__ = [
    "ClientSummary",
    "EmulationSummary",
    "SenderSummary",
    "SessionsSummary",
    "StallSummary",
    "doc",
]


def doc(description: str) -> Meta:
    """Return the description of a field, for the schema and the tables of the docs."""
    return Meta(description=description)


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSummary:
    """A span in which the client's event loop did not run."""

    start_s: Annotated[float, doc("Start, seconds since time zero of the run.")]
    end_s: Annotated[float, doc("End, seconds since time zero of the run.")]
    stalled_s: Annotated[
        float,
        Meta(
            description="Time in the span during which the loop did not run, seconds; less than "
            "its length if several stalls were merged."
        ),
    ]
    sender: Annotated[int, doc("Number of the sender, as in records.parquet.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSummary:
    """One of several processes that sent the requests of a run."""

    shard: Annotated[
        int | None, doc("Number of the shard that it belongs to, from 1; null without shards.")
    ]
    requests: Annotated[int, doc("Requests that it recorded, warm-up requests included.")]
    cpu_s: Annotated[float, doc("Its CPU seconds.")]
    peak_in_flight: Annotated[int, doc("Maximum number of its requests in flight.")]
    loop_lag_p99_ms: Annotated[float, doc("p99 delay of its event loop, milliseconds.")]
    loop_lag_max_ms: Annotated[float, doc("Maximum delay of its event loop, milliseconds.")]
    clock_error_ms: Annotated[
        float | None,
        doc(
            "The kernel's bound on the error of the wall clock of its machine at the start; null "
            "if it is not known, and without shards."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSummary:
    """Resource usage of the client."""

    cpu_s: Annotated[float, doc("CPU seconds of all processes of the client.")]
    cpus: Annotated[int, doc("CPUs available to the client.")]
    peak_in_flight: Annotated[
        int,
        doc("Maximum number of requests in flight; of several senders, the sum of their maxima."),
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
        doc("The processes that sent the requests; empty if it was one process."),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationSummary:
    """Emulated fleet and its totals. The scheduler is real, the device is emulated."""

    device: Annotated[str, doc("Name of the device profile.")]
    device_note: Annotated[str, doc("Description of the device profile.")]
    illustrative: Annotated[bool, doc("True if the profile models no real device.")]
    replicas: Annotated[int, doc("Replicas at time zero of the run.")]
    topology: Annotated[
        str, doc("How replicas share the work; empty if each one prefills and decodes.")
    ]
    policy: Annotated[str, doc("Scheduling policy.")]
    oracle: Annotated[
        bool, doc("True if requests were scheduled by true length, which gives an upper bound.")
    ]
    preemption: Annotated[str, doc("How the KV blocks of preempted requests are recovered.")]
    placement: Annotated[str, doc("Placement policy.")]
    token_budget: Annotated[int, doc("Token budget of a step at the start of the run.")]
    max_num_seqs: Annotated[int, doc("Maximum number of running requests per replica.")]
    virtual_s: Annotated[
        float, doc("Virtual time from time zero to the end of the last request, seconds.")
    ]
    device_s: Annotated[float, doc("Device seconds used by all replicas.")]
    peak_replicas: Annotated[
        int,
        Meta(
            description="Maximum number of replicas, including starting and draining ones; 0 if "
            "interrupted."
        ),
    ]
    final_replicas: Annotated[int, doc("Replicas at the end, excluding draining ones.")]
    steps: Annotated[int, doc("Steps of all replicas.")]
    preemptions: Annotated[int, doc("Number of preemptions.")]
    recomputed_tokens: Annotated[int, doc("Tokens recomputed after preemptions.")]
    swapped_tokens: Annotated[int, doc("Tokens copied to host memory by preemptions.")]
    migrations: Annotated[int, doc("Completed live migrations of decoding requests.")]
    migrations_aborted: Annotated[int, doc("Aborted live migrations.")]
    migrated_blocks: Annotated[int, doc("KV blocks copied by completed and aborted migrations.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsSummary:
    """Order of the requests of sessions with --sessions causal, warm-up rows included."""

    starts: Annotated[int, Meta(description="Requests sent at their times in the trace.")]
    follow_ups: Annotated[
        int,
        Meta(
            description="Requests sent a think time after the end of the request that they follow."
        ),
    ]
    think_recorded: Annotated[
        int, Meta(description="Follow-ups with a recorded think time (delay_ms).")
    ]
    think_from_ends: Annotated[
        int,
        Meta(
            description="Follow-ups whose think time is that from the recorded end of the request "
            "before to their arrival."
        ),
    ]
    think_from_arrivals: Annotated[
        int,
        Meta(
            description="Follow-ups whose think time is that between both arrivals, which includes "
            "the unknown duration of the request before."
        ),
    ]
    overlapping: Annotated[
        int,
        Meta(
            description="Follow-ups without a recorded think time that arrived before the recorded "
            "end of the request before; sent at its end."
        ),
    ]
    without_parent: Annotated[
        int,
        Meta(description="Starts whose parent_request_id is not an earlier request of the plan."),
    ]
