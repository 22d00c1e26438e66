"""What is said about a trace: plain numbers, counted by `describe`, shown by `describe_view`."""

from __future__ import annotations

from dataclasses import dataclass

from goodput_traces.schema import TraceMetadata

__all__ = ["Arrivals", "LengthSummary", "PrefixReuse", "TraceDescription"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Lengths in tokens; quantiles are nearest-rank and exact.

    Args:
        total: the sum over all rows.
        p50, p90, p99, max: quantiles.
        histogram: (lowest, highest, rows) per power of two, without empty ends.
    """

    total: int
    p50: int
    p90: int
    p99: int
    max: int
    histogram: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When requests arrive, on one clock.

    Args:
        span_ns: from the first to the last arrival.
        mean_rate_per_s: rows over the span; None when all arrive at once.
        peak_1s: most arrivals in any whole second, counted from the first arrival.
        peak_60s: most arrivals in any whole minute, counted likewise.
        gap_cv: standard deviation of the gaps between arrivals over their mean: 1 for a
            Poisson process, above it bursty; None with fewer than two gaps or no mean.
        distinct_instants: different arrival times.
        tied_rows: rows that share their instant with another.
        largest_tie: most rows at one instant.
        histogram: arrivals in equal parts of the span.
    """

    span_ns: int
    mean_rate_per_s: float | None
    peak_1s: int
    peak_60s: int
    gap_cv: float | None
    distinct_instants: int
    tied_rows: int
    largest_tie: int
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuse:
    """How much of the prompts was seen before: the best that a prefix cache could do.

    Args:
        blocks: hashes in all rows.
        distinct_blocks: different ones.
        block_sizes: tokens per hash, as found.
        rows: rows with hashes.
        exact: whether `distinct_blocks` is counted rather than estimated.
    """

    blocks: int
    distinct_blocks: int
    block_sizes: tuple[int, ...]
    rows: int
    exact: bool

    @property
    def reused(self) -> float | None:
        """Share of blocks that an earlier row, or the same one, already had."""
        return None if self.blocks == 0 else max(0.0, 1 - self.distinct_blocks / self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDescription:
    """Everything `goodput trace describe` shows.

    Args:
        rows: requests.
        metadata: what the file says about itself.
        floored_output_rows: zero-length answers that are read as one token.
        arrivals: None for a session-relative clock: there is no common time.
        prompt: lengths of prompts.
        answer: lengths of answers.
        sessions: different sessions; rows without one are not counted.
        session_rows: rows that belong to a session.
        sessions_exact: whether `sessions` is counted rather than estimated.
        prefixes: prefix reuse.
        classes: rows per SLO class; the empty name stands for rows without one.
    """

    rows: int
    metadata: TraceMetadata
    floored_output_rows: int
    arrivals: Arrivals | None
    prompt: LengthSummary
    answer: LengthSummary
    sessions: int
    session_rows: int
    sessions_exact: bool
    prefixes: PrefixReuse
    classes: tuple[tuple[str, int], ...]
