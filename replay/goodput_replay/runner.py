"""Run one `replay` command, from its options to its exit code.

All inputs are checked here, before a folder is created or a request is sent. The run itself is in
`sending.real_time` or `emulation.virtual_time`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console

from goodput_core.errors import ExitCode, InputError, UsageError
from goodput_core.process import count_cpus, raise_open_files
from goodput_core.slo.intervals import requests_needed
from goodput_core.slo.targets import format_objective
from goodput_core.slo.verdict import MIN_BLOCKS
from goodput_core.spec.choices import ControlMode
from goodput_core.text import printable
from goodput_core.units import NS_PER_S, format_duration, format_estimate
from goodput_engine.device.choice import choose_device
from goodput_engine.manifest_file import read_manifest
from goodput_replay.dry_run import print_plan
from goodput_replay.load import LOAD
from goodput_replay.plan import PlanStats, RequestPlan, choose_workers, require_fit, survey
from goodput_replay.result_options import reporting_errors, write_result
from goodput_replay.run_plan import RunPlan
from goodput_replay.runs.folder import RunWriter, default_folder
from goodput_replay.runs.json_results import encode_json
from goodput_replay.runs.slo import SLOClasses, read_slo, slo_classes
from goodput_replay.runs.summary import Summary, TraceSummary
from goodput_replay.runs.terminal import print_summary
from goodput_replay.sending.open_streams import count_ports, find_stream_limit
from goodput_replay.sending.target import require_permission, tls_context
from goodput_replay.sending.tokenizer import TokenizerVocabulary, find_tokenizer, read_tokenizer
from goodput_replay.sessions import open_follow_ups
from goodput_replay.slo_options import OTHER_CLASS
from goodput_replay.start_time import require_ahead
from goodput_replay.storage import (
    download_file,
    is_uri,
    parse_uri,
    require_writable,
    upload_folder,
)
from goodput_traces.format.reader import open_trace
from goodput_traces.sample import SAMPLE, trace_path
from goodput_traces.transforms import TransformPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.spec.llmservice import LLMService, LLMServiceSpec
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.options import ReplayOptions
    from goodput_replay.runs.folder import FinishedRun
    from goodput_traces.format.reader import Trace

__all__ = ["run"]

_SYNTHETIC = "synthetic"
_LEAST_IDLE_SHARE = 0.1
"""Part of a window without a trace, from which on a note names it."""


def run(options: ReplayOptions, argv: Sequence[str]) -> int:
    """Check the inputs, run the plan, and return the exit code.

    Args:
        options: parsed from `argv`.
        argv: the command line after `replay`, for the summary.

    Returns:
        The exit code.

    Raises:
        GoodputError: the run could not start, or ended early.
    """
    with reporting_errors(options.result_file), ExitStack() as stack:
        return _run(options, argv, stack)


def _open_trace(options: ReplayOptions, stack: ExitStack) -> Trace:
    """Open the trace, or write the load into a temporary one that `stack` removes."""
    path: Path
    if options.load is not None or (options.trace is not None and is_uri(options.trace)):
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="goodput-")))
        path = _download(options, folder) if options.load is None else options.load.write(folder)
    else:
        assert options.trace is not None
        path = trace_path(options.trace)
    return open_trace(path, max_decoded_bytes=options.max_decoded_bytes)


def _download(options: ReplayOptions, folder: Path) -> Path:
    """Copy the trace from object storage into a folder."""
    assert options.trace is not None
    try:
        uri = parse_uri(options.trace)
    except ValueError as error:
        raise UsageError(f"replay: --trace: {error}") from error
    return download_file(uri, folder)


def _run(options: ReplayOptions, argv: Sequence[str], stack: ExitStack) -> int:
    arm_token = _read_arm_token(options)
    trace = _open_trace(options, stack)
    slo, service = _read_slo_and_service(options)
    fleet = _fleet_settings(options, service)
    requests = RequestPlan(
        trace=trace, transforms=_transforms(options, trace), slo=slo, warmup=options.warmup
    )
    if options.start_at_ns is not None:
        require_ahead(options.start_at_ns, time.time_ns())
    stats = survey(requests, options.shard)
    _warn_of_window(requests)
    # How much a real model holds is known once it is loaded.
    if service is not None and not _computes_model(service, options):
        source = str(options.manifest or options.emulate)
        _, profile = choose_device(service.spec, device=options.device, source=source)
        require_fit(stats, profile, trace.path)
    _check_rate(options, stats)
    _check_timeouts(options, stats)
    workers = _workers(options, stats)
    follow_ups = None
    if options.causal:
        sends = workers == 1 and not options.dry_run
        follow_ups = stack.enter_context(open_follow_ups(requests, options.shard, stored=sends))
        stats.own_rows, stats.own_warmup_rows = follow_ups.own_rows, follow_ups.own_warmup_rows
    if options.dry_run:
        _warn_of_evidence(options, requests, stats)
        print_plan(options, requests, stats, follow_ups)
        if not options.test_target:
            return ExitCode.PASS
    elif options.gate and not slo.classes and not stats.rows_with_targets:
        raise UsageError(
            "--gate: the run has no SLO; give --ttft, --tpot and --objective, --slo FILE, "
            "-f MANIFEST, or a trace with targets in its rows"
        )
    for target in options.targets:
        require_permission(target, granted=options.yes)
    if not options.dry_run:
        if options.gate:
            _warn_of_evidence(options, requests, stats)
        _warn_of_limits(options, stats, workers)
    plan = RunPlan(
        options=options,
        requests=requests,
        stats=stats,
        follow_ups=follow_ups,
        trace=_trace_summary(options, trace),
        headers=_headers(options),
        tokenizer=_read_tokenizer(options.tokenizer),
        scrape_token=_read_key("--scrape-key-env", options.scrape_key_env),
        tls=tls_context(options.ca_file),
        salt=options.salt if options.salt is not None else secrets.token_hex(8),
        service="" if service is None else service.metadata.name,
        command=("replay", *_without_secrets(argv)),
        share=options.shard,
        workers=workers,
        arm_token=arm_token,
    )
    if options.dry_run:
        _test_targets(plan)
        return ExitCode.PASS
    if options.upload is not None:
        require_writable(options.upload)
    summary = _run_and_record(plan, fleet)
    if options.arm is not None and plan.share.count > 1:
        return ExitCode.PASS  # the shard has been sent; the merged run is judged
    if options.gate:
        return summary.verdict.kind.exit_code
    return ExitCode.PASS if summary.validity.valid else ExitCode.INVALID


def _read_arm_token(options: ReplayOptions) -> str:
    if options.arm is None:
        return ""
    from goodput_replay.sending.arming import read_token  # noqa: PLC0415 - an HTTP server

    return read_token(os.environ)


def _run_and_record(plan: RunPlan, fleet: FleetSettings | None) -> Summary:
    """Run the plan, record it in its folder, print its summary, and copy and report the result."""
    options = plan.options
    host = options.targets[0].host if options.targets else ""
    where = plan.service or host
    if plan.share.count > 1:
        where += f"-shard-{plan.share.index + 1}-of-{plan.share.count}"
    path = options.out or default_folder(datetime.now(UTC), plan.trace.name, where)
    writer = RunWriter(
        path,
        slo=plan.slo,
        force=options.force,
        keep_gaps=options.gaps,
        write_report=_write_report if options.report else None,
    )
    with writer:
        finished = _run_plan(plan, fleet, writer, Console(stderr=True))
    summary = finished.summary
    try:
        if options.json:
            sys.stdout.write(encode_json(summary).decode())
        else:
            print_summary(summary, Console(), folder=path)
        sys.stdout.flush()
    finally:
        if options.upload is not None:
            upload_folder(path, options.upload)
        if finished.ended_by is None:
            write_result(options.result_file, summary)
    if finished.ended_by is not None:
        raise finished.ended_by
    return summary


def _test_targets(plan: RunPlan) -> None:
    from goodput_replay.sending.preparation import probe_targets  # noqa: PLC0415 - an HTTP client

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(probe_targets(plan, Console(stderr=True)))


def _run_plan(
    plan: RunPlan, fleet: FleetSettings | None, writer: RunWriter, console: Console
) -> FinishedRun:
    # Virtual time needs no HTTP client, and real time needs no scheduler.
    if fleet is not None:
        from goodput_replay.emulation.virtual_time import emulated_run  # noqa: PLC0415

        return emulated_run(plan, fleet, writer, console)
    from goodput_replay.sending.real_time import replay  # noqa: PLC0415

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(replay(plan, writer, console))


def _write_report(folder: Path) -> object:
    # Imported after the run, which does not need jinja.
    from goodput_replay.report.run_report import write_report  # noqa: PLC0415

    return write_report(folder)


def _read_slo_and_service(options: ReplayOptions) -> tuple[SLOClasses, LLMService | None]:
    """Return the SLO classes, and the service to start or to emulate; None for `--target`."""
    manifest = options.manifest or options.emulate
    if manifest is not None:
        service = read_manifest(manifest)
        return slo_classes(service.spec.slo), service
    if options.slo is not None:
        return read_slo(options.slo), None
    if not options.slo_classes:
        return SLOClasses(), None
    last = options.slo_classes[-1].name
    other = last if last == OTHER_CLASS else None
    default = other or options.slo_classes[0].name
    outage_s = options.outage_s or 0
    slo = SLOClasses(classes=options.slo_classes, default=default, other=other, outage_s=outage_s)
    return slo, None


def _computes_model(service: LLMService, options: ReplayOptions) -> bool:
    """True if the run starts replicas that compute a real model, or reject it."""
    emulated = options.emulate is not None or options.device is not None
    weights = options.model_path is not None or service.spec.model.scheme != "emulated"
    return not emulated and weights


def _fleet_settings(options: ReplayOptions, service: LLMService | None) -> FleetSettings | None:
    """Return the settings of the emulated fleet; None for a run in real time."""
    if options.emulate is None or service is None:
        return None
    from goodput_replay.emulation.settings import (  # noqa: PLC0415 - loads the engine
        apply_topology,
        fleet_settings,
        read_topology,
    )

    settings = fleet_settings(
        service,
        device=options.device,
        source=str(options.emulate),
        timeout_ns=options.timeout_ns,
        seed=options.seed,
        oracle=options.oracle,
    )
    if options.topology is not None:
        settings = apply_topology(settings, read_topology(options.topology))
    _require_replicas(options.emulate, service.spec, settings)
    return settings


def _require_replicas(manifest: Path, spec: LLMServiceSpec, settings: FleetSettings) -> None:
    """Reject a fleet of zero replicas that no control law can scale up."""
    scalable = spec.control.mode is ControlMode.AUTO and spec.replicas is None
    if settings.replicas == 0 and not scalable:
        field = "spec.minReplicas" if spec.replicas is None else "spec.replicas"
        raise InputError(
            f"{manifest}: {field}: with 0 replicas every request is shed, and no control law "
            "starts one; set 1 or more, or set control.mode to Auto without spec.replicas"
        )


def _transforms(options: ReplayOptions, trace: Trace) -> TransformPlan:
    return TransformPlan(
        session_arrivals=options.session_arrivals,
        window=options.window,
        rate_scale=options.rate_scale,
        seed=options.seed,
        class_rules=options.class_rules,
        limit=options.limit,
        speed=options.speed,
        first_ns=trace.first_ns,
    )


def _warn_of_window(plan: RequestPlan) -> None:
    """State on stderr that the window ends after the trace, which lowers the rates of the run."""
    trace, transforms = plan.trace, plan.transforms
    window = transforms.window
    if window is None or window.end_ns is None or transforms.session_arrivals is not None:
        return
    span_ns = trace.last_ns - trace.first_ns
    # A trace may end with a pause, so its last arrival need not be its end.
    if window.end_ns - span_ns > (window.end_ns - window.start_ns) * _LEAST_IDLE_SHARE:
        sys.stderr.write(
            f"note: the trace spans {format_duration(span_ns)}, but rates are computed over the "
            f"window {window}; choose a window within the span\n"
        )


def _warn_of_evidence(options: ReplayOptions, plan: RequestPlan, stats: PlanStats) -> None:
    """State on stderr what the plan lacks for a PASS, before time is spent on it."""
    if options.concurrency is not None:  # no verdict
        return
    notes, window_ns = [], plan.window_ns(stats)
    enough_ns = MIN_BLOCKS * NS_PER_S
    if not options.causal and window_ns < enough_ns:
        window = format_duration(window_ns)
        notes.append(f"the window is {window} long, and a PASS requires at least {MIN_BLOCKS} s")
    for slo in plan.slo.classes:
        rows = stats.classes[slo.name]
        if slo.objective is None:
            continue
        needed = requests_needed(slo.objective, float(options.confidence))
        if 0 < rows < needed:
            notes.append(
                f"the plan has {rows:,} requests of class {slo.name}, and a PASS at its objective "
                f"of {format_objective(slo.objective)} requires at least {needed:,}, "
                f"{needed - rows:,} more"
            )
            enough_ns = max(enough_ns, window_ns * needed // rows)
    window = f"window of about {format_estimate(enough_ns)}"
    for note in notes:
        sys.stderr.write(
            f"note: {note}; choose a {'longer window' if options.causal else window}\n"
        )


def _check_rate(options: ReplayOptions, stats: PlanStats) -> None:
    if options.max_rate is not None and stats.peak_1s > options.max_rate:
        raise UsageError(
            f"--max-rate {options.max_rate}: the busiest second of the plan, "
            f"{format_duration(stats.peak_at_ns)} after its start, has {stats.peak_1s} requests; "
            "raise the limit, or send fewer with --rate-scale"
        )


def _warn_of_limits(options: ReplayOptions, stats: PlanStats, workers: int) -> None:
    """Raise the limit of open files, and warn if the plan may still need more."""
    files = raise_open_files()
    if options.emulate is not None or options.concurrency is not None:
        return
    warning = find_stream_limit(
        stats,
        files=files,
        senders=workers,
        ports=count_ports(),
        targets=max(1, len(options.targets)),
    )
    if warning is not None:
        console = Console(stderr=True)
        console.print(warning, soft_wrap=True, highlight=False, markup=False)


def _workers(options: ReplayOptions, stats: PlanStats) -> int:
    if options.workers is not None:
        return options.workers
    one = options.concurrency is not None or options.emulate is not None
    return 1 if one else choose_workers(stats, options.shard.count, count_cpus())


def _check_timeouts(options: ReplayOptions, stats: PlanStats) -> None:
    for name in options.class_timeouts_ns:
        if name not in stats.classes:
            known = ", ".join(printable(one) for one in stats.classes if one)
            raise UsageError(
                f"--timeout {name}=…: no request has the class {name!r}; "
                f"{f'classes are {known}' if known else 'the plan has no classes'}"
            )


def _read_tokenizer(text: str | None) -> TokenizerVocabulary | None:
    return None if text is None else read_tokenizer(find_tokenizer(text, os.environ))


def _headers(options: ReplayOptions) -> dict[str, str]:
    headers = dict(options.headers)
    if options.api_key_env is not None:
        headers["Authorization"] = f"Bearer {_read_key('--api-key-env', options.api_key_env)}"
    return headers


def _read_key(option: str, name: str | None) -> str:
    """Return the key in the variable that an option names; empty without the option."""
    if name is None:
        return ""
    key = os.environ.get(name, "")
    if not key or not key.isascii() or not key.isprintable():
        problem = "has characters that a header cannot contain" if key else "is not set"
        raise UsageError(f"{option} {name}: the variable {problem}")
    return key


def _trace_summary(options: ReplayOptions, trace: Trace) -> TraceSummary:
    metadata = trace.metadata
    return TraceSummary(
        name=_trace_name(options, trace),
        digest=_file_digest(trace.path) if options.load is None else options.load.digest,
        source=metadata.source,
        licence=metadata.licence,
        clock=metadata.clock.value,
        synthetic=metadata.source.startswith(_SYNTHETIC),
        transforms=_transform_texts(options),
    )


def _trace_name(options: ReplayOptions, trace: Trace) -> str:
    if options.load is not None:
        return LOAD
    # A path may contain the name of a person, so only the file name is recorded.
    return SAMPLE if options.trace == SAMPLE else trace.path.name


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def _transform_texts(options: ReplayOptions) -> tuple[str, ...]:
    texts = []
    if options.session_arrivals is not None:
        texts.append(f"--session-arrivals {options.session_arrivals.text}")
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
    """Return the arguments with the values of headers masked."""
    return [
        f"{text.partition(':')[0]}: ***"
        if previous == "--header" or text.startswith("--header=")
        else text
        for previous, text in zip(("", *argv), argv, strict=False)
    ]
