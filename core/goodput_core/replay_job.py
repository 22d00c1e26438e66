"""Messages between a coordinator, such as the operator, and the replays that it runs as pods.

An armed shard serves its `ShardState` and accepts the instant at which it starts. A replay or a
merge leaves its `ReplayResult` as the termination message of its container. Both are JSON with the
names of a manifest, so they are decoded like one. Fields are part of the contract: add, but do not
rename. The comparison of a gate serves its `ABState` while it runs, and leaves a
`ABResult`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Final

from goodput_core.declaration import spec_field
from goodput_core.errors import SpecError
from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.codec import decode, encode
from goodput_core.units import NS_PER_S

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_START_SKEW_NS",
    "REASON_ERROR",
    "REASON_UNREACHABLE",
    "ABResult",
    "ABState",
    "ReplayResult",
    "ShardState",
    "decode_ab_result",
    "decode_message",
    "encode_message",
]

MAX_START_SKEW_NS: Final = NS_PER_S
"""Largest difference between the starts of shards; verdicts use the requests of each second."""
REASON_ERROR: Final = "Error"
"""Reason of a result without a verdict."""
REASON_UNREACHABLE: Final = "Unreachable"
"""Reason of a result without a verdict, because a target or a store could not be reached."""
_MAX_NS: Final = 2**63 - 1
MAX_MESSAGE_BYTES: Final = 4096
"""Length to which Kubernetes shortens a termination message."""
_MAX_MESSAGE: Final = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """State of an armed shard, which has prepared everything and waits for its start."""

    shard: int = spec_field("Number of the shard, from 1.", minimum=1)
    shards: int = spec_field("Number of shards.", minimum=1)
    requests: int = spec_field("Requests that the shard sends.", minimum=0)
    wall_ns: int = spec_field(
        "Time on the wall clock of its machine, nanoseconds since 1970.", minimum=0, maximum=_MAX_NS
    )
    clock_error_ns: int | None = spec_field(
        "The kernel's bound on the error of that clock; absent if it knows none.",
        default=None,
        minimum=0,
        maximum=_MAX_NS,
    )
    start_at_ns: int | None = spec_field(
        "Accepted start, nanoseconds since 1970; absent while the shard waits for one.",
        default=None,
        minimum=0,
        maximum=_MAX_NS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The end of a replay or a merge: its verdict, or the error that prevented one."""

    verdict: VerdictKind | None = spec_field("The verdict; absent after an error.", default=None)
    reason: str = spec_field(
        "Reason code of the verdict; `Error` or `Unreachable` after an error.", max_length=64
    )
    message: str = spec_field("The reason in a sentence.", max_length=_MAX_MESSAGE)
    valid: bool = spec_field("True if the measurement is valid.", default=False)
    requests: int = spec_field("Requests of the window, judged or not.", default=0, minimum=0)
    good: int = spec_field("Requests that met every target.", default=0, minimum=0)
    total: int = spec_field("Judged requests.", default=0, minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ABState:
    """Progress of a comparison, and its verdict so far."""

    pairs: int = spec_field("Recorded pairs of runs.", minimum=0)
    planned: int = spec_field("Pairs that are recorded before the next look.", minimum=1)
    verdict: VerdictKind | None = spec_field(
        "The verdict on the recorded pairs; absent before the first.", default=None
    )
    reason: str | None = spec_field("Its reason code.", default=None, max_length=64)
    interval: str | None = spec_field("As in the result.", default=None, max_length=160)


@dataclass(frozen=True, slots=True, kw_only=True)
class ABResult:
    """The end of a comparison: its verdict, or the error that prevented one."""

    verdict: VerdictKind | None = spec_field("The verdict; absent after an error.", default=None)
    reason: str = spec_field(
        "Reason code of the verdict; `Error` or `Unreachable` after an error.", max_length=64
    )
    message: str = spec_field("The reason in a sentence.", max_length=_MAX_MESSAGE)
    pairs: int = spec_field("Recorded pairs of runs.", default=0, minimum=0)
    interval: str | None = spec_field(
        "Difference to the baseline in the class that decided, with its bounds in percentage "
        "points.",
        default=None,
        max_length=160,
    )


def encode_message(result: ReplayResult | ABResult) -> str:
    """Return a result as a termination message, with its sentence shortened to fit."""
    message = result.message[:_MAX_MESSAGE]
    while True:
        text = json.dumps(encode(replace(result, message=message)), ensure_ascii=False)
        excess = len(text.encode()) - MAX_MESSAGE_BYTES
        if excess <= 0:
            return text
        # A character has at most six bytes in JSON.
        message = message[: -max(1, excess // 6)]


def decode_message(text: str) -> ReplayResult | None:
    """Return the result in a termination message; None if the message has another form."""
    try:
        return decode(ReplayResult, json.loads(text), "")
    except (ValueError, RecursionError, SpecError):
        return None


def decode_ab_result(text: str) -> ABResult | None:
    """Return the result in a termination message; None if the message has another form."""
    try:
        return decode(ABResult, json.loads(text), "")
    except (ValueError, RecursionError, SpecError):
        return None
