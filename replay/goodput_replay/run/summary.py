"""`summary.json`: the result of a run, as a versioned schema that other programs can rely on.

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
    """In a header that only the executor of our engine reads; no policy learned the length."""
    MAX_TOKENS = "max_tokens"
    """As `max_tokens` with `ignore_eos`; lengths were disclosed to the server's scheduler."""
    NONE = "none"
    """Not at all; an answer ends where the model ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Nearest-rank quantiles of one measure, milliseconds."""

    count: Annotated[int, Meta(description="Requests (for tbt_ms: gaps) that have the measure.")]
    p50: Annotated[float, Meta(description="Median, milliseconds.")]
    p90: Annotated[float, Meta(description="90th percentile, milliseconds.")]
    p95: Annotated[float, Meta(description="95th percentile, milliseconds.")]
    p99: Annotated[float, Meta(description="99th percentile, milliseconds.")]
    max: Annotated[float, Meta(description="The largest, milliseconds.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSummary:
    """Two one-sided confidence bounds of an attainment."""

    lower: Annotated[float, Meta(description="The attainment is at least this; six decimals.")]
    upper: Annotated[float, Meta(description="The attainment is at most this; six decimals.")]
    confidence: Annotated[float, Meta(description="Of each bound alone.")]
    effective_requests: Annotated[
        float,
        Meta(description="Independent requests with the same attainment and variance."),
    ]
    method: Annotated[
        IntervalMethod,
        Meta(
            description="blocks: from the variance between blocks of seconds; exact: independent "
            "requests, in a window of one second."
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseSummary:
    """What one class was promised."""

    name: Annotated[str, Meta(description="The class.")]
    ttft_ms: Annotated[int, Meta(description="Promised time to first token, milliseconds.")]
    tpot_ms: Annotated[int, Meta(description="Promised time per output token, milliseconds.")]
    tbt_p99_ms: Annotated[
        int | None, Meta(description="Promised p99 of a request's own gaps, milliseconds.")
    ]
    e2e_ms: Annotated[int | None, Meta(description="Promised whole-request time, milliseconds.")]
    objective: Annotated[
        str | None,
        Meta(description="Share that must attain, exact, as '99%'; null: reported, not judged."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSummary:
    """What became of one class's requests, or of all."""

    name: Annotated[str, Meta(description="The class; empty: without one, or all together.")]
    requests: Annotated[int, Meta(description="Every request, judged or not.")]
    good: Annotated[int, Meta(description="Requests that kept every promise.")]
    total: Annotated[int, Meta(description="Requests judged: kept or missed.")]
    attainment: Annotated[
        float | None, Meta(description="good / total to six decimals; null: nothing judged.")
    ]
    interval: Annotated[
        IntervalSummary | None,
        Meta(description="Bounds of the attainment; null: nothing judged, or all together."),
    ] = None
    objective: Annotated[str | None, Meta(description="As promised; null: none.")] = None
    verdict: Annotated[
        VerdictKind | None, Meta(description="PASS, FAIL or INCONCLUSIVE; null: not judged.")
    ] = None
    reason: Annotated[Reason | None, Meta(description="Stable reason of the verdict.")] = None
    sentence: Annotated[str, Meta(description="The verdict for a person; may be empty.")] = ""
    excluded: Annotated[int, Meta(description="Cancelled by the trace in time: not counted.")]
    unjudged: Annotated[int, Meta(description="Nothing was promised, or the record cannot tell.")]
    outcomes: Annotated[
        dict[str, int],
        Meta(description="Requests by outcome: ok, shed, error, timeout, cancelled, unsent."),
    ]
    misses: Annotated[
        dict[str, int],
        Meta(
            description="Requests by reason of a miss: ttft, tpot, tbt, e2e, short, shed, error, "
            "timeout, unsent; one request may stand under several."
        ),
    ]
    goodput_per_s: Annotated[float, Meta(description="good per second of the window.")]
    offered_per_s: Annotated[float, Meta(description="requests per second of the window.")]
    served_per_s: Annotated[
        float, Meta(description="Complete answers that ended in the window, per second of it.")
    ]
    input_tokens: Annotated[int, Meta(description="Prompt tokens of the requests that were sent.")]
    output_tokens: Annotated[int, Meta(description="Tokens that came back.")]
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
        Quantiles | None, Meta(description="Complete answers, from the scheduled arrival.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """One distinct error of judged requests."""

    outcome: Annotated[str, Meta(description="Outcome of these requests: error, shed, timeout …")]
    status: Annotated[int | None, Meta(description="HTTP status; null: no response.")]
    detail: Annotated[str, Meta(description="The error as recorded; control characters replaced.")]
    count: Annotated[int, Meta(description="Requests that ended with it.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValiditySummary:
    """Whether the run shows the service, or its own client."""

    valid: Annotated[bool, Meta(description="Whether the run may be read at all.")]
    reason: Annotated[Reason | None, Meta(description="Stable reason when invalid.")]
    sentence: Annotated[str, Meta(description="The same for a person.")]
    lag_ms: Annotated[
        Quantiles | None,
        Meta(description="Actual minus scheduled send; null: nothing sent, or virtual time."),
    ]
    lag_p99_limit_ms: Annotated[
        float,
        Meta(
            description="Largest p99 lag of a valid run: max(10, min(5 % of tightest TTFT, 100))."
        ),
    ]
    tightest_ttft_ms: Annotated[
        float | None, Meta(description="The smallest TTFT promised to any request.")
    ]
    unsent_rows: Annotated[int, Meta(description="Rows of the window that were never sent.")]
    loop_lag_p99_ms: Annotated[float, Meta(description="How late the client's event loop woke.")]
    loop_lag_max_ms: Annotated[float, Meta(description="The latest such wake-up.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSummary:
    """The verdict on the run."""

    kind: Annotated[VerdictKind, Meta(description="PASS, FAIL, INCONCLUSIVE or INVALID.")]
    reason: Annotated[Reason, Meta(description="Stable; scripts may match on it.")]
    sentence: Annotated[str, Meta(description="For a person.")]
    skipped: Annotated[
        tuple[str, ...], Meta(description="Classes with an objective and no judged request.")
    ]
    runs: Annotated[
        int,
        Meta(description="Runs the verdict rests on; 1 excludes the spread from run to run."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSummary:
    """The judged part of the run."""

    start_s: Annotated[float, Meta(description="Its first instant, seconds since the run's zero.")]
    length_s: Annotated[float, Meta(description="Its length, seconds.")]
    rows_planned: Annotated[int, Meta(description="Rows of the trace in the window.")]
    rows_sent: Annotated[int, Meta(description="Of these, rows that were sent.")]
    warmup_rows: Annotated[int, Meta(description="Rows sent before it, outside every figure.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """The trace that was replayed."""

    name: Annotated[str, Meta(description="The file's name.")]
    digest: Annotated[str, Meta(description="Digest of the file's bytes.")]
    source: Annotated[str, Meta(description="Where it comes from, as its metadata says.")]
    licence: Annotated[str, Meta(description="Its licence, as its metadata says.")]
    clock: Annotated[str, Meta(description="What its timestamps count from.")]
    synthetic: Annotated[bool, Meta(description="Whether a generator made it.")]
    transforms: Annotated[tuple[str, ...], Meta(description="What was done to it, in order.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSummary:
    """Where the requests went."""

    url: Annotated[str, Meta(description="Base URL, without credentials.")]
    endpoint: Annotated[str, Meta(description="Path of the API.")]
    model: Annotated[str, Meta(description="Model name as sent.")]
    service: Annotated[str, Meta(description="Name of the LLMService; empty: a bare --target.")]
    pinning: Annotated[
        LengthPinning,
        Meta(
            description="How output lengths were pinned; max_tokens disclosed them to the server."
        ),
    ]
    header_names: Annotated[tuple[str, ...], Meta(description="Extra headers, by name alone.")]
    streaming: Annotated[bool, Meta(description="Whether answers were streamed.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSummary:
    """What the client cost."""

    cpu_s: Annotated[float, Meta(description="Processor seconds of the client process.")]
    cpus: Annotated[int, Meta(description="Processors it could use.")]
    peak_in_flight: Annotated[int, Meta(description="Most requests in flight at once.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationSummary:
    """That the run was in virtual time: the real scheduler on a model of the device."""

    device: Annotated[str, Meta(description="The device profile's name.")]
    device_note: Annotated[str, Meta(description="The profile's own sentence about itself.")]
    illustrative: Annotated[bool, Meta(description="Whether the profile stands for no device.")]
    replicas: Annotated[int, Meta(description="Replicas at the run's zero.")]
    topology: Annotated[
        str, Meta(description="How they share the work; empty: each does all of it.")
    ]
    policy: Annotated[str, Meta(description="Scheduling policy.")]
    oracle: Annotated[
        bool, Meta(description="Whether true lengths ordered the requests instead: a bound.")
    ]
    preemption: Annotated[str, Meta(description="What became of preempted requests' KV blocks.")]
    placement: Annotated[str, Meta(description="Which law spread the requests.")]
    token_budget: Annotated[int, Meta(description="Tokens a step might compute, at zero.")]
    max_num_seqs: Annotated[int, Meta(description="Requests that might run at once, a replica.")]
    virtual_s: Annotated[float, Meta(description="From zero to the end of the last request.")]
    device_s: Annotated[float, Meta(description="Seconds for which devices were held, summed.")]
    peak_replicas: Annotated[
        int,
        Meta(description="Most replicas at once, starting and draining ones too; 0: interrupted."),
    ]
    final_replicas: Annotated[int, Meta(description="Replicas at the end, without draining ones.")]
    steps: Annotated[int, Meta(description="Steps of all replicas.")]
    preemptions: Annotated[int, Meta(description="Requests sent back to wait.")]
    recomputed_tokens: Annotated[int, Meta(description="Their tokens that were computed again.")]
    swapped_tokens: Annotated[int, Meta(description="Their tokens copied to host memory.")]
    migrations: Annotated[
        int, Meta(description="Requests that went on on another replica while they decoded.")
    ]
    migrations_aborted: Annotated[int, Meta(description="Such moves that were given up.")]
    migrated_blocks: Annotated[int, Meta(description="KV blocks copied for both.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How and when it ran."""

    started_at: Annotated[
        str,
        Meta(
            description="Wall clock of the run's zero, ISO 8601, UTC; in virtual time the trace's "
            "own time then."
        ),
    ]
    goodput_version: Annotated[str, Meta(description="The program's version.")]
    command: Annotated[tuple[str, ...], Meta(description="The command line, without secrets.")]
    seed: Annotated[int, Meta(description="Of prompts and sampling.")]
    salt: Annotated[str, Meta(description="Made this run's prompts its own.")]
    complete: Annotated[bool, Meta(description="False: interrupted, aborted, or the disk filled.")]
    abort_reason: Annotated[str, Meta(description="Why it is incomplete; empty: it is complete.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run's summary.json."""

    version: Annotated[str, Meta(description="Of this schema.")]
    verdict: Annotated[VerdictSummary, Meta(description="The verdict on the run.")]
    validity: Annotated[ValiditySummary, Meta(description="Whether the run may be read at all.")]
    overall: Annotated[ClassSummary, Meta(description="All classes together.")]
    classes: Annotated[tuple[ClassSummary, ...], Meta(description="Each class, promised first.")]
    window: Annotated[WindowSummary, Meta(description="The judged part of the run.")]
    run: Annotated[RunSummary, Meta(description="How and when it ran.")]
    trace: Annotated[TraceSummary, Meta(description="The trace that was replayed.")]
    target: Annotated[TargetSummary, Meta(description="Where the requests went.")]
    promises: Annotated[tuple[PromiseSummary, ...], Meta(description="What was promised.")]
    default_class: Annotated[str | None, Meta(description="Class of a request that names none.")]
    client: Annotated[ClientSummary, Meta(description="What the client cost.")]
    emulation: Annotated[
        EmulationSummary | None, Meta(description="What was emulated; null: run in real time.")
    ] = None
    errors: Annotated[
        tuple[ErrorSummary, ...],
        Meta(description="Distinct errors of judged requests, most frequent first, at most 10."),
    ] = ()
    other_errors: Annotated[
        int, Meta(description="Requests that ended with an error not listed in errors.")
    ] = 0


def encode_summary(summary: Summary) -> bytes:
    """The file's bytes: indented JSON, one trailing newline."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def write_summary(folder: Path, summary: Summary) -> None:
    """Write `summary.json`, whole or not at all.

    Raises:
        OSError: it could not be written.
    """
    write_atomically(folder / SUMMARY_FILE, encode_summary(summary))


def read_summary(folder: Path) -> Summary:
    """The summary of a run.

    Raises:
        InputError: it is missing, cut short, foreign, or of a later version.
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
    """The JSON Schema of `summary.json`, as shipped in `summary.schema.json`."""
    schema = msgspec.json.schema(Summary)
    titled = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return msgspec.json.format(msgspec.json.encode(titled), indent=2) + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Versioned:
    version: str
