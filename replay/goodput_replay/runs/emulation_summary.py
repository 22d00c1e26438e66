"""The emulated fleet's part of `summary.json`: its settings, its device seconds and its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

__all__ = ["EmulationSummary"]


def _doc(description: str) -> Meta:
    return Meta(description=description)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationSummary:
    """Emulated fleet and its totals. The scheduler is real, the device is emulated."""

    device: Annotated[str, _doc("Name of the device profile.")]
    device_note: Annotated[str, _doc("Description of the device profile.")]
    illustrative: Annotated[bool, _doc("True if the profile models no real device.")]
    replicas: Annotated[int, _doc("Replicas at time zero of the run.")]
    topology: Annotated[
        str, _doc("How replicas share the work; empty if each one prefills and decodes.")
    ]
    policy: Annotated[str, _doc("Scheduling policy.")]
    oracle: Annotated[
        bool, _doc("True if requests were scheduled by true length, which gives an upper bound.")
    ]
    preemption: Annotated[str, _doc("How the KV blocks of preempted requests are recovered.")]
    placement: Annotated[str, _doc("Placement policy.")]
    token_budget: Annotated[int, _doc("Token budget of a step at the start of the run.")]
    max_num_seqs: Annotated[int, _doc("Maximum number of running requests per replica.")]
    virtual_s: Annotated[
        float, _doc("Virtual time from time zero to the end of the last request, seconds.")
    ]
    device_s: Annotated[float, _doc("Device seconds used by all replicas.")]
    peak_replicas: Annotated[
        int,
        Meta(
            description="Maximum number of replicas, including starting and draining ones; 0 if "
            "interrupted."
        ),
    ]
    final_replicas: Annotated[int, _doc("Replicas at the end, excluding draining ones.")]
    steps: Annotated[int, _doc("Steps of all replicas.")]
    preemptions: Annotated[int, _doc("Number of preemptions.")]
    recomputed_tokens: Annotated[int, _doc("Tokens recomputed after preemptions.")]
    swapped_tokens: Annotated[int, _doc("Tokens copied to host memory by preemptions.")]
    migrations: Annotated[int, _doc("Completed live migrations of decoding requests.")]
    migrations_aborted: Annotated[int, _doc("Aborted live migrations.")]
    migrated_blocks: Annotated[int, _doc("KV blocks copied by completed and aborted migrations.")]
