"""`goodput up`: check the manifest, options and ports, then run the local fleet."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import aiohttp

from goodput_core.control import ServiceParams
from goodput_core.errors import GoodputError, SpecError, UsageError
from goodput_core.process import raise_open_files, share_session_priority
from goodput_core.signals import StopCause, watch_stop_requests
from goodput_core.spec.choices import ControlMode
from goodput_core.units import NS_PER_S
from goodput_operator.backoff import BackOff
from goodput_operator.local.commands import HOST, Commands, open_workspace
from goodput_operator.local.control import FleetControl
from goodput_operator.local.decide import Desired
from goodput_operator.local.gate import run_gate
from goodput_operator.local.manifest import (
    computes_model,
    ignored_here,
    model_options,
    read_manifest,
    require_device,
    use_model_path,
)
from goodput_operator.local.options import MAX_REPLICAS, UpOptions, parse_options
from goodput_operator.local.reporter import LineWriter, Reporter
from goodput_operator.local.supervisor import Supervisor
from goodput_operator.local.weights import fetch_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_core.errors import ExitCode
    from goodput_core.spec.llmservice import LLMService

__all__ = ["main", "require_free", "run_up"]

_WATCH_STOP_S: Final = 5.0
# A real model is read from the disk, and so is torch, which takes minutes if neither is cached.
_READY_NS: Final = 60 * NS_PER_S
_READY_WITH_WEIGHTS_NS: Final = 600 * NS_PER_S


def main(argv: list[str]) -> int:
    """Run a service until a stop request.

    Returns:
        0 after SIGTERM or the end of the parent process, 130 after Ctrl-C or a closed terminal.

    Raises:
        GoodputError: the service cannot run with this manifest or these options.
    """
    return run_up(parse_options(argv))


def run_up(options: UpOptions, commands_type: type[Commands] = Commands) -> int:
    """Run a service with parsed options.

    Args:
        options: parsed arguments.
        commands_type: makes the command lines of the processes; tests replace it.
    """
    service, text = _read_service(options)
    decision = None
    if options.gate is not None:
        served = replace(options, manifest=options.gate, gate=None)
        baseline, baseline_text = _read_service(served)
        manifest, decision = run_gate(options, service, options.gate)
        if manifest == options.gate:
            options, service, text = served, baseline, baseline_text
    raise_open_files()
    desired = _desired(service, options)
    max_replicas = _max_replicas(service, desired)
    require_free(options.port, "--port")
    require_free(options.admin_port, "--admin-port")

    page = ExitStack()
    reporter = Reporter(
        out=LineWriter(sys.stdout.fileno()),
        err=LineWriter(sys.stderr.fileno()),
        json_events=options.json,
        colour=_colour(),
        # The names of all processes that may run.
        names=replace(desired, replicas=max_replicas).processes,
        model=service.metadata.name,
        ui=page.enter_context(_watched(options)),
    )
    try:
        if decision is not None:
            reporter.log_message(decision)
        for message in ignored_here(service, device=options.device, gated=decision is not None):
            reporter.log_message(message)
        with open_workspace(service.metadata.name, options.manifest.name, text) as workspace:
            commands = commands_type(
                service=service.metadata.name,
                workspace=workspace,
                token=secrets.token_urlsafe(32),
                device=options.device,
                model_path=options.model_path,
                engine_options=model_options(service.spec.engine, max_replicas)
                if computes_model(service, device=options.device)
                else (),
                grace_ns=options.grace_ns,
                environment=os.environ.copy(),
                api_key_file=options.api_key_file,
                tenants=options.tenants,
            )
            control = _control(service, options, commands.token, reporter)
            try:
                if options.device is None and service.spec.model.is_fetched:
                    fetch_weights(
                        commands.fetch(), reporter, exit_with_parent=options.exit_with_parent
                    )
                return asyncio.run(
                    _serve(
                        options,
                        desired=desired,
                        commands=commands,
                        control=control,
                        reporter=reporter,
                    )
                )
            except GoodputError as error:
                # Processes read a copy of the manifest; the message must name the original file.
                sentence = str(error).replace(str(workspace.manifest), str(options.manifest))
                raise type(error)(sentence) from error
    finally:
        reporter.close()
        page.close()


def _read_service(options: UpOptions) -> tuple[LLMService, str]:
    """Return the service of the manifest and its text.

    Raises:
        GoodputError: the manifest is invalid, or this machine cannot run it.
    """
    service, text = read_manifest(options.manifest)
    if options.model_path is not None:
        service = use_model_path(service, options.model_path)
    try:
        require_device(service, device=options.device)
    except SpecError as error:
        raise error.at(str(options.manifest)) from error
    return service, text


@contextmanager
def _watched(options: UpOptions) -> Iterator[LineWriter | None]:
    """Start the live page of `--ui`, and yield the writer of its events; None without `--ui`.

    The page is served by `replay watch`, which prints its address and ends when its stdin closes.
    If it fails, the service continues without a page.
    """
    if not options.ui:
        yield None
        return
    command = [sys.executable, "-m", "goodput_core", "replay", "watch", "--events"]
    # A session of its own: Ctrl-C first drains the service, which the page shows.
    with subprocess.Popen(
        [*command, "-f", str(options.manifest)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as child:
        share_session_priority(child.pid)
        assert child.stdin is not None
        events = LineWriter(child.stdin.fileno())
        try:
            yield events
        finally:
            events.close()
            with suppress(BrokenPipeError):
                child.stdin.close()
            try:
                child.wait(_WATCH_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()


async def _serve(
    options: UpOptions,
    *,
    desired: Desired,
    commands: Commands,
    control: FleetControl | None,
    reporter: Reporter,
) -> ExitCode:
    """Run the fleet until it ends, and return the exit code of the first stop request."""
    causes: list[StopCause] = []
    async with aiohttp.ClientSession() as session:
        supervisor = Supervisor(
            desired=desired,
            commands=commands,
            port=options.port,
            admin_port=options.admin_port,
            session=session,
            reporter=reporter,
            clock=time.monotonic_ns,
            control=None if control is None else partial(control.run, session),
        )

        def stop(cause: StopCause) -> None:
            causes.append(cause)
            if cause is StopCause.CTRL_C:
                supervisor.interrupt(cause)
            else:
                supervisor.stop(cause)

        watch_stop_requests(stop, exit_with_parent=options.exit_with_parent)
        await supervisor.run()
    return causes[0].exit_code


def require_free(port: int, option: str) -> None:
    """Reject a port that is in use.

    Args:
        port: the port; 0 stands for any free port and is always accepted.
        option: command-line option that sets the port.

    Raises:
        UsageError: the port is in use, or the user lacks the permission to use it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the router does, ignore connections of an earlier run in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            problem = {
                errno.EADDRINUSE: "is in use",
                errno.EACCES: "needs privileges that this user lacks",
            }.get(error.errno or 0, f"cannot be used ({error.strerror})")
            raise UsageError(
                f"port {port} on {HOST} {problem}; choose another with {option}, "
                f"or {option} 0 for any free one"
            ) from error


def _desired(service: LLMService, options: UpOptions) -> Desired:
    replicas = service.spec.initial_replicas if options.replicas is None else options.replicas
    if not 1 <= replicas <= MAX_REPLICAS:
        field = "spec.minReplicas" if service.spec.replicas is None else "spec.replicas"
        raise UsageError(
            f"{options.manifest}: {field}: must be 1 to {MAX_REPLICAS} on this machine, not "
            f"{replicas}; change the field, or set --replicas N"
        )
    loads_weights = computes_model(service, device=options.device)
    default_ns = _READY_WITH_WEIGHTS_NS if loads_weights else _READY_NS
    return Desired(
        service=service.metadata.name,
        replicas=replicas,
        ready_timeout_ns=options.ready_timeout_ns or default_ns,
        liveness_timeout_ns=options.liveness_timeout_ns,
        grace_ns=options.grace_ns,
        back_off=BackOff(seed=time.time_ns()),
    )


def _control(
    service: LLMService, options: UpOptions, token: str, reporter: Reporter
) -> FleetControl | None:
    """Return the control loop; None in mode Manual."""
    params = _params(service, options)
    if params.mode is ControlMode.MANUAL:
        return None
    return FleetControl(
        params=params,
        interval_ns=service.spec.control.interval_seconds * NS_PER_S,
        token=token,
        reporter=reporter,
        clock=time.monotonic_ns,
    )


def _max_replicas(service: LLMService, desired: Desired) -> int:
    """Return the largest number of replicas that may run at the same time."""
    if service.spec.control.mode is not ControlMode.AUTO:
        return desired.replicas
    return max(desired.replicas, min(service.spec.max_replicas, MAX_REPLICAS))


def _colour() -> bool:
    return (
        sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def _params(service: LLMService, options: UpOptions) -> ServiceParams:
    """Return the parameters of the control laws; `--replicas` counts as `spec.replicas`."""
    params = ServiceParams.of(service.spec)
    if options.replicas is not None:
        params = replace(params, replicas=options.replicas)
    return replace(
        params,
        min_replicas=min(params.min_replicas, MAX_REPLICAS),
        max_replicas=min(params.max_replicas, MAX_REPLICAS),
    )
