"""`replay --emulate`: one run in virtual time, from a run plan to a finished run folder.

The run folder is deterministic: it contains no time and no measurement of this machine. Only the
progress display reads this machine's clock.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from rich.progress import BarColumn, Progress, TextColumn

from goodput_core.errors import Interrupted
from goodput_core.units import NS_PER_S, NS_PER_US, format_duration
from goodput_replay.emulation.control import control_loop
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import FleetOutcome
from goodput_replay.runs.folder import FinishedRun, stop_on_signals
from goodput_replay.runs.rounding import seconds
from goodput_replay.runs.summary import (
    ClientSummary,
    EmulationSummary,
    LengthPinning,
    TargetSummary,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest, PlanStats
    from goodput_replay.run_plan import RunPlan
    from goodput_replay.runs.folder import RunWriter

__all__ = ["Stopped", "display", "emulated_run", "stoppable"]

_BYTES_PER_GB: Final = 1_000_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CLOCK_EVERY: Final = 64  # requests
_BAR_EVERY_NS: Final = NS_PER_S // 5
_LINE_EVERY_NS: Final = 10 * NS_PER_S


def emulated_run(
    plan: RunPlan, settings: FleetSettings, writer: RunWriter, console: Console
) -> FinishedRun:
    """Serve the plan in virtual time and judge it.

    Args:
        plan: inputs of the run.
        settings: configuration of the fleet.
        writer: writer of an empty run folder.
        console: console on stderr, for progress.

    Raises:
        InputError: the settings are invalid.
        Interrupted: a signal was received before the first request ended.
        DiskFullError: the disk is full; the records that fitted are kept.
    """
    outcome = FleetOutcome()
    stopped = ""
    failure: Exception | None = None
    span = plan.make_judged_span()
    ended_ns = 0
    with stoppable(writer) as check, display(plan.stats, console) as show:
        try:
            with control_loop(settings, writer.path) as loop:

                def on_record(planned: PlannedRequest, record: RequestRecord) -> None:
                    nonlocal ended_ns
                    ended_ns = max(ended_ns, record.scheduled_ns, record.end_ns or 0)
                    if loop is not None:
                        loop.ended(planned, record)
                    check()
                    if span is not None and not planned.warmup:
                        span.add(record)
                    writer.append(record, warmup=planned.warmup)
                    show(record)

                follow_ups = plan.follow_ups
                outcome = emulate(
                    plan.requests.requests() if follow_ups is None else follow_ups.starts(),
                    settings,
                    on_record,
                    follow_ups=follow_ups,
                    actors=[] if loop is None else [loop],
                )
        except Stopped as stop:
            stopped = str(stop)
        except Exception as error:  # noqa: BLE001 - raised again once the records are judged
            failure = error
    if not writer.rows:
        if failure is not None:
            raise failure
        raise Interrupted(f"{stopped}; no request had ended")
    span_ns = None
    if span is not None:
        span_ns = span.span_ns
    elif stopped or failure is not None:
        span_ns = plan.span_until(ended_ns)
    info = plan.info(
        target=TargetSummary(
            url=f"emulated://{settings.profile.name}",
            endpoint="",
            model=plan.service,
            service=plan.service,
            pinning=LengthPinning.HEADER,
            header_names=(),
            streaming=True,
        ),
        started=_trace_time_of_zero(plan),
        client=ClientSummary(cpu_s=0.0, cpus=0, peak_in_flight=outcome.peak_in_flight),
        stopped=stopped,
        span_ns=span_ns,
        emulation=_emulation_summary(settings, outcome),
    )
    if failure is not None:
        writer.finish_failed(info, failure)
        raise failure
    summary = writer.finish(info)
    interrupted = None
    if stopped:
        interrupted = Interrupted(
            f"{stopped} after {writer.rows} of {plan.stats.rows}; {writer.content_clause}"
        )
    return FinishedRun(summary=summary, ended_by=interrupted)


def _trace_time_of_zero(plan: RunPlan) -> datetime:
    """Return the trace's timestamp of time zero of the run; a relative clock counts from 1970."""
    requests = plan.requests
    zero_ns = requests.zero_ns
    return _EPOCH + timedelta(microseconds=zero_ns // NS_PER_US)


def _emulation_summary(settings: FleetSettings, outcome: FleetOutcome) -> EmulationSummary:
    profile, configure, decode = settings.profile, settings.configure, settings.decode
    link = f"{profile.link_bytes_per_s / _BYTES_PER_GB:g} GB/s"
    topology = ""
    if settings.migration is not None:
        below_blocks = settings.migration.below_blocks
        topology = (
            f"live migration below {below_blocks} free blocks per request, {link} per replica"
        )
    elif decode is not None:
        topology = f"{settings.replicas} prefill, {decode.replicas} decode, {link} between them"
    return EmulationSummary(
        device=profile.name,
        device_note=profile.description,
        illustrative=profile.illustrative,
        replicas=settings.replicas + (decode.replicas if decode else 0),
        topology=topology,
        policy=configure.policy,
        oracle=settings.oracle,
        preemption=configure.preemption,
        placement=settings.placement,
        token_budget=configure.token_budget,
        max_num_seqs=configure.max_num_seqs,
        virtual_s=seconds(outcome.end_ns),
        device_s=seconds(outcome.replica_ns * profile.devices),
        peak_replicas=outcome.peak_replicas,
        final_replicas=outcome.final_replicas,
        steps=outcome.steps,
        preemptions=outcome.preemptions,
        recomputed_tokens=outcome.recomputed_tokens,
        swapped_tokens=outcome.swapped_tokens,
        migrations=outcome.migrations,
        migrations_aborted=outcome.migrations_aborted,
        migrated_blocks=outcome.migrated_blocks,
    )


class Stopped(Exception):
    """Raised after a stop signal."""


@contextmanager
def stoppable(writer: RunWriter) -> Iterator[Callable[[], None]]:
    """Yield a function that raises an exception after the first signal; main thread only.

    Call it between two records. A second signal ends the process at once.

    Args:
        writer: writer whose records are kept if a second signal ends the process.

    Yields:
        `check`, which raises `Stopped` after a signal.
    """
    reasons: list[str] = []

    def check() -> None:
        if reasons:
            raise Stopped(reasons[0])

    with stop_on_signals(writer, reasons.append):
        yield check


@contextmanager
def display(stats: PlanStats, console: Console) -> Iterator[Callable[[RequestRecord], None]]:
    """Show progress until the `with` block ends: a bar on a terminal, else a line every 10 s.

    Args:
        stats: totals of the plan.
        console: console on stderr.

    Yields:
        A function to call with the record of each ended request.
    """
    if not console.is_terminal:

        def print_line(_: int, text: str) -> None:
            console.print(text, soft_wrap=True, highlight=False)

        yield _ProgressMeter(stats, _LINE_EVERY_NS, print_line).count
        return
    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=stats.rows)

        def update_bar(ended: int, text: str) -> None:
            bar.update(task, completed=ended, description=text)

        yield _ProgressMeter(stats, _BAR_EVERY_NS, update_bar).count


class _ProgressMeter:
    """Counts ended requests, and reports progress once per interval."""

    def __init__(self, stats: PlanStats, every_ns: int, report: Callable[[int, str], None]) -> None:
        self._stats = stats
        self._every_ns = every_ns
        self._report = report
        self._started_ns = self._reported_ns = time.monotonic_ns()
        self._ended = 0

    def count(self, record: RequestRecord) -> None:
        """Count one ended request; the clock is read only once for many requests."""
        self._ended += 1
        if self._ended % _CLOCK_EVERY:
            return
        now_ns = time.monotonic_ns()
        if now_ns - self._reported_ns < self._every_ns:
            return
        self._reported_ns = now_ns
        rate = self._ended * NS_PER_S / (now_ns - self._started_ns)
        virtual = format_duration(record.end_ns or 0)
        self._report(
            self._ended,
            f"{virtual} of virtual time, {self._ended:,} of {self._stats.rows:,} requests, "
            f"{rate:,.0f} requests/s",
        )
