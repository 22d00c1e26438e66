"""`summary.json`: the result of a run, in a versioned schema for other programs.

The dataclasses here are the schema. `summary.schema.json` and docs/run-folder.md are generated
from them. Within one version fields are only added. `summary_builder` computes the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from goodput_core.errors import InputError
from goodput_core.files import write_atomically
from goodput_core.slo.intervals import IntervalMethod
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_replay.run.files import SUMMARY_FILE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "SUMMARY_VERSION",
    "ClassSummary",
    "ClientSummary",
    "EmulationSummary",
    "ErrorSummary",
    "IntervalSummary",
    "LengthPinning",
    "PromiseSummary",
    "Quantiles",
    "RunSummary",
    "Summary",
    "TargetSummary",
    "TraceSummary",
    "ValiditySummary",
    "VerdictSummary",
    "WindowSummary",
    "encode_summary",
    "read_summary",
    "schema_json",
    "write_summary",
]

SUMMARY_VERSION: Final = "1"
_MAX_BYTES: Final = 16 << 20


class LengthPinning(StrEnum):
    """How the true output length of a row reached the server."""

    HEADER = "header"
    """In a header that only the executor of Goodput's engine reads; hidden from its policies."""
    MAX_TOKENS = "max_tokens"
    """As `max_tokens` with `ignore_eos`, which the server's scheduler can read."""
    NONE = "none"
    """Not sent; the model decides where the output ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Nearest-rank quantiles of one metric, milliseconds."""

    count: Annotated[int, Meta(description="Number of requests, or of gaps for tbt_ms.")]
    p50: Annotated[float, Meta(description="Median, milliseconds.")]
    p90: Annotated[float, Meta(description="90th percentile, milliseconds.")]
    p95: Annotated[float, Meta(description="95th percentile, milliseconds.")]
    p99: Annotated[float, Meta(description="99th percentile, milliseconds.")]
    max: Annotated[float, Meta(description="Maximum, milliseconds.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSummary:
    """Two one-sided confidence bounds of an attainment."""

    lower: Annotated[float, Meta(description="Lower bound of the attainment, six decimals.")]
    upper: Annotated[float, Meta(description="Upper bound of the attainment, six decimals.")]
    confidence: Annotated[float, Meta(description="One-sided confidence of each bound.")]
    effective_requests: Annotated[
        float,
        Meta(description="Number of independent requests with the same attainment and variance."),
    ]
    method: Annotated[
        IntervalMethod,
        Meta(
            description="blocks: from the variance between blocks of seconds; exact: from "
            "independent requests, in a window of one second."
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseSummary:
    """SLO targets of one class."""

    name: Annotated[str, Meta(description="Class name.")]
    ttft_ms: Annotated[int, Meta(description="Target of the time to first token, milliseconds.")]
    tpot_ms: Annotated[int, Meta(description="Target of the time per output token, milliseconds.")]
    tbt_p99_ms: Annotated[
        int | None, Meta(description="Target of the p99 of one request's gaps, ms; null if none.")
    ]
    e2e_ms: Annotated[
        int | None, Meta(description="Target of the end-to-end latency, ms; null if none.")
    ]
    objective: Annotated[
        str | None,
        Meta(description="Exact share of requests that must be good, as '99%'; null if none."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSummary:
    """Results of one class, or of all classes together."""

    name: Annotated[
        str,
        Meta(description="Class name; empty for requests without a class and for all together."),
    ]
    requests: Annotated[int, Meta(description="All requests, judged or not.")]
    good: Annotated[int, Meta(description="Requests that met every target.")]
    total: Annotated[int, Meta(description="Judged requests: met or missed.")]
    attainment: Annotated[
        float | None, Meta(description="good / total, six decimals; null if total is 0.")
    ]
    interval: Annotated[
        IntervalSummary | None,
        Meta(description="Bounds of the attainment; null if total is 0, and for all together."),
    ] = None
    objective: Annotated[str | None, Meta(description="Objective of the class; null if none.")] = (
        None
    )
    verdict: Annotated[
        VerdictKind | None,
        Meta(description="PASS, FAIL or INCONCLUSIVE; null without an objective."),
    ] = None
    reason: Annotated[Reason | None, Meta(description="Reason code of the verdict.")] = None
    sentence: Annotated[str, Meta(description="Human-readable explanation; may be empty.")] = ""
    excluded: Annotated[int, Meta(description="Requests cancelled by the trace without a miss.")]
    unjudged: Annotated[
        int, Meta(description="Requests without a target, or with too little data.")
    ]
    outcomes: Annotated[
        dict[str, int],
        Meta(description="Requests by outcome: ok, shed, error, timeout, cancelled, unsent."),
    ]
    misses: Annotated[
        dict[str, int],
        Meta(
            description="Requests by reason of a miss: ttft, tpot, tbt, e2e, short, shed, error, "
            "timeout, unsent; one request may have several reasons."
        ),
    ]
    goodput_per_s: Annotated[float, Meta(description="good per second of the window.")]
    offered_per_s: Annotated[float, Meta(description="requests per second of the window.")]
    served_per_s: Annotated[
        float, Meta(description="Complete responses that ended in the window, per second.")
    ]
    input_tokens: Annotated[int, Meta(description="Prompt tokens of all sent requests.")]
    output_tokens: Annotated[int, Meta(description="Output tokens received.")]
    ttft_ms: Annotated[
        Quantiles | None, Meta(description="Time to first token from the scheduled arrival.")
    ]
    ttft_from_send_ms: Annotated[
        Quantiles | None, Meta(description="Time to first token from the actual send.")
    ]
    tpot_ms: Annotated[
        Quantiles | None, Meta(description="(last − first token) / (n − 1), for n > 1.")
    ]
    tbt_ms: Annotated[
        Quantiles | None,
        Meta(description="All gaps between tokens, to 0.1 %; null with --no-gaps."),
    ]
    e2e_ms: Annotated[
        Quantiles | None,
        Meta(description="End-to-end latency of complete responses from the scheduled arrival."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """One distinct error of judged requests."""

    outcome: Annotated[str, Meta(description="Outcome of these requests: error, shed, timeout …")]
    status: Annotated[int | None, Meta(description="HTTP status; null if there was no response.")]
    detail: Annotated[str, Meta(description="Recorded error message, control characters replaced.")]
    count: Annotated[int, Meta(description="Requests that ended with this error.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValiditySummary:
    """Validity of the measurement: the client sent every request, and on time."""

    valid: Annotated[bool, Meta(description="True if the run is valid.")]
    reason: Annotated[Reason | None, Meta(description="Reason code; null if the run is valid.")]
    sentence: Annotated[str, Meta(description="Human-readable explanation.")]
    lag_ms: Annotated[
        Quantiles | None,
        Meta(
            description="Send lag: actual minus scheduled send; null if nothing was sent, and in "
            "virtual time."
        ),
    ]
    lag_p99_limit_ms: Annotated[
        float,
        Meta(
            description="Largest p99 lag of a valid run: max(10, min(5 % of tightest TTFT, 100))."
        ),
    ]
    tightest_ttft_ms: Annotated[
        float | None, Meta(description="Smallest TTFT target of any request; null if none.")
    ]
    unsent_rows: Annotated[int, Meta(description="Rows of the window that were not sent.")]
    loop_lag_p99_ms: Annotated[
        float, Meta(description="p99 delay of the client's event loop, milliseconds.")
    ]
    loop_lag_max_ms: Annotated[
        float, Meta(description="Maximum delay of that event loop, milliseconds.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSummary:
    """Verdict of the run."""

    kind: Annotated[VerdictKind, Meta(description="PASS, FAIL, INCONCLUSIVE or INVALID.")]
    reason: Annotated[Reason, Meta(description="Stable reason code for scripts.")]
    sentence: Annotated[str, Meta(description="Human-readable explanation.")]
    skipped: Annotated[
        tuple[str, ...], Meta(description="Classes with an objective but no judged request.")
    ]
    runs: Annotated[
        int,
        Meta(description="Number of runs behind the verdict; 1 does not show run-to-run variance."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSummary:
    """Judged part of the run."""

    start_s: Annotated[
        float, Meta(description="Start of the window, seconds since the run's zero.")
    ]
    length_s: Annotated[float, Meta(description="Length of the window, seconds.")]
    rows_planned: Annotated[int, Meta(description="Rows of the trace in the window.")]
    rows_sent: Annotated[int, Meta(description="Rows of the window that were sent.")]
    warmup_rows: Annotated[
        int, Meta(description="Warm-up rows before the window, excluded from all results.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Replayed trace."""

    name: Annotated[str, Meta(description="File name.")]
    digest: Annotated[str, Meta(description="Digest of the file.")]
    source: Annotated[str, Meta(description="Source according to the metadata.")]
    licence: Annotated[str, Meta(description="Licence according to the metadata.")]
    clock: Annotated[str, Meta(description="Clock of the timestamps.")]
    synthetic: Annotated[bool, Meta(description="True if the trace was generated.")]
    transforms: Annotated[tuple[str, ...], Meta(description="Applied transforms, in order.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSummary:
    """Target server."""

    url: Annotated[str, Meta(description="Base URL, without credentials.")]
    endpoint: Annotated[str, Meta(description="API path.")]
    model: Annotated[str, Meta(description="Model name in the requests.")]
    service: Annotated[str, Meta(description="Name of the LLMService; empty with --target.")]
    pinning: Annotated[
        LengthPinning,
        Meta(description="How output lengths were pinned; max_tokens reveals them to the server."),
    ]
    header_names: Annotated[tuple[str, ...], Meta(description="Names of extra headers.")]
    streaming: Annotated[bool, Meta(description="True if responses were streamed.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSummary:
    """Resource usage of the client."""

    cpu_s: Annotated[float, Meta(description="CPU seconds of the client process.")]
    cpus: Annotated[int, Meta(description="CPUs available to the client.")]
    peak_in_flight: Annotated[int, Meta(description="Maximum number of requests in flight.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationSummary:
    """Emulated fleet and its totals; the real scheduler on a model of the device."""

    device: Annotated[str, Meta(description="Name of the device profile.")]
    device_note: Annotated[str, Meta(description="Description of the device profile.")]
    illustrative: Annotated[bool, Meta(description="True if the profile models no real device.")]
    replicas: Annotated[int, Meta(description="Replicas at the run's zero.")]
    topology: Annotated[
        str,
        Meta(description="How replicas share the work; empty if each one prefills and decodes."),
    ]
    policy: Annotated[str, Meta(description="Scheduling policy.")]
    oracle: Annotated[
        bool,
        Meta(description="True if requests were scheduled by true length: a bound, not a policy."),
    ]
    preemption: Annotated[
        str, Meta(description="How the KV blocks of preempted requests are recovered.")
    ]
    placement: Annotated[str, Meta(description="Placement policy.")]
    token_budget: Annotated[
        int, Meta(description="Token budget of a step at the start of the run.")
    ]
    max_num_seqs: Annotated[
        int, Meta(description="Maximum number of running requests per replica.")
    ]
    virtual_s: Annotated[
        float, Meta(description="Virtual time from zero to the end of the last request, seconds.")
    ]
    device_s: Annotated[float, Meta(description="Device seconds used by all replicas.")]
    peak_replicas: Annotated[
        int,
        Meta(
            description="Maximum number of replicas, including starting and draining ones; 0 if "
            "interrupted."
        ),
    ]
    final_replicas: Annotated[
        int, Meta(description="Replicas at the end, excluding draining ones.")
    ]
    steps: Annotated[int, Meta(description="Steps of all replicas.")]
    preemptions: Annotated[int, Meta(description="Number of preemptions.")]
    recomputed_tokens: Annotated[int, Meta(description="Tokens recomputed after preemptions.")]
    swapped_tokens: Annotated[int, Meta(description="Tokens copied to host memory by preemptions.")]
    migrations: Annotated[int, Meta(description="Completed live migrations of decoding requests.")]
    migrations_aborted: Annotated[int, Meta(description="Aborted live migrations.")]
    migrated_blocks: Annotated[
        int, Meta(description="KV blocks copied by completed and aborted migrations.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Command and start time of the run."""

    started_at: Annotated[
        str,
        Meta(
            description="Time of the run's zero, ISO 8601, UTC: wall clock, or in virtual time the "
            "trace's clock."
        ),
    ]
    goodput_version: Annotated[str, Meta(description="Goodput version.")]
    command: Annotated[tuple[str, ...], Meta(description="Command line without secrets.")]
    seed: Annotated[
        int, Meta(description="Seed of rate scaling and of an emulated fleet's random placement.")
    ]
    salt: Annotated[str, Meta(description="Salt of the prompts; empty in virtual time.")]
    complete: Annotated[
        bool, Meta(description="False if the run was interrupted or aborted, or the disk was full.")
    ]
    abort_reason: Annotated[
        str, Meta(description="Why the run is incomplete; empty if it is complete.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run's summary.json."""

    version: Annotated[str, Meta(description="Version of this schema.")]
    verdict: Annotated[VerdictSummary, Meta(description="Verdict of the run.")]
    validity: Annotated[ValiditySummary, Meta(description="Validity of the run.")]
    overall: Annotated[ClassSummary, Meta(description="Results of all classes together.")]
    classes: Annotated[
        tuple[ClassSummary, ...], Meta(description="Results per class, classes with targets first.")
    ]
    window: Annotated[WindowSummary, Meta(description="Judged part of the run.")]
    run: Annotated[RunSummary, Meta(description="Command and start time of the run.")]
    trace: Annotated[TraceSummary, Meta(description="Replayed trace.")]
    target: Annotated[TargetSummary, Meta(description="Target server.")]
    promises: Annotated[tuple[PromiseSummary, ...], Meta(description="SLO targets per class.")]
    default_class: Annotated[
        str | None, Meta(description="Class of requests that name none; null if there is none.")
    ]
    client: Annotated[ClientSummary, Meta(description="Resource usage of the client.")]
    emulation: Annotated[
        EmulationSummary | None,
        Meta(description="Emulated fleet and its totals; null in real time."),
    ] = None
    errors: Annotated[
        tuple[ErrorSummary, ...],
        Meta(description="Distinct errors of judged requests, most frequent first, at most 10."),
    ] = ()
    other_errors: Annotated[
        int, Meta(description="Requests that ended with an error not listed in errors.")
    ] = 0


def encode_summary(summary: Summary) -> bytes:
    """Encode a summary as indented JSON with a trailing newline."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def write_summary(folder: Path, summary: Summary) -> None:
    """Write `summary.json` atomically.

    Raises:
        OSError: the file could not be written.
    """
    write_atomically(folder / SUMMARY_FILE, encode_summary(summary))


def read_summary(folder: Path) -> Summary:
    """Read the summary of a run.

    Raises:
        InputError: the file is missing, truncated, not a summary, or of a later version.
    """
    path = folder / SUMMARY_FILE
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise InputError(f"{path}: {size} bytes are no summary of a run; replay again")
        data = path.read_bytes()
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise InputError(f"{path}: {why}; give the folder of a finished run") from error
    try:
        found = msgspec.json.decode(data, type=_Versioned).version
        if found != SUMMARY_VERSION:
            raise InputError(
                f"{path}: a summary of version {found[:20]!r}, and this Goodput reads version "
                f"{SUMMARY_VERSION}; use the Goodput that wrote it"
            )
        return msgspec.json.decode(data, type=Summary)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a run's summary ({error}); replay again") from error


def schema_json() -> bytes:
    """Return the JSON Schema of `summary.json`, as shipped in `summary.schema.json`."""
    schema = msgspec.json.schema(Summary)
    titled = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return msgspec.json.format(msgspec.json.encode(titled), indent=2) + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Versioned:
    version: str
