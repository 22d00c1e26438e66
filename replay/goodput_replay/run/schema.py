"""The columns of `records.parquet`: a contract with every tool that reads one.

Each column says what it holds, in words that docs/run-folder.md repeats. A change of meaning is
a new version; within one version columns are only added.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

__all__ = ["LABEL", "RECORDS_SCHEMA", "RECORDS_VERSION", "VERSION_KEY", "column_help"]

RECORDS_VERSION: Final = "1"
VERSION_KEY: Final = b"goodput.records_version"


def _column(name: str, kind: Any, text: str, *, required: bool = False) -> Any:
    return pa.field(name, kind, nullable=not required, metadata={"description": text})


LABEL: Final = pa.dictionary(pa.int32(), pa.string())

RECORDS_SCHEMA: Final[Any] = pa.schema(
    [
        _column("request_id", pa.string(), "The trace's id of the row.", required=True),
        _column(
            "slo_class", LABEL, "The class it was judged by; empty: without one.", required=True
        ),
        _column(
            "warmup",
            pa.bool_(),
            "Sent to warm the service up: outside every figure.",
            required=True,
        ),
        _column(
            "scheduled_ns",
            pa.int64(),
            "When the trace says it arrives, nanoseconds since the run's zero.",
            required=True,
        ),
        _column("sent_ns", pa.int64(), "When it was handed to the socket; null: never sent."),
        _column("first_token_ns", pa.int64(), "When the first non-empty token came."),
        _column("last_token_ns", pa.int64(), "When the last non-empty token came."),
        _column("end_ns", pa.int64(), "When the answer ended, or failed."),
        _column(
            "outcome",
            LABEL,
            "How it ended: ok, shed, error, timeout, cancelled or unsent.",
            required=True,
        ),
        _column(
            "judgement",
            LABEL,
            "What it counts as: attained, missed, excluded (cancelled by the trace in time) or "
            "unjudged (nothing was promised); null for warm-up rows.",
        ),
        _column("attained", pa.bool_(), "Whether every target held; null where it is not counted."),
        _column(
            "miss_reasons",
            pa.list_(pa.string()),
            "Why it missed: ttft, tpot, tbt, e2e, short, shed, error, timeout, unsent.",
            required=True,
        ),
        _column("input_tokens", pa.int64(), "Tokens of the prompt, as sent.", required=True),
        _column(
            "output_tokens",
            pa.int64(),
            "Tokens that came back, reasoning tokens included.",
            required=True,
        ),
        _column(
            "pinned_output_tokens",
            pa.int64(),
            "Tokens the answer had to have; fewer is a miss; null: not pinned.",
        ),
        _column(
            "cached_tokens",
            pa.int64(),
            "Prompt tokens found in the server's prefix cache; null: it did not say.",
        ),
        _column("ttft_target_ns", pa.int64(), "The row's own TTFT target; wins over its class's."),
        _column("tpot_target_ns", pa.int64(), "The row's own TPOT target; wins over its class's."),
        _column("tbt_p99_target_ns", pa.int64(), "The row's own target for the p99 of its gaps."),
        _column("e2e_target_ns", pa.int64(), "The row's own target for the whole request."),
        _column(
            "cancel_after_ns",
            pa.int64(),
            "When the trace cancels it, counted from scheduled_ns; null: never.",
        ),
        _column("status", pa.int32(), "HTTP status; null: none came."),
        _column(
            "detail",
            LABEL,
            "What went wrong, one short sentence without prompt text.",
            required=True,
        ),
        _column("replica", LABEL, "Who served it, when the answer said so.", required=True),
        _column("revision", LABEL, "The revision that served it, when said.", required=True),
        _column(
            "tbt_p99_us",
            pa.int64(),
            "Nearest-rank p99 of the gaps between tokens, microseconds; null: fewer than two "
            "token times.",
        ),
        _column(
            "gaps_us",
            pa.list_(pa.int32()),
            "Microseconds between consecutive tokens; empty with --no-gaps.",
            required=True,
        ),
    ],
    metadata={VERSION_KEY: RECORDS_VERSION.encode()},
)


def column_help() -> dict[str, str]:
    """What each column means, in the file's order."""
    return {f.name: f.metadata[b"description"].decode() for f in RECORDS_SCHEMA}
