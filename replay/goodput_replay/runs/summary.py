"""`summary.json`: the result of a run, in a versioned schema for other programs.

The dataclasses here are the schema. `summary.schema.json` and docs/run-folder.md are generated
from them. Within one version fields are only added. `summary_builder` computes the values.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from goodput_core.errors import InputError
from goodput_core.files import write_atomically
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.intervals import IntervalMethod
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_replay.runs.files import SUMMARY_FILE
from goodput_replay.runs.json_results import encode_json
from goodput_replay.runs.length_pinning import LengthPinning
from goodput_replay.runs.prompt_kind import PromptKind
from goodput_replay.runs.summary_parts import (
    ClientSummary,
    EmulationSummary,
    SenderSummary,
    SessionsSummary,
    StallSummary,
    doc,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "SUMMARY_VERSION",
    "ClassSummary",
    "ClientSummary",
    "DeviationSummary",
    "EmulationSummary",
    "ErrorSummary",
    "IntervalSummary",
    "LengthPinning",
    "PromptKind",
    "PromptTokensSummary",
    "Quantiles",
    "RunSummary",
    "SLOSummary",
    "SenderSummary",
    "SessionsSummary",
    "ShardSummary",
    "StallSummary",
    "Summary",
    "TargetSummary",
    "TraceSummary",
    "ValiditySummary",
    "VerdictSummary",
    "WindowSummary",
    "read_summary",
    "write_summary",
]

SUMMARY_VERSION: Final = "1"
_MAX_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Nearest-rank quantiles of one metric, milliseconds."""

    count: Annotated[int, doc("Number of requests, or of gaps for tbt_ms.")]
    p50: Annotated[float, doc("Median, milliseconds.")]
    p90: Annotated[float, doc("90th percentile, milliseconds.")]
    p95: Annotated[float, doc("95th percentile, milliseconds.")]
    p99: Annotated[float, doc("99th percentile, milliseconds.")]
    max: Annotated[float, doc("Maximum, milliseconds.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSummary:
    """Two one-sided confidence bounds of an attainment."""

    lower: Annotated[float, doc("Lower bound of the attainment, six decimals.")]
    upper: Annotated[float, doc("Upper bound of the attainment, six decimals, without correction.")]
    confidence: Annotated[float, doc("One-sided confidence of each bound.")]
    effective_requests: Annotated[
        float, doc("Number of independent requests with the same attainment and variance.")
    ]
    method: Annotated[
        IntervalMethod,
        Meta(
            description="blocks: from the variance between blocks of seconds; exact: from "
            "independent requests, in a window of one second."
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOSummary:
    """SLO targets of one class."""

    name: Annotated[str, doc("Class name.")]
    ttft_ms: Annotated[int, doc("Target of the time to first token, milliseconds.")]
    tpot_ms: Annotated[int, doc("Target of the time per output token, milliseconds.")]
    tbt_p99_ms: Annotated[
        int | None, doc("Target of the p99 of one request's gaps, ms; null if none.")
    ]
    e2e_ms: Annotated[int | None, doc("Target of the end-to-end latency, ms; null if none.")]
    objective: Annotated[
        str | None, doc("Exact share of requests that must be good, as '99%'; null if none.")
    ]
    priority: Annotated[int, doc("Priority of requests that have none of their own.")] = 0
    weight: Annotated[int, doc("Weight of a good request within its priority.")] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSummary:
    """Results of one class, or of all classes together."""

    name: Annotated[
        str, doc("Class name; empty for requests without a class and for all classes together.")
    ]
    requests: Annotated[int, doc("All requests, judged or not.")]
    good: Annotated[int, doc("Requests that met every target.")]
    total: Annotated[int, doc("Judged requests: met or missed.")]
    attainment: Annotated[float | None, doc("good / total, six decimals; null if total is 0.")]
    interval: Annotated[
        IntervalSummary | None,
        doc("Bounds of the attainment; null if total is 0, and for all classes together."),
    ] = None
    objective: Annotated[str | None, doc("Objective of the class; null if none.")] = None
    verdict: Annotated[
        VerdictKind | None, doc("PASS, FAIL or INCONCLUSIVE; null without an objective.")
    ] = None
    reason: Annotated[Reason | None, doc("Reason code of the verdict.")] = None
    sentence: Annotated[str, doc("Human-readable explanation; may be empty.")] = ""
    proof: Annotated[
        float | None,
        Meta(
            description="Upper bound that proves the FAIL, corrected for the number of classes; "
            "null unless FAIL."
        ),
    ] = None
    excluded: Annotated[int, doc("Requests cancelled by the trace without a miss.")]
    unjudged: Annotated[int, doc("Requests without a target, or with too little data.")]
    outcomes: Annotated[
        dict[str, int], doc("Requests by outcome: ok, shed, error, timeout, cancelled, unsent.")
    ]
    misses: Annotated[
        dict[str, int],
        Meta(
            description="Requests by reason for a miss: ttft, tpot, tbt, e2e, short, shed, error, "
            "timeout, unsent; one request may have several reasons."
        ),
    ]
    misses_without_response: Annotated[
        int, doc("Misses by error that have no HTTP response: connection errors.")
    ] = 0
    goodput_per_s: Annotated[float, doc("good per second of the window.")]
    weighted_goodput_per_s: Annotated[
        float | None,
        doc("Sum of the weights of good per second of the window; null if all weights are equal."),
    ] = None
    offered_per_s: Annotated[float, doc("requests per second of the window.")]
    served_per_s: Annotated[float, doc("Complete responses that ended in the window, per second.")]
    input_tokens: Annotated[int, doc("Prompt tokens of all sent requests.")]
    output_tokens: Annotated[int, doc("Output tokens received.")]
    ttft_ms: Annotated[Quantiles | None, doc("Time to first token from the scheduled arrival.")]
    ttft_from_send_ms: Annotated[Quantiles | None, doc("Time to first token from the actual send.")]
    tpot_ms: Annotated[Quantiles | None, doc("(last − first token) / (n − 1), for n > 1.")]
    tbt_ms: Annotated[
        Quantiles | None, doc("All gaps between tokens, exact to 0.1 %; null with --no-gaps.")
    ]
    e2e_ms: Annotated[
        Quantiles | None,
        doc("End-to-end latency of complete responses from the scheduled arrival."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """One distinct error of judged requests."""

    outcome: Annotated[str, doc("Outcome of these requests: error, shed, timeout or unsent.")]
    status: Annotated[int | None, doc("HTTP status; null if there was no response.")]
    detail: Annotated[str, doc("Recorded error message, control characters replaced.")]
    count: Annotated[int, doc("Requests that ended with this error.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviationSummary:
    """Judged responses that deviate from the API or from their requests in one way."""

    kind: Annotated[Deviation, doc("Kind of the deviation; see docs/verdicts.md.")]
    count: Annotated[int, doc("Responses with this deviation.")]
    sentence: Annotated[str, doc("Human-readable explanation.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokensSummary:
    """Prompt tokens that the target counted, beside those of the replayed rows."""

    responses: Annotated[int, doc("Responses that report a number of prompt tokens.")]
    planned: Annotated[int, doc("Prompt tokens of these requests, as planned.")]
    reported: Annotated[int, doc("Prompt tokens of these requests, as the target counted them.")]
    mean_difference: Annotated[float, doc("(reported − planned) / responses.")]
    max_difference: Annotated[int, doc("Largest difference of one request, either way.")]
    sentence: Annotated[
        str, doc("Explanation of a difference of more than 1 %; empty if it is smaller.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValiditySummary:
    """Validity of the measurement, which requires that the client sent every request on time."""

    valid: Annotated[bool, doc("True if the run is valid.")]
    reason: Annotated[Reason | None, doc("Reason code; null if the run is valid.")]
    sentence: Annotated[str, doc("Human-readable explanation.")]
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
        float | None, doc("Smallest TTFT target of any request; null if none.")
    ]
    unsent_rows: Annotated[int, doc("Rows of the window that were not sent.")]
    client_errors: Annotated[
        int,
        doc("Requests that the server rejected as invalid: 3xx, and 4xx that blame the request."),
    ] = 0
    deviations: Annotated[
        tuple[DeviationSummary, ...], doc("How responses deviate from the API; empty if none do.")
    ] = ()
    loop_lag_p99_ms: Annotated[float, doc("p99 delay of the client's event loop, milliseconds.")]
    loop_lag_max_ms: Annotated[
        float, doc("Maximum delay of the client's event loop, milliseconds.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSummary:
    """Verdict of the run."""

    kind: Annotated[VerdictKind, doc("PASS, FAIL, INCONCLUSIVE or INVALID.")]
    reason: Annotated[Reason, doc("Stable reason code for scripts.")]
    sentence: Annotated[str, doc("Human-readable explanation.")]
    skipped: Annotated[tuple[str, ...], doc("Classes with an objective but no judged request.")]
    runs: Annotated[
        int, doc("Number of runs of the verdict; one run shows no run-to-run variance.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSummary:
    """Judged part of the run."""

    start_s: Annotated[float, doc("Start of the window, seconds since time zero of the run.")]
    length_s: Annotated[
        float,
        doc("Length of the window, seconds; of a run that ended early, its part until the end."),
    ]
    rows_planned: Annotated[int, doc("Rows of the trace in the window.")]
    rows_sent: Annotated[int, doc("Rows of the window that were sent.")]
    warmup_rows: Annotated[int, doc("Warm-up rows before the window, excluded from all results.")]
    warmup_failed: Annotated[int, doc("Warm-up requests that failed.")] = 0
    warmup_error: Annotated[
        str, doc("Most frequent error of failed warm-up requests; empty if none failed.")
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Replayed trace."""

    name: Annotated[str, doc("File name.")]
    digest: Annotated[str, doc("Digest of the file.")]
    source: Annotated[str, doc("Source according to the metadata.")]
    licence: Annotated[str, doc("Licence according to the metadata.")]
    clock: Annotated[str, doc("Clock of the timestamps.")]
    synthetic: Annotated[bool, doc("True if the trace was generated.")]
    transforms: Annotated[tuple[str, ...], doc("Applied transforms, in order.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSummary:
    """Target server."""

    url: Annotated[str, doc("Base URL, without credentials; several are separated by commas.")]
    endpoint: Annotated[str, doc("API path.")]
    model: Annotated[str, doc("Model name in the requests.")]
    service: Annotated[str, doc("Name of the LLMService; empty with --target.")]
    pinning: Annotated[
        LengthPinning,
        doc("How output lengths were pinned; max_tokens reveals them to the server."),
    ]
    prompt: Annotated[PromptKind | None, doc("Form of the prompts; null in virtual time.")] = None
    prompt_overhead_tokens: Annotated[
        int | None,
        Meta(
            description="Tokens that the target adds to a prompt, such as a chat template, as "
            "measured before the run; null without --tokenizer."
        ),
    ] = None
    header_names: Annotated[tuple[str, ...], doc("Names of extra headers.")]
    streaming: Annotated[bool, doc("True if responses were streamed.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """The part of a run that one machine sent."""

    number: Annotated[int, doc("Number of the shard, from 1.")]
    count: Annotated[int, doc("Number of shards.")]
    rows_planned: Annotated[int, doc("Rows of the trace in the window, of all shards.")]
    warmup_rows: Annotated[int, doc("Warm-up rows before the window, of all shards.")]
    window_start_ns: Annotated[
        int, doc("Start of the window, nanoseconds since time zero of the run.")
    ]
    window_ns: Annotated[int, doc("Length of the window, nanoseconds.")]
    clock_error_ms: Annotated[
        float | None,
        Meta(
            description="The kernel's bound on the error of the wall clock at the start; null if "
            "no time service disciplines it."
        ),
    ]

    def __str__(self) -> str:
        return f"{self.number} of {self.count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Command and start time of the run."""

    started_at: Annotated[
        str,
        Meta(
            description="Time zero of the run, ISO 8601, UTC, on the wall clock; in virtual time "
            "on the trace's clock."
        ),
    ]
    goodput_version: Annotated[str, doc("Goodput version.")]
    command: Annotated[tuple[str, ...], doc("Command line without secrets.")]
    seed: Annotated[int, doc("Seed of rate scaling and of an emulated fleet's random placement.")]
    salt: Annotated[str, doc("Salt of the prompts; empty in virtual time.")]
    concurrency: Annotated[
        int | None, doc("Clients of a closed loop; null if requests were sent on schedule.")
    ] = None
    sessions: Annotated[
        SessionsSummary | None,
        doc("Order of the requests of sessions; null if all arrivals were independent."),
    ] = None
    retries: Annotated[
        int, doc("Maximum number of retries of a request that failed before its first token.")
    ] = 0
    shard: Annotated[
        ShardSummary | None, doc("The shard that was sent; null if all requests were sent.")
    ] = None
    complete: Annotated[
        bool, doc("False if the run was interrupted or aborted, or the disk was full.")
    ]
    abort_reason: Annotated[str, doc("Why the run is incomplete; empty if it is complete.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run's summary.json."""

    version: Annotated[str, doc("Version of this schema.")]
    verdict: Annotated[VerdictSummary, doc("Verdict of the run.")]
    validity: Annotated[ValiditySummary, doc("Validity of the run.")]
    overall: Annotated[ClassSummary, doc("Results of all classes together.")]
    classes: Annotated[
        tuple[ClassSummary, ...], doc("Results per class, classes with targets first.")
    ]
    window: Annotated[WindowSummary, doc("Judged part of the run.")]
    run: Annotated[RunSummary, doc("Command and start time of the run.")]
    trace: Annotated[TraceSummary, doc("Replayed trace.")]
    target: Annotated[TargetSummary, doc("Target server.")]
    promises: Annotated[tuple[SLOSummary, ...], doc("SLO targets per class.")]
    default_class: Annotated[
        str | None, doc("Class of requests without a class; null if there is none.")
    ]
    client: Annotated[ClientSummary, doc("Resource usage of the client.")]
    outage_s: Annotated[
        int, doc("Longest outage that the lower bounds take into account, seconds; 0 if none.")
    ] = 0
    emulation: Annotated[
        EmulationSummary | None, doc("Emulated fleet and its totals; null in real time.")
    ] = None
    errors: Annotated[
        tuple[ErrorSummary, ...],
        doc("Distinct errors of judged requests, most frequent first, at most 10."),
    ] = ()
    prompt_tokens: Annotated[
        PromptTokensSummary | None,
        doc("Prompt tokens counted by the target; null if no response reports them."),
    ] = None
    retried: Annotated[int, doc("Judged requests that were sent more than once.")] = 0
    other_errors: Annotated[int, doc("Requests that ended with an error not listed in errors.")] = 0
    records_digest: Annotated[
        str, doc("Digest of records.parquet; empty in summaries of earlier versions.")
    ] = ""


def write_summary(folder: Path, summary: Summary) -> None:
    """Write `summary.json` atomically.

    Raises:
        OSError: the file could not be written.
    """
    write_atomically(folder / SUMMARY_FILE, encode_json(summary))


def read_summary(folder: Path) -> Summary:
    """Read the summary of a run.

    Raises:
        InputError: the file is missing, truncated, not a summary, or of a later version.
    """
    path = folder / SUMMARY_FILE
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a regular file; give the folder of a finished run")
        if status.st_size > _MAX_BYTES:
            raise InputError(
                f"{path}: {status.st_size} bytes are too large for a summary; replay again"
            )
        data = path.read_bytes()
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise InputError(f"{path}: {why}; give the folder of a finished run") from error
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != SUMMARY_VERSION:
            raise InputError(
                f"{path}: the summary has version {version[:20]!r}, and this Goodput reads version "
                f"{SUMMARY_VERSION}; use the Goodput that wrote it"
            )
        return msgspec.json.decode(data, type=Summary)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a run's summary ({error}); replay again") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Versioned:
    version: str
