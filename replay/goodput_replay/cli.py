"""`replay`: from the command line to an exit code."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console

from goodput_core.errors import ExitCode, InputError, UsageError
from goodput_core.spec.choices import ControlMode
from goodput_core.units import NS_PER_S, format_duration
from goodput_engine.manifest_file import read_manifest
from goodput_replay.arguments import ReplayOptions, parse_options
from goodput_replay.dry_run import print_plan
from goodput_replay.job import Finished, Job
from goodput_replay.plan import Plan, PlanStats, survey
from goodput_replay.run.facts import Promise, TraceFacts
from goodput_replay.run.slo import promise_of, read_promise
from goodput_replay.sending.process import open_file_limit
from goodput_replay.sending.target import require_permission
from goodput_traces.format.reader import open_trace
from goodput_traces.sample import sample_path
from goodput_traces.transforms import TransformPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.spec.llmservice import LLMService, LLMServiceSpec
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.run.folder import RunWriter
    from goodput_replay.run.summary import Summary
    from goodput_traces.format.reader import Trace

__all__ = ["main"]

_SAMPLE = "sample"
_SYNTHETIC = "synthetic"


def main(argv: list[str]) -> int:
    """Replay a trace, or rebuild the report of a run.

    Args:
        argv: the arguments after `replay`.

    Returns:
        0 for a complete and valid run and 3 for an invalid one; with `--gate` the verdict's.

    Raises:
        GoodputError: the run could not begin, or ended early.
    """
    if argv[:1] == ["report"]:
        # Drawing needs matplotlib, which takes half a second to load.
        from goodput_replay.report.command import main as report  # noqa: PLC0415

        return report(argv[1:])
    if argv[:1] == ["capacity"]:
        from goodput_replay.sweep.capacity import main as capacity  # noqa: PLC0415

        return capacity(argv[1:])
    options = parse_options(argv)
    trace = open_trace(sample_path() if options.trace == _SAMPLE else options.trace)
    promise, service = _promise(options)
    fleet = _fleet(options, service, promise)
    plan = Plan(
        trace=trace,
        transforms=_transforms(options, trace),
        promise=promise,
        warmup=options.warmup,
    )
    stats = survey(plan)
    _check_rate(options, stats)
    if options.dry_run:
        print_plan(plan, stats, Console(), json=options.json)
        return ExitCode.PASS
    if options.gate and not promise.classes and not stats.rows_with_targets:
        raise UsageError(
            "--gate: nothing was promised, so nothing can be judged; give --slo FILE, -f "
            "MANIFEST, or a trace with targets of its own"
        )
    if options.target is not None:
        require_permission(options.target, granted=options.yes)
    open_file_limit()
    job = Job(
        options=options,
        plan=plan,
        stats=stats,
        trace=_trace_facts(options, trace),
        promise=promise,
        headers=_headers(options),
        salt=options.salt if options.salt is not None else secrets.token_hex(8),
        service="" if service is None else service.metadata.name,
        command=("replay", *_without_secrets(argv)),
    )
    summary = _run(job, fleet)
    return _exit_code(summary, gate=options.gate)


def _run(job: Job, fleet: FleetSettings | None) -> Summary:
    from goodput_replay.run.folder import RunWriter, default_folder  # noqa: PLC0415
    from goodput_replay.run.summary import encode_summary  # noqa: PLC0415
    from goodput_replay.run.terminal import print_summary  # noqa: PLC0415

    options = job.options
    host = "" if options.target is None else options.target.host
    path = options.out or default_folder(datetime.now(UTC), job.trace.name, job.service or host)
    writer = RunWriter.create(
        path, promise=job.promise, force=options.force, keep_gaps=options.gaps
    )
    with writer:
        finished = _carry_out(job, fleet, writer, Console(stderr=True))
    summary = finished.summary
    if options.json:
        sys.stdout.write(encode_summary(summary).decode())
    else:
        print_summary(summary, Console(), folder=path)
    if finished.ended_by is not None:
        raise finished.ended_by
    return summary


def _carry_out(
    job: Job, fleet: FleetSettings | None, writer: RunWriter, console: Console
) -> Finished:
    # Each brings what the other does without: a scheduler, or an HTTP client and its loop.
    if fleet is not None:
        from goodput_replay.emulation.virtual_time import emulated_run  # noqa: PLC0415

        return emulated_run(job, fleet, writer, console)
    from goodput_replay.sending.real_time import replay  # noqa: PLC0415

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(replay(job, writer, console))


def _exit_code(summary: Summary, *, gate: bool) -> int:
    if gate:
        return summary.verdict.kind.exit_code
    return ExitCode.PASS if summary.validity.valid else ExitCode.INVALID


def _promise(options: ReplayOptions) -> tuple[Promise, LLMService | None]:
    """What requests are judged by, and the service to start or to emulate."""
    manifest = options.manifest or options.emulate
    if manifest is not None:
        service = read_manifest(manifest)
        return promise_of(service.spec.slo), service
    return (Promise() if options.slo is None else read_promise(options.slo)), None


def _fleet(
    options: ReplayOptions, service: LLMService | None, promise: Promise
) -> FleetSettings | None:
    """What to emulate, if anything."""
    if options.emulate is None or service is None:
        return None
    from goodput_replay.emulation.settings import (  # noqa: PLC0415
        apply_topology,
        fleet_settings,
        read_topology,
    )

    settings = fleet_settings(
        service,
        device=options.device,
        source=str(options.emulate),
        promise=promise,
        timeout_ns=options.timeout_ns,
        seed=options.seed,
        oracle=options.oracle,
    )
    if options.topology is not None:
        settings = apply_topology(settings, read_topology(options.topology))
    _require_replicas(options.emulate, service.spec, settings)
    return settings


def _require_replicas(manifest: Path, spec: LLMServiceSpec, settings: FleetSettings) -> None:
    """Refuse a fleet that would shed every request: the control law alone starts one from zero."""
    law_starts_some = spec.control.mode is ControlMode.AUTO and spec.replicas is None
    if settings.replicas == 0 and not law_starts_some:
        field = "spec.minReplicas" if spec.replicas is None else "spec.replicas"
        raise InputError(
            f"{manifest}: {field}: 0 replicas would shed every request, and no control law starts "
            "one here; write 1 or more there, or let control.mode be Auto without spec.replicas"
        )


def _transforms(options: ReplayOptions, trace: Trace) -> TransformPlan:
    return TransformPlan(
        window=options.window,
        rate_scale=options.rate_scale,
        seed=options.seed,
        class_rules=options.class_rules,
        limit=options.limit,
        speed=options.speed,
        first_ns=trace.first_ns,
    )


def _check_rate(options: ReplayOptions, stats: PlanStats) -> None:
    if options.max_rate is not None and stats.peak_1s > options.max_rate:
        raise UsageError(
            f"--max-rate {options.max_rate}: the busiest second of the plan, "
            f"{format_duration(stats.peak_at_ns)} after its start, holds {stats.peak_1s} requests; "
            "raise the limit, or send fewer with --rate-scale"
        )


def _headers(options: ReplayOptions) -> dict[str, str]:
    headers = dict(options.headers)
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env, "")
        if not key or not key.isascii() or not key.isprintable():
            what = "holds characters that a header cannot carry" if key else "is not set"
            raise UsageError(f"--api-key-env {options.api_key_env}: the variable {what}")
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _trace_facts(options: ReplayOptions, trace: Trace) -> TraceFacts:
    try:
        with trace.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{trace.path}: cannot be read ({error.strerror})") from error
    metadata = trace.metadata
    return TraceFacts(
        name=_SAMPLE if options.trace == _SAMPLE else Path(options.trace).name,
        digest=f"sha256:{digest}",
        source=metadata.source,
        licence=metadata.licence,
        clock=metadata.clock.value,
        synthetic=metadata.source.startswith(_SYNTHETIC),
        transforms=_transform_texts(options),
    )


def _transform_texts(options: ReplayOptions) -> tuple[str, ...]:
    texts = []
    if (window := options.window) is not None:
        end = "" if window.end_ns is None else f"{window.end_ns / NS_PER_S:g}s"
        texts.append(f"--window {window.start_ns / NS_PER_S:g}s..{end}")
    if options.rate_scale != 1:
        texts.append(f"--rate-scale {float(options.rate_scale):g}")
    texts += [f"--class-by {text!r}" for text in options.class_rule_texts]
    if options.limit is not None:
        texts.append(f"--limit {options.limit}")
    if options.speed != 1:
        texts.append(f"--speed {float(options.speed):g}")
    return tuple(texts)


def _without_secrets(argv: Sequence[str]) -> list[str]:
    """Return the arguments with the values of headers left out."""
    return [
        f"{text.partition(':')[0]}: ***"
        if before == "--header" or text.startswith("--header=")
        else text
        for before, text in zip(("", *argv), argv, strict=False)
    ]
