"""One replay in real time, from a run plan to a finished run folder, on one event loop.

All checks run before the first request. The run's zero is set after the first requests were
prepared. The records are closed and judged even if the run fails.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final

from yarl import URL

from goodput_core.errors import AbortedRun, Interrupted, UsageError
from goodput_core.files import partial_path
from goodput_core.units import NS_PER_MS, NS_PER_US
from goodput_replay.run.files import DECISIONS_FILE
from goodput_replay.run.folder import FinishedRun, stop_on_signals
from goodput_replay.run.summary import ClientSummary, LengthPinning, TargetSummary
from goodput_replay.run.summary_builder import seconds
from goodput_replay.sending.abort import ErrorRateWatch
from goodput_replay.sending.body import PreparedRequest, RequestRenderer
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.client.exchange import Exchange
from goodput_replay.sending.live_display import LiveCounts, RunProgress, display
from goodput_replay.sending.local_service import running_service
from goodput_replay.sending.lookahead import Lookahead
from goodput_replay.sending.pacer import open_pacer
from goodput_replay.sending.preflight import (
    PROBE_TIMEOUT_NS,
    ModelNames,
    Served,
    ask,
    choose_models,
    probe,
    probe_of,
)
from goodput_replay.sending.process import LoopWatch, cpu_ns, cpus, gc_paused
from goodput_replay.sending.prompts import PromptRenderer, TokenIdPrompts, WordPrompts
from goodput_replay.sending.sender import OpenLoopSender
from goodput_replay.sending.target import Endpoint, Target, parse_target

if TYPE_CHECKING:
    from rich.console import Console

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import RunPlan
    from goodput_replay.run.folder import RunWriter
    from goodput_replay.run.summary import Summary
    from goodput_replay.run.summary_builder import RunInfo

__all__ = ["replay"]

_LEAD_NS: Final = 200 * NS_PER_MS
_SERVICE_LOG: Final = "service.log"


class _StoppedBy(Enum):
    """Cause of an early end of a run."""

    SIGNAL = "signal"
    RULE = "rule"


class _Stopper:
    """Cancels one task for one reason; later reasons are ignored.

    Args:
        task: the task to cancel.
    """

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.by: _StoppedBy | None = None
        self.reason = ""

    def stop(self, by: _StoppedBy, reason: str) -> None:
        """Cancel the task; `reason` follows "the run ended early: "."""
        if self.by is None:
            self.by, self.reason = by, reason
            self._task.cancel()


async def replay(plan: RunPlan, writer: RunWriter, console: Console) -> FinishedRun:
    """Connect to the target, send the plan and judge the run.

    Args:
        plan: the run.
        writer: an empty run folder.
        console: on stderr, for progress.

    Raises:
        UnreachableError: no valid response from the target; no request was sent.
        UsageError: the target cannot serve the plan; no request was sent.
        Interrupted: by a signal, before any request was sent.
        DiskFullError: the disk is full; the records that fitted are kept.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    stopper = _Stopper(task)

    def interrupted(reason: str) -> None:
        loop.call_soon_threadsafe(stopper.stop, _StoppedBy.SIGNAL, reason)

    with stop_on_signals(writer, interrupted):
        try:
            return await _replay(plan, writer, stopper, console)
        except asyncio.CancelledError:
            why = stopper.reason or "interrupted"
            raise Interrupted(f"{why}; {writer.holds}") from None


async def _replay(
    plan: RunPlan, writer: RunWriter, stopper: _Stopper, console: Console
) -> FinishedRun:
    options = plan.options
    async with AsyncExitStack() as stack:
        target = await _reach(plan, writer, stack, console)
        session = await stack.enter_async_context(open_session(plan.headers))
        served = await ask(session, target)
        names = choose_models(
            served, asked=options.models, only=options.model, in_trace=plan.stats.models
        )
        pinning = _pinning(options.pinning, served)
        url = URL(f"{target.url}{options.endpoint.path}")
        pinned = pinning is not LengthPinning.NONE
        renderer = RequestRenderer(
            endpoint=options.endpoint,
            prompts=_prompts(options.endpoint, plan.salt.encode()),
            pinning=pinning,
            model_for=names,
        )
        if options.probe:
            probes = [renderer.render(probe_of(one)) for one in plan.stats.examples.values()]
            sender = Exchange(session, url, timeout_ns=PROBE_TIMEOUT_NS, pinned=pinned)
            for warning in await probe(sender, probes, str(url)):
                console.print(warning, soft_wrap=True, highlight=False, markup=False)
        exchange = Exchange(session, url, timeout_ns=options.timeout_ns, pinned=pinned)
        run = _Run(
            plan=plan,
            writer=writer,
            stopper=stopper,
            target=target,
            names=names,
            pinning=pinning,
        )
        summary = await run.drive(exchange, renderer, console)
    ended_by: AbortedRun | Interrupted | None = None
    if stopper.by is _StoppedBy.SIGNAL:
        ended_by = Interrupted(
            f"{stopper.reason} after {run.sent} of {plan.stats.rows}; {writer.holds}"
        )
    elif stopper.by is _StoppedBy.RULE:
        ended_by = AbortedRun(f"aborted: {stopper.reason}; {writer.holds}")
    return FinishedRun(summary=summary, ended_by=ended_by)


async def _reach(
    plan: RunPlan, writer: RunWriter, stack: AsyncExitStack, console: Console
) -> Target:
    """Return the running target, or start the manifest's service for this run."""
    options = plan.options
    if options.target is not None:
        return options.target
    assert options.manifest is not None
    console.print(f"starting {plan.service}", highlight=False)
    url = await stack.enter_async_context(
        running_service(
            options.manifest,
            device=options.device,
            log=writer.path / _SERVICE_LOG,
            # Renamed like the records, once the run's records are complete.
            decisions=partial_path(writer.path / DECISIONS_FILE),
        )
    )
    return parse_target(url)


def _pinning(asked: LengthPinning | None, served: Served) -> LengthPinning:
    if asked is None:
        return LengthPinning.HEADER if served.ours else LengthPinning.MAX_TOKENS
    if asked is LengthPinning.HEADER and not served.ours:
        raise UsageError(
            "--length-pinning header: the target is not a Goodput engine and would ignore the "
            "header; use max-tokens"
        )
    return asked


class _Run:
    """The part of a replay during which requests are in flight."""

    def __init__(
        self,
        *,
        plan: RunPlan,
        writer: RunWriter,
        stopper: _Stopper,
        target: Target,
        names: ModelNames,
        pinning: LengthPinning,
    ) -> None:
        self._plan = plan
        self._writer = writer
        self._stopper = stopper
        self._target = target
        self._names = names
        self._pinning = pinning
        self._counts = LiveCounts(plan.slo.by_name())
        rule = plan.options.abort_on
        self._error_rate = None if rule is None else ErrorRateWatch(rule)
        self.sent = 0

    async def drive(
        self, exchange: Exchange, renderer: RequestRenderer, console: Console
    ) -> Summary:
        """Send all requests and judge the run, even if it ends early."""
        plan = self._plan
        pacer = open_pacer()
        sender = OpenLoopSender(exchange.run, pacer, self._ended)
        lookahead = Lookahead(plan.requests.requests(), renderer.render)
        watch = LoopWatch()
        zero_ns, started, spent_ns = 0, datetime.now(UTC), 0

        def now() -> RunProgress:
            return RunProgress(
                elapsed_ns=pacer.now_ns() - zero_ns,
                duration_ns=plan.stats.last_ns,
                planned=plan.stats.rows,
                sent=sender.sent,
                in_flight=sender.in_flight,
                counts=self._counts.snapshot(),
            )

        failure: Exception | None = None
        try:
            await lookahead.fill()
            with gc_paused():
                # Read one after the other, so that other clocks can be aligned with the run's.
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
        client = ClientSummary(
            cpu_s=seconds(max(0, spent_ns)), cpus=cpus(), peak_in_flight=sender.peak_in_flight
        )
        info = self._info(started, client, watch)
        if failure is None:
            return self._writer.finish(info)
        self._writer.finish_failed(info, failure)
        raise failure

    def _ended(self, request: PreparedRequest, record: RequestRecord) -> None:
        judgement = self._writer.append(record, warmup=request.planned.warmup)
        self._counts.add(record, judgement)
        if self._error_rate is not None and self._stopper.by is None:
            broken = self._error_rate.ended(record.outcome, time.monotonic_ns())
            if broken is not None:
                self._stopper.stop(_StoppedBy.RULE, broken)

    def _info(self, started: datetime, client: ClientSummary, watch: LoopWatch) -> RunInfo:
        plan = self._plan
        names = dict.fromkeys(self._names(name) for name in plan.stats.models)
        return plan.info(
            target=TargetSummary(
                url=self._target.url,
                endpoint=plan.options.endpoint.path,
                model=", ".join(names),
                service=plan.service,
                pinning=self._pinning,
                header_names=tuple(plan.headers),
                streaming=True,
            ),
            started=started,
            client=client,
            salt=plan.salt,
            stopped=self._stopper.reason,
            loop_lag_p99_ns=watch.lateness.quantile_ns(0.99),
            loop_lag_max_ns=watch.lateness.max_ns,
        )


def _prompts(endpoint: Endpoint, salt: bytes) -> PromptRenderer:
    if endpoint is Endpoint.COMPLETIONS:
        return TokenIdPrompts(salt)
    from goodput_engine.tokens import CHAT_MESSAGE_TOKENS, CHAT_REPLY_TOKENS  # noqa: PLC0415

    return WordPrompts(salt, overhead_tokens=CHAT_MESSAGE_TOKENS + CHAT_REPLY_TOKENS)
