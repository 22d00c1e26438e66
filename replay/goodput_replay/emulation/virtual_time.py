"""`replay --emulate`: the fleet between a plan and a run's folder.

The folder's bytes are a function of the command: no time and no figure of this machine enters.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from rich.progress import BarColumn, Progress, TextColumn

from goodput_core.cli import installed_version
from goodput_core.errors import Interrupted
from goodput_core.units import NS_PER_S, NS_PER_US, format_duration
from goodput_replay.emulation.control import control_loop
from goodput_replay.emulation.emulate import emulate
from goodput_replay.job import Finished, Job
from goodput_replay.run.facts import (
    ClientFacts,
    EmulationFacts,
    LengthPinning,
    RunFacts,
    TargetFacts,
)
from goodput_replay.run.files import DiskFullError
from goodput_replay.run.stopping import watching_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.settings import FleetOutcome, FleetSettings
    from goodput_replay.plan import PlannedRequest, PlanStats
    from goodput_replay.run.folder import RunWriter

__all__ = ["Stopped", "display", "emulated_run", "stoppable"]

_BYTES_PER_GB: Final = 1_000_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def emulated_run(
    job: Job, settings: FleetSettings, writer: RunWriter, console: Console
) -> Finished:
    """Serve the plan in virtual time and judge it.

    Args:
        job: what to do.
        settings: the fleet that does it.
        writer: an empty run folder.
        console: on stderr, for progress.

    Raises:
        InputError: the fleet asks for what cannot be.
        Interrupted: by a signal before the first request had ended.
        DiskFullError: the disk filled up; what fitted is kept.
    """
    outcome: FleetOutcome | None = None
    stopped = ""
    failure: Exception | None = None
    with stoppable(writer) as check, display(job.stats, console) as ended:

        def record(planned: PlannedRequest, one: RequestRecord) -> None:
            check()
            writer.append(one, warmup=planned.warmup)
            ended(one)

        try:
            with control_loop(settings, writer.path) as loop:

                def heard(planned: PlannedRequest, one: RequestRecord) -> None:
                    if loop is not None:
                        loop.ended(planned, one)
                    record(planned, one)

                actors = [] if loop is None else [loop]
                outcome = emulate(job.plan.requests(), settings, heard, actors=actors)
        except Stopped as stop:
            stopped = str(stop)
        except Exception as error:  # noqa: BLE001 - raised again once the records are judged
            failure = error
    if not writer.rows:
        if failure is not None:
            raise failure
        raise Interrupted(f"{stopped}; no request had ended")
    facts = _facts(job, settings, outcome, stopped)
    if failure is not None:
        full = isinstance(failure, DiskFullError)
        reason = "because the disk was full" if full else f"as it failed: {failure}"
        with suppress(Exception):  # what went wrong first is what the user hears
            writer.finish(replace(facts, complete=False, abort_reason=reason))
        raise failure
    summary = writer.finish(facts, report=job.options.report)
    interrupted = None
    if stopped:
        interrupted = Interrupted(
            f"{stopped} after {writer.rows} of {job.stats.rows}; {writer.holds}"
        )
    return Finished(summary=summary, ended_by=interrupted)


def _facts(
    job: Job, settings: FleetSettings, outcome: FleetOutcome | None, stopped: str
) -> RunFacts:
    stats, options = job.stats, job.options
    start_ns = (stats.first_judged_ns or 0) if stats.warmup_rows else 0
    return RunFacts(
        trace=job.trace,
        target=TargetFacts(
            url=f"emulated://{settings.profile.name}",
            endpoint="",
            model=job.service,
            service=job.service,
            pinning=LengthPinning.HEADER,
        ),
        promise=job.promise,
        client=ClientFacts(peak_in_flight=outcome.peak_in_flight if outcome else 0),
        window_start_ns=start_ns,
        window_ns=max(1, job.plan.window_ns(stats) - start_ns),
        rows_planned=stats.rows - stats.warmup_rows,
        warmup_rows=stats.warmup_rows,
        seed=options.seed,
        confidence=float(options.confidence),
        started_at=_zero_of(job).isoformat(timespec="microseconds"),
        version=installed_version(),
        command=job.command,
        complete=not stopped,
        abort_reason=stopped,
        emulation=_emulation(settings, outcome),
    )


def _zero_of(job: Job) -> datetime:
    """The trace's own time at the run's zero; a clock that is relative counts from 1970."""
    plan = job.plan
    return _EPOCH + timedelta(
        microseconds=plan.transforms.zero_ns(plan.trace.first_ns) // NS_PER_US
    )


def _emulation(settings: FleetSettings, outcome: FleetOutcome | None) -> EmulationFacts:
    profile, configure, decode = settings.profile, settings.configure, settings.decode
    topology = ""
    if settings.migration is not None:
        rules = settings.migration
        topology = (
            f"requests move where each has under {rules.below_blocks} free blocks, "
            f"{rules.link_bytes_per_s / _BYTES_PER_GB:g} GB/s between any two"
        )
    elif decode is not None:
        topology = (
            f"{settings.replicas} prefill, {decode.replicas} decode, "
            f"{decode.link_bytes_per_s / _BYTES_PER_GB:g} GB/s between them"
        )
    facts = EmulationFacts(
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
    )
    if outcome is None:
        return facts
    return replace(
        facts,
        end_ns=outcome.end_ns,
        device_ns=outcome.replica_ns * profile.devices,
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
    """A person or the system asked to stop."""


@contextmanager
def stoppable(writer: RunWriter) -> Iterator[Callable[[], None]]:
    """Watch for signals; the main thread only.

    Args:
        writer: keeps what it has when a second signal ends the process.

    Yields:
        `check`, which raises `Stopped` once a signal has come.
    """
    reasons: list[str] = []

    def check() -> None:
        if reasons:
            raise Stopped(reasons[0])

    with watching_signals(reasons.append, writer):
        yield check


_LOOK_EVERY: Final = 64  # requests
_BAR_EVERY_NS: Final = NS_PER_S // 5
_LINE_EVERY_NS: Final = 10 * NS_PER_S


@contextmanager
def display(stats: PlanStats, console: Console) -> Iterator[Callable[[RequestRecord], None]]:
    """Show how far a run has come until the block ends.

    Args:
        stats: of the plan.
        console: on stderr.

    Yields:
        To be told of each request that ended.
    """
    if not console.is_terminal:

        def line(_: int, words: str) -> None:
            console.print(words, soft_wrap=True, highlight=False)

        yield _Pulse(stats, _LINE_EVERY_NS, line).ended
        return
    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=stats.rows)

        def draw(done: int, words: str) -> None:
            bar.update(task, completed=done, description=words)

        yield _Pulse(stats, _BAR_EVERY_NS, draw).ended


class _Pulse:
    """Counts, and now and then says how far it is."""

    def __init__(self, stats: PlanStats, every_ns: int, say: Callable[[int, str], None]) -> None:
        self._stats = stats
        self._every_ns = every_ns
        self._say = say
        self._started_ns = self._said_ns = time.monotonic_ns()
        self._done = 0

    def ended(self, record: RequestRecord) -> None:
        """A request ended."""
        self._done += 1
        if self._done % _LOOK_EVERY:
            return
        now_ns = time.monotonic_ns()
        if now_ns - self._said_ns < self._every_ns:
            return
        self._said_ns = now_ns
        rate = self._done * NS_PER_S / (now_ns - self._started_ns)
        virtual = format_duration(record.end_ns or 0)
        self._say(
            self._done,
            f"{virtual} of virtual time, {self._done:,} of {self._stats.rows:,} requests, "
            f"{rate:,.0f} requests/s",
        )
