"""Replay a run plan in real time into a finished run folder, with one or several senders.

All checks run before the first request. The run's time zero is set once the first requests are
prepared. The records are closed and judged even if the run fails.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from goodput_core.contract import PATH_METRICS
from goodput_core.errors import AbortedRun, Interrupted, UsageError
from goodput_core.files import partial_path
from goodput_core.process import count_cpus
from goodput_core.text import printable
from goodput_replay.clock_changes import ClockReading, describe_clock_changes
from goodput_replay.live.messages import Begin
from goodput_replay.live.observer import ObserverOptions, RunObserver
from goodput_replay.live.tally import LINE_EVERY_NS, LiveWindow, RunProgress
from goodput_replay.runs.files import DECISIONS_FILE, SERVICE_LOG_FILE
from goodput_replay.runs.folder import FinishedRun, stop_on_signals
from goodput_replay.runs.rounding import seconds, to_ms
from goodput_replay.runs.summary import (
    ClientSummary,
    SenderSummary,
    TargetSummary,
)
from goodput_replay.runs.summary_builder import summarise_stall
from goodput_replay.sending.abort import ErrorRateWatch
from goodput_replay.sending.arming import await_start
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.local_service import running_service
from goodput_replay.sending.loop import Senders, SendingLoop
from goodput_replay.sending.preparation import prepare_sending
from goodput_replay.sending.process import describe_clock, wait_for_start
from goodput_replay.sending.senders import SenderProcesses
from goodput_replay.sending.target import Target, parse_target
from goodput_replay.start_time import format_instant, read_clock_error_ns

if TYPE_CHECKING:
    from rich.console import Console

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.run_plan import RunPlan
    from goodput_replay.runs.folder import RunWriter
    from goodput_replay.runs.summary import Summary
    from goodput_replay.scraping.settings import ScrapeSettings
    from goodput_replay.sending.loop import SenderUsage

__all__ = ["replay"]


class _Stopper:
    """Cancels a task for one reason; later reasons are ignored.

    Attributes:
        error: type of the error that ends the command; None if the task was not stopped.
        reason: cause of the early end; completes "the run ended early: ".
    """

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.error: type[AbortedRun | Interrupted] | None = None
        self.reason = ""

    def stop(self, error: type[AbortedRun | Interrupted], reason: str) -> None:
        """Cancel the task."""
        if self.error is None:
            self.error, self.reason = error, reason
            self._task.cancel()


async def replay(plan: RunPlan, writer: RunWriter, console: Console) -> FinishedRun:
    """Connect to the target, send the plan and judge the run.

    Args:
        plan: inputs of the run.
        writer: writer of the run's folder.
        console: console on stderr, for messages and the live display.

    Raises:
        UnreachableError: no valid response from the target; no request of the trace was sent.
        UsageError: the target cannot serve the plan; no request of the trace was sent.
        Interrupted: a signal arrived before any request of the trace was sent.
        DiskFullError: the disk is full; the records that fitted are kept.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    stopper = _Stopper(task)

    def interrupted(reason: str) -> None:
        loop.call_soon_threadsafe(stopper.stop, Interrupted, reason)

    with stop_on_signals(writer, interrupted):
        try:
            return await _replay(plan, writer, stopper, console)
        except asyncio.CancelledError:
            why = stopper.reason or "interrupted"
            raise Interrupted(f"{why}; {writer.content_clause}") from None


async def _replay(
    plan: RunPlan, writer: RunWriter, stopper: _Stopper, console: Console
) -> FinishedRun:
    options = plan.options

    def warn(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    async with AsyncExitStack() as stack:
        observer = await _start_observer(plan, stack, console)
        targets, service_url = await _start_targets(plan, writer, stack, console)
        session = await stack.enter_async_context(open_session(plan.headers, plan.tls))
        sender_plan, target_summary = await prepare_sending(plan, targets, session, warn)
        if options.check_baseline is not None or options.check_recorded is not None:
            _require_comparable(plan, target_summary)
        if observer is not None:
            await observer.wait_ready()
        if options.start_at_ns is not None:
            start = format_instant(options.start_at_ns)
            warn(f"the run starts at {start}; {describe_clock()}")
        run = _Run(plan, writer, stopper, target_summary, observer)
        senders: Senders
        if plan.workers > 1:
            senders = SenderProcesses(sender_plan, plan.workers, run.record)
        else:
            senders = SendingLoop(sender_plan, session, run.record, plan.follow_ups)
        summary = await run.drive(senders, service_url)
    ended_by: AbortedRun | Interrupted | None = None
    if stopper.error is Interrupted:
        ended_by = Interrupted(
            f"{stopper.reason} after {run.sent} of {plan.stats.own_rows}; {writer.content_clause}"
        )
    elif stopper.error is AbortedRun:
        ended_by = AbortedRun(f"aborted: {stopper.reason}; {writer.content_clause}")
    return FinishedRun(summary=summary, ended_by=ended_by)


def _require_comparable(plan: RunPlan, target: TargetSummary) -> None:
    """Reject a run that could not be compared with the runs that its options name."""
    from goodput_replay.compare.comparable import (  # noqa: PLC0415 - few runs are checked
        RunInputs,
        require_comparable,
    )

    client = ClientSummary(cpu_s=0.0, cpus=count_cpus(), peak_in_flight=0)
    require_comparable(
        RunInputs.of(plan.info(target=target, started=datetime.now(UTC), client=client)),
        baseline=plan.options.check_baseline,
        recorded=plan.options.check_recorded,
        revision=plan.options.recorded_revision,
    )


async def _start_targets(
    plan: RunPlan, writer: RunWriter, stack: AsyncExitStack, console: Console
) -> tuple[tuple[Target, ...], str | None]:
    """Return the running targets, or start the manifest's service for this run.

    Returns:
        The targets, and the metrics page of a started service.
    """
    options = plan.options
    if options.targets:
        return options.targets, None
    assert options.manifest is not None
    console.print(f"starting {plan.service}", highlight=False)
    service = await stack.enter_async_context(
        running_service(
            options.manifest,
            device=options.device,
            model_path=options.model_path,
            log=writer.path / SERVICE_LOG_FILE,
            # Gets its final name together with the records, when these are complete.
            decisions=partial_path(writer.path / DECISIONS_FILE),
            report=lambda line: console.print(
                printable(line), highlight=False, markup=False, soft_wrap=True
            ),
        )
    )
    return (parse_target(service.url),), f"{service.admin_url}{PATH_METRICS}"


async def _start_observer(
    plan: RunPlan, stack: AsyncExitStack, console: Console
) -> RunObserver | None:
    """Start the process that shows the run; None if it would show nothing."""
    options = ObserverOptions(
        ui_port=(plan.options.ui_port or 0) if plan.options.ui else None,
        prometheus=plan.options.prometheus,
    )
    long = plan.has_open_end or plan.stats.last_ns >= LINE_EVERY_NS
    shown = console.is_terminal or long
    scraped = plan.options.scrape_service or plan.options.scrape
    if not shown and not scraped and options == ObserverOptions():
        return None
    return await stack.enter_async_context(RunObserver(options, console))


class _Run:
    """The part of a replay during which requests are in flight."""

    def __init__(
        self,
        plan: RunPlan,
        writer: RunWriter,
        stopper: _Stopper,
        target: TargetSummary,
        observer: RunObserver | None,
    ) -> None:
        self._plan = plan
        self._writer = writer
        self._stopper = stopper
        self._target = target
        self._observer = observer
        rule = plan.options.abort_on
        self._error_rate = None if rule is None else ErrorRateWatch(rule)
        self._recorded: Counter[int] = Counter()
        self._judged_span = plan.make_judged_span()
        self.sent = 0

    async def drive(self, senders: Senders, service_url: str | None) -> Summary:
        """Send all requests and judge the run, even if it ends early.

        Args:
            senders: send the requests.
            service_url: metrics page of the service that was started for the run; None without one.
        """
        plan = self._plan
        closed = plan.options.concurrency is not None
        zero_ns, ended_ns, started, spent_ns = 0, 0, datetime.now(UTC), 0
        clock_error_ns: int | None = None
        clocks = ClockReading.now()

        def read_progress() -> RunProgress:
            progress = senders.progress()
            return RunProgress(
                elapsed_ns=time.monotonic_ns() - zero_ns,
                duration_ns=None if plan.has_open_end else plan.stats.last_ns,
                planned=plan.stats.own_rows,
                sent=progress.sent,
                in_flight=progress.in_flight,
                loop_lag_p99_ns=progress.loop_lag_p99_ns,
                loop_lag_max_ns=progress.loop_lag_max_ns,
            )

        failure: Exception | None = None
        try:
            async with senders:
                start_at_ns = await self._await_start()
                lead_ns = await wait_for_start(start_at_ns)
                # Both clocks are read together: `started` is the wall-clock time of `zero_ns`.
                zero_ns, now_ns = time.monotonic_ns() + lead_ns, time.time_ns()
                started_ns = start_at_ns or now_ns + lead_ns
                started = datetime.fromisoformat(format_instant(started_ns))
                clock_error_ns, clocks = read_clock_error_ns(), ClockReading.now()
                spent_ns = -time.process_time_ns()
                if self._observer is not None:
                    scrape = plan.scrape_settings(
                        service_url=service_url, zero_ns=zero_ns, folder=self._writer.path
                    )
                    self._observer.begin(self._describe(started, scrape), read_progress)
                try:
                    await senders.run(zero_ns)
                finally:
                    spent_ns += time.process_time_ns()
                    ended_ns = time.monotonic_ns()
        except UsageError:
            raise  # the start was missed, and nothing was sent
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if self._stopper.error is None:
                raise
            task.uncancel()
        except Exception as error:  # noqa: BLE001 - raised again once the records are judged
            failure = error
        changed = describe_clock_changes(clocks, ClockReading.now(), is_shard=plan.share.count > 1)
        usage = senders.usage()
        self.sent = senders.progress().sent
        if self._observer is not None:
            await self._observer.stop_scraping()
        span_ns = None
        if closed:
            first_ns = usage[0].first_judged_ns if usage else None
            span_ns = (first_ns or 0, ended_ns - zero_ns)
        elif self._judged_span is not None:
            span_ns = self._judged_span.span_ns
        elif self._stopper.reason or failure is not None:
            span_ns = plan.span_until(ended_ns - zero_ns)
        info = plan.info(
            target=self._target,
            started=started,
            client=self._summarise_client(usage, zero_ns=zero_ns, spent_ns=max(0, spent_ns)),
            salt=plan.salt,
            stopped=self._stopper.reason or changed,
            span_ns=span_ns,
            loop_lag_p99_ns=max((one.loop_lag_p99_ns for one in usage), default=0),
            loop_lag_max_ns=max((one.loop_lag_max_ns for one in usage), default=0),
            clock_error_ns=clock_error_ns,
        )
        if failure is None:
            summary = self._writer.finish(info)
            if self._observer is not None:
                self._observer.end(self._writer.path)
            return summary
        self._writer.finish_failed(info, failure)
        raise failure

    async def _await_start(self) -> int | None:
        """Return the start as Unix nanoseconds, once it is near; None to start soon."""
        plan = self._plan
        if plan.options.arm is None:
            return plan.options.start_at_ns
        return await await_start(
            plan.options.arm,
            token=plan.arm_token,
            share=plan.share,
            requests=plan.stats.own_rows,
        )

    def _summarise_client(
        self, usage: tuple[SenderUsage, ...], *, zero_ns: int, spent_ns: int
    ) -> ClientSummary:
        """Describe this process and its senders.

        Args:
            usage: usage of each sender.
            zero_ns: time zero of the run, on the monotonic clock.
            spent_ns: CPU time of this process, which may be the only sender.
        """
        several = self._plan.workers > 1
        if several:
            spent_ns += sum(one.cpu_ns for one in usage)
        return ClientSummary(
            cpu_s=seconds(spent_ns),
            cpus=count_cpus(),
            peak_in_flight=sum(one.peak_in_flight for one in usage),
            stalls=tuple(
                summarise_stall(stall, zero_ns, number)
                for number, one in enumerate(usage)
                for stall in one.stalls
            ),
            senders=tuple(
                SenderSummary(
                    shard=None,
                    requests=self._recorded[number],
                    cpu_s=seconds(one.cpu_ns),
                    peak_in_flight=one.peak_in_flight,
                    loop_lag_p99_ms=to_ms(one.loop_lag_p99_ns),
                    loop_lag_max_ms=to_ms(one.loop_lag_max_ns),
                )
                for number, one in enumerate(usage)
            )
            if several
            else (),
        )

    def _describe(self, started: datetime, scrape: ScrapeSettings | None) -> Begin:
        """Describe the run for its live display."""
        plan = self._plan
        info = plan.info(
            target=self._target,
            started=started,
            client=ClientSummary(cpu_s=0.0, cpus=count_cpus(), peak_in_flight=0),
            salt=plan.salt,
        )
        return Begin(
            window=LiveWindow(
                slo=plan.slo,
                start_ns=0 if plan.has_open_end else plan.window_start_ns,
                length_ns=None if plan.has_open_end else plan.window_ns,
                confidence=float(plan.options.confidence),
                closed_loop=plan.options.concurrency is not None,
                shard="" if info.run.shard is None else str(info.run.shard),
                tightest_ttft_ns=plan.stats.tightest_ttft_ns,
            ),
            info=info,
            scrape=scrape,
        )

    def record(self, record: RequestRecord, warmup: bool) -> None:  # noqa: FBT001 - a callback
        """Judge, record and show a request that ended; abort the run if too many failed.

        Raises:
            DiskFullError: the disk is full.
        """
        self._recorded[record.sender] += 1
        if self._judged_span is not None and not warmup:
            self._judged_span.add(record)
        self._writer.append(record, warmup=warmup)
        if self._observer is not None:
            self._observer.add(record, warmup=warmup)
        if self._error_rate is not None and self._stopper.error is None:
            reason = self._error_rate.count(record.outcome, time.monotonic_ns())
            if reason is not None:
                self._stopper.stop(AbortedRun, reason)
