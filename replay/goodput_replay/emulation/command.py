"""`replay --emulate`: the fleet between a plan and a run's folder.

The folder's bytes are a function of the command: no time and no figure of this machine enters.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from goodput_core.cli import installed_version
from goodput_core.errors import Interrupted
from goodput_core.units import NS_PER_US
from goodput_replay.emulation.decisions import control_loop
from goodput_replay.emulation.emulating import emulate
from goodput_replay.emulation.interrupt import Stopped, stoppable
from goodput_replay.emulation.progress import display
from goodput_replay.job import Finished, Job
from goodput_replay.run.disk import DiskFullError
from goodput_replay.run.facts import (
    ClientFacts,
    EmulationFacts,
    LengthPinning,
    RunFacts,
    TargetFacts,
)

if TYPE_CHECKING:
    from rich.console import Console

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.settings import FleetOutcome, FleetSettings
    from goodput_replay.plan import PlannedRequest
    from goodput_replay.run.folder import RunWriter

__all__ = ["emulated_run"]

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
