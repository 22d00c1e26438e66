"""One replay from a ready plan to a finished run folder, on one event loop.

The order matters: whatever can be refused is refused before the first request, the clock starts
only when requests are prepared, and whatever ends the run, its records are closed and judged.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from yarl import URL

from goodput_core.cli import installed_version
from goodput_core.errors import AbortedRun, Interrupted, UsageError
from goodput_core.units import NS_PER_MS, NS_PER_US
from goodput_replay.arguments import Pinning
from goodput_replay.job import Finished, Job
from goodput_replay.run.facts import (
    ClientFacts,
    LengthPinning,
    RunFacts,
    TargetFacts,
)
from goodput_replay.run.files import DECISIONS_FILE, PARTIAL_SUFFIX, DiskFullError
from goodput_replay.run.stopping import StoppedBy, Stopper, watching_signals
from goodput_replay.sending.abort import ErrorRateWatch
from goodput_replay.sending.body import Endpoint, PreparedRequest, RequestRenderer
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.client.exchange import Exchange
from goodput_replay.sending.live_display import Moment, Observer, display
from goodput_replay.sending.local_service import running_service
from goodput_replay.sending.lookahead import Lookahead
from goodput_replay.sending.pacer import open_pacer
from goodput_replay.sending.preflight import ModelNames, Served, ask, choose_models
from goodput_replay.sending.process import LoopWatch, cpu_ns, cpus, quiet
from goodput_replay.sending.prompts import Prompts, TokenIdPrompts, WordPrompts
from goodput_replay.sending.sender import Sender
from goodput_replay.sending.target import Target, parse_target

if TYPE_CHECKING:
    from rich.console import Console

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.run.folder import RunWriter
    from goodput_replay.run.summary import Summary

__all__ = ["replay"]

_LEAD_NS: Final = 200 * NS_PER_MS
_SERVICE_LOG: Final = "service.log"


async def replay(job: Job, writer: RunWriter, console: Console) -> Finished:
    """Reach the target, send the plan, judge it.

    Args:
        job: what to do.
        writer: an empty run folder.
        console: on stderr, for progress.

    Raises:
        UnreachableError: the target did not answer as it should; nothing was sent.
        UsageError: the target cannot do what was asked; nothing was sent.
        Interrupted: by a signal, before anything was sent or once the run was judged.
        DiskFullError: the disk filled up; what fitted is kept.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    stopper = Stopper(task)

    def interrupted(reason: str) -> None:
        loop.call_soon_threadsafe(stopper.stop, StoppedBy.SIGNAL, reason)

    with watching_signals(interrupted, writer):
        try:
            return await _replay(job, writer, stopper, console)
        except asyncio.CancelledError:
            why = stopper.reason or "interrupted"
            raise Interrupted(f"{why}; {writer.holds}") from None


async def _replay(job: Job, writer: RunWriter, stopper: Stopper, console: Console) -> Finished:
    async with AsyncExitStack() as stack:
        target = await _reach(job, writer, stack, console)
        session = await stack.enter_async_context(open_session(job.headers))
        served = await ask(session, target)
        names = choose_models(
            served,
            asked=job.options.models,
            only=job.options.model,
            in_trace=job.stats.models,
        )
        pinning = _pinning(job.options.pinning, served)
        run = _Run(
            job=job,
            writer=writer,
            stopper=stopper,
            target=target,
            names=names,
            pinning=pinning,
        )
        exchange = Exchange(
            session,
            URL(f"{target.url}{job.options.endpoint.path}"),
            timeout_ns=job.options.timeout_ns,
            pinned=pinning is not LengthPinning.NONE,
        )
        summary = await run.drive(exchange, console)
    ended_by: AbortedRun | Interrupted | None = None
    if stopper.by is StoppedBy.SIGNAL:
        ended_by = Interrupted(
            f"{stopper.reason} after {run.sent} of {job.stats.rows}; {writer.holds}"
        )
    elif stopper.by is StoppedBy.RULE:
        ended_by = AbortedRun(f"given up: {stopper.reason}; {writer.holds}")
    return Finished(summary=summary, ended_by=ended_by)


async def _reach(job: Job, writer: RunWriter, stack: AsyncExitStack, console: Console) -> Target:
    """The running target, or a service started for this run."""
    options = job.options
    if options.target is not None:
        return options.target
    assert options.manifest is not None
    console.print(f"starting {job.service}", highlight=False)
    url = await stack.enter_async_context(
        running_service(
            options.manifest,
            device=options.device,
            log=writer.path / _SERVICE_LOG,
            # Like the records, they are in their place when the run's records are whole.
            decisions=writer.path / (DECISIONS_FILE + PARTIAL_SUFFIX),
        )
    )
    return parse_target(url)


def _pinning(asked: Pinning, served: Served) -> LengthPinning:
    if asked is Pinning.AUTO:
        return LengthPinning.HEADER if served.ours else LengthPinning.MAX_TOKENS
    if asked is Pinning.HEADER:
        if not served.ours:
            raise UsageError(
                "--length-pinning header: the target is not our engine and would ignore it; "
                "use max-tokens"
            )
        return LengthPinning.HEADER
    return LengthPinning.MAX_TOKENS if asked is Pinning.MAX_TOKENS else LengthPinning.NONE


class _Run:
    """The part of a replay during which requests are in flight."""

    def __init__(
        self,
        *,
        job: Job,
        writer: RunWriter,
        stopper: Stopper,
        target: Target,
        names: ModelNames,
        pinning: LengthPinning,
    ) -> None:
        self._job = job
        self._writer = writer
        self._stopper = stopper
        self._target = target
        self._names = names
        self._pinning = pinning
        self._observer = Observer(job.promise.by_name())
        rule = job.options.abort_on
        self._errors = None if rule is None else ErrorRateWatch(rule)
        self.sent = 0

    async def drive(self, exchange: Exchange, console: Console) -> Summary:
        """Send everything, then judge, whatever ended it."""
        job = self._job
        pacer = open_pacer()
        sender = Sender(exchange.run, pacer, self._ended)
        lookahead = Lookahead(job.plan.requests(), self._renderer().render)
        watch = LoopWatch()
        zero_ns, started, spent_ns = 0, datetime.now(UTC), 0

        def now() -> Moment:
            return Moment(
                elapsed_ns=pacer.now_ns() - zero_ns,
                duration_ns=job.stats.last_ns,
                planned=job.stats.rows,
                sent=sender.sent,
                in_flight=sender.in_flight,
                progress=self._observer.progress(),
            )

        failure: Exception | None = None
        try:
            await lookahead.fill()
            with quiet():
                # One after the other, so that other clocks can be laid beside the run's.
                started = datetime.now(UTC) + timedelta(microseconds=_LEAD_NS // NS_PER_US)
                zero_ns = pacer.now_ns() + _LEAD_NS
                spent_ns = -cpu_ns()
                watching = asyncio.ensure_future(watch.run())
                try:
                    with display(now, console):
                        await sender.run(lookahead, zero_ns)
                finally:
                    watching.cancel()
                    spent_ns += cpu_ns()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if self._stopper.by is None:
                raise
            task.uncancel()
        except Exception as error:  # noqa: BLE001 - raised again once the records are judged
            failure = error
        finally:
            lookahead.close()
            pacer.close()
        self.sent = sender.sent
        client = ClientFacts(
            cpu_ns=max(0, spent_ns),
            loop_lag_p99_ns=watch.lateness.quantile_ns(0.99),
            loop_lag_max_ns=watch.lateness.max_ns,
            peak_in_flight=sender.peak_in_flight,
            cpus=cpus(),
        )
        facts = self._facts(started, client)
        if failure is None:
            return self._writer.finish(facts, report=job.options.report)
        full = isinstance(failure, DiskFullError)
        reason = "because the disk was full" if full else f"as it failed: {failure}"
        try:
            self._writer.finish(
                replace(facts, complete=False, abort_reason=reason), report=job.options.report
            )
        except DiskFullError:
            raise  # it knows best what was kept
        except Exception:  # noqa: BLE001, S110 - what went wrong first is what the user hears
            pass
        raise failure

    def _renderer(self) -> RequestRenderer:
        options = self._job.options
        return RequestRenderer(
            endpoint=options.endpoint,
            prompts=_prompts(options.endpoint, self._job.salt.encode()),
            pinning=self._pinning,
            model_for=self._names,
        )

    def _ended(self, request: PreparedRequest, record: RequestRecord) -> None:
        warmup = request.planned.warmup
        judgement = self._writer.append(record, warmup=warmup)
        self._observer.ended(record, judgement)
        if self._errors is not None and self._stopper.by is None:
            broken = self._errors.ended(record.outcome, time.monotonic_ns())
            if broken is not None:
                self._stopper.stop(StoppedBy.RULE, broken)

    def _facts(self, started: datetime, client: ClientFacts) -> RunFacts:
        job, options, stats = self._job, self._job.options, self._job.stats
        first_ns = stats.first_judged_ns or 0
        start_ns = first_ns if stats.warmup_rows else 0
        names = dict.fromkeys(self._names(name) for name in stats.models)
        return RunFacts(
            trace=job.trace,
            target=TargetFacts(
                url=self._target.url,
                endpoint=options.endpoint.path,
                model=", ".join(names),
                service=job.service,
                pinning=self._pinning,
                header_names=tuple(job.headers),
            ),
            promise=job.promise,
            client=client,
            window_start_ns=start_ns,
            window_ns=max(1, job.plan.window_ns(stats) - start_ns),
            rows_planned=stats.rows - stats.warmup_rows,
            warmup_rows=stats.warmup_rows,
            seed=options.seed,
            confidence=float(options.confidence),
            salt=job.salt,
            started_at=started.isoformat(timespec="microseconds"),
            version=installed_version(),
            command=job.command,
            complete=self._stopper.by is None,
            abort_reason=self._stopper.reason,
        )


def _prompts(endpoint: Endpoint, salt: bytes) -> Prompts:
    if endpoint is Endpoint.COMPLETIONS:
        return TokenIdPrompts(salt)
    from goodput_engine.tokens import CHAT_MESSAGE_TOKENS, CHAT_REPLY_TOKENS  # noqa: PLC0415

    return WordPrompts(salt, overhead_tokens=CHAT_MESSAGE_TOKENS + CHAT_REPLY_TOKENS)
