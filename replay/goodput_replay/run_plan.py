"""Inputs of a run, which real time and virtual time share, and their description in its summary."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.cli import installed_version
from goodput_core.files import partial_path
from goodput_core.units import NS_PER_S
from goodput_replay.options import ReplayOptions
from goodput_replay.plan import PlanStats, RequestPlan
from goodput_replay.runs.files import SERVER_METRICS_FILE
from goodput_replay.runs.rounding import to_ms
from goodput_replay.runs.summary import (
    ClientSummary,
    EmulationSummary,
    RunSummary,
    ShardSummary,
    TargetSummary,
    TraceSummary,
)
from goodput_replay.runs.summary_builder import RunInfo
from goodput_replay.scraping.settings import ScrapeSettings, choose_interval
from goodput_replay.sending.tokenizer import TokenizerVocabulary
from goodput_replay.sessions import FollowUps, JudgedSpan
from goodput_replay.shares import ALL, Share

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from goodput_replay.runs.slo import SLOClasses

__all__ = ["RunPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Inputs of a run, fixed before it starts.

    Args:
        options: command-line options.
        requests: requests to send.
        stats: totals of `requests`.
        follow_ups: requests that follow others; None if all arrivals are independent. Stored only
            if this process sends.
        trace: description of the trace for the summary.
        headers: headers of every request; may contain a key.
        scrape_token: bearer token for the metrics pages; empty for none.
        tokenizer: words of `--tokenizer`; None without it.
        tls: TLS settings; None for certificates that the system trusts.
        salt: salt of the prompts.
        service: name of the LLMService; empty with `--target`.
        command: the command line without secrets.
        share: the requests that this command sends.
        workers: number of processes that send; with 1, this process sends.
        arm_token: token that a start must carry; empty without `--arm`.
    """

    options: ReplayOptions
    requests: RequestPlan
    stats: PlanStats
    follow_ups: FollowUps | None = None
    trace: TraceSummary
    headers: dict[str, str]
    scrape_token: str = ""
    tokenizer: TokenizerVocabulary | None = None
    tls: ssl.SSLContext | None = None
    salt: str
    service: str
    command: tuple[str, ...]
    share: Share = ALL
    workers: int = 1
    arm_token: str = ""

    @property
    def slo(self) -> SLOClasses:
        """SLO classes for judging."""
        return self.requests.slo

    @property
    def window_start_ns(self) -> int:
        """Start of the judged window, after the warm-up; nanoseconds since time zero."""
        return (self.stats.first_judged_ns or 0) if self.stats.warmup_rows else 0

    @property
    def window_ns(self) -> int:
        """Length of the judged window."""
        return max(1, self.requests.window_ns(self.stats) - self.window_start_ns)

    def span_until(self, ended_ns: int) -> tuple[int, int]:
        """Return the window of a run that ended early: its part until the end, a second at least.

        Args:
            ended_ns: end of the run, nanoseconds since time zero.
        """
        start_ns = self.window_start_ns
        end_ns = min(ended_ns, start_ns + self.window_ns)
        return start_ns, max(end_ns, start_ns + min(NS_PER_S, self.window_ns))

    @property
    def has_open_end(self) -> bool:
        """True if the end is not known before the run: of a closed loop, or of causal sessions."""
        return self.options.concurrency is not None or self.follow_ups is not None

    def make_judged_span(self) -> JudgedSpan | None:
        """Return a window to be measured during the run; None if the plan determines it."""
        if self.follow_ups is None:
            return None
        return JudgedSpan(starts_at_zero=not self.stats.warmup_rows)

    def scrape_settings(
        self, *, service_url: str | None, zero_ns: int, folder: Path
    ) -> ScrapeSettings | None:
        """Return the metrics pages to scrape; None for none.

        Args:
            service_url: metrics page of the service that was started for the run; None without one.
            zero_ns: time zero of the run, on the monotonic clock.
            folder: folder of the run.
        """
        options = self.options
        if not options.scrape and not options.scrape_service:
            return None
        return ScrapeSettings(
            urls=options.scrape,
            service_url=service_url if options.scrape_service else None,
            metrics=options.scrape_metrics,
            token=self.scrape_token,
            ca_file=options.ca_file,
            every_ns=choose_interval(None if self.has_open_end else self.stats.last_ns),
            zero_ns=zero_ns,
            # Gets its final name together with the records, when these are complete.
            file=partial_path(folder / SERVER_METRICS_FILE).resolve(),
        )

    def info(
        self,
        *,
        target: TargetSummary,
        started: datetime,
        client: ClientSummary,
        salt: str = "",
        stopped: str = "",
        span_ns: tuple[int, int] | None = None,
        loop_lag_p99_ns: int = 0,
        loop_lag_max_ns: int = 0,
        clock_error_ns: int | None = None,
        emulation: EmulationSummary | None = None,
    ) -> RunInfo:
        """Describe the run for its summary.

        Args:
            target: target server.
            started: time zero of the run, timezone-aware.
            client: resource usage of the client.
            salt: salt of the prompts; empty if prompts have no text.
            stopped: cause of an early end, which completes "the run ended early: "; empty if the
                run is complete.
            span_ns: first and last time of the judged window since time zero; None for those of the
                plan.
            loop_lag_p99_ns: p99 delay of the client's event loop.
            loop_lag_max_ns: maximum delay of the client's event loop.
            clock_error_ns: bound on the error of the wall clock; None if unknown.
            emulation: emulated fleet and its totals; None in real time.
        """
        stats = self.stats
        start_ns, length_ns = self.window_start_ns, self.window_ns
        if span_ns is not None:
            start_ns, length_ns = span_ns[0], max(1, span_ns[1] - span_ns[0])
        return RunInfo(
            trace=self.trace,
            target=target,
            run=RunSummary(
                started_at=started.isoformat(timespec="microseconds"),
                goodput_version=installed_version(),
                command=self.command,
                seed=self.options.seed,
                salt=salt,
                concurrency=self.options.concurrency,
                sessions=None if self.follow_ups is None else self.follow_ups.summary,
                retries=self.options.retries,
                shard=self._summarise_shard(clock_error_ns),
                complete=not stopped,
                abort_reason=stopped,
            ),
            slo=self.slo,
            window_start_ns=start_ns,
            window_ns=length_ns,
            rows_planned=stats.own_rows - stats.own_warmup_rows,
            warmup_rows=stats.own_warmup_rows,
            confidence=float(self.options.confidence),
            client=client,
            loop_lag_p99_ns=loop_lag_p99_ns,
            loop_lag_max_ns=loop_lag_max_ns,
            emulation=emulation,
        )

    def _summarise_shard(self, clock_error_ns: int | None) -> ShardSummary | None:
        share, stats = self.share, self.stats
        if share.count == 1:
            return None
        return ShardSummary(
            number=share.index + 1,
            count=share.count,
            rows_planned=stats.rows - stats.warmup_rows,
            warmup_rows=stats.warmup_rows,
            window_start_ns=self.window_start_ns,
            window_ns=self.window_ns,
            clock_error_ms=None if clock_error_ns is None else to_ms(clock_error_ns),
        )
