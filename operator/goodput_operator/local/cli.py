"""`goodput up`: checks everything that can be checked first, then runs the local fleet."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import aiohttp

from goodput_core.control import ServiceParams
from goodput_core.errors import GoodputError, SpecError, UsageError
from goodput_core.signals import StopCause, watch_stop_requests
from goodput_core.spec.choices import ControlMode
from goodput_core.spec.support import require_built
from goodput_core.units import NS_PER_S
from goodput_operator.backoff import BackOff
from goodput_operator.local.commands import ChildCommands
from goodput_operator.local.control import FleetControl
from goodput_operator.local.fleet import Fleet
from goodput_operator.local.ignored import ignored_here
from goodput_operator.local.liveness import answers
from goodput_operator.local.manifest_file import read_manifest
from goodput_operator.local.options import MAX_REPLICAS, Options, parse_options
from goodput_operator.local.outlet import Outlet
from goodput_operator.local.ports import require_free
from goodput_operator.local.readiness import until_routable
from goodput_operator.local.reporter import Reporter
from goodput_operator.local.snapshot import Address, Desired
from goodput_operator.local.workspace import Workspace, open_workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_core.errors import ExitCode
    from goodput_core.spec.llmservice import LLMService
    from goodput_operator.local.commands import Commands

    MakeCommands = Callable[[Workspace, LLMService, Options], Commands]

__all__ = ["main", "run_up"]


def main(argv: list[str]) -> int:
    """Run a service until it is asked to stop.

    Returns:
        0 after SIGTERM or the end of the parent: whoever runs a service ends it so. 130 after
        Ctrl-C or a closed terminal.

    Raises:
        GoodputError: the service cannot run as asked.
    """
    return run_up(parse_options(argv), _real_commands)


def run_up(options: Options, make_commands: MakeCommands) -> int:
    """What `main` does once its arguments are parsed; tests bring children of their own."""
    service, text = read_manifest(options.manifest)
    try:
        require_built(service)
    except SpecError as error:
        raise error.at(str(options.manifest)) from error
    desired = _desired(service, options)
    require_free(options.port, "--port")
    require_free(options.admin_port, "--admin-port")

    reporter = Reporter(
        out=Outlet(sys.stdout.fileno()),
        err=Outlet(sys.stderr.fileno()),
        machine=options.json,
        colour=_colour(),
        names=_names(service, desired),
        model=service.metadata.name,
    )
    try:
        for note in ignored_here(service, device=options.device):
            reporter.say(note)
        with open_workspace(service.metadata.name, options.manifest.name, text) as workspace:
            commands = make_commands(workspace, service, options)
            control = _control(service, options, commands.token, reporter)
            try:
                return asyncio.run(
                    _serve(
                        options,
                        desired=desired,
                        commands=commands,
                        control=control,
                        workspace=workspace,
                        reporter=reporter,
                    )
                )
            except GoodputError as error:
                # A child knows the copy that it was given; the user knows their own file.
                sentence = str(error).replace(str(workspace.manifest), str(options.manifest))
                raise type(error)(sentence) from error
    finally:
        reporter.close()


async def _serve(
    options: Options,
    *,
    desired: Desired,
    commands: Commands,
    control: FleetControl | None,
    workspace: Workspace,
    reporter: Reporter,
) -> ExitCode:
    """Run the fleet to its end; return the exit code of the first stop request."""
    causes: list[StopCause] = []
    async with aiohttp.ClientSession() as session:

        async def routable(address: Address) -> None:
            await until_routable(session, address, lambda: fleet.routed)

        async def alive(address: Address) -> bool:
            return await answers(session, address)

        fleet = Fleet(
            desired=desired,
            commands=commands,
            port=options.port,
            admin_port=options.admin_port,
            publish=workspace.publish,
            routable=routable,
            answers=alive,
            reporter=reporter,
            clock=time.monotonic_ns,
            control=None if control is None else partial(control.run, session),
        )

        def stop(cause: StopCause) -> None:
            causes.append(cause)
            if cause is StopCause.CTRL_C:
                fleet.interrupt(cause)
            else:
                fleet.stop(cause)

        watch_stop_requests(stop, exit_with_parent=options.exit_with_parent)
        await fleet.run()
    return causes[0].exit_code


def _desired(service: LLMService, options: Options) -> Desired:
    replicas = service.spec.initial_replicas if options.replicas is None else options.replicas
    if not 1 <= replicas <= MAX_REPLICAS:
        field = "spec.minReplicas" if service.spec.replicas is None else "spec.replicas"
        raise UsageError(
            f"{options.manifest}: {field}: must be 1 to {MAX_REPLICAS} on this machine, not "
            f"{replicas}; write such a number there, or give `goodput up` --replicas N"
        )
    return Desired(
        service=service.metadata.name,
        replicas=replicas,
        ready_timeout_ns=options.ready_timeout_ns,
        liveness_timeout_ns=options.liveness_timeout_ns,
        grace_ns=options.grace_ns,
        back_off=BackOff(seed=time.time_ns()),
    )


def _control(
    service: LLMService, options: Options, token: str, reporter: Reporter
) -> FleetControl | None:
    """Who looks after the fleet; None: mode `Manual` has nobody do it."""
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


def _names(service: LLMService, desired: Desired) -> Iterable[str]:
    """Of every process that may come to run."""
    if service.spec.control.mode is not ControlMode.AUTO:
        return desired.processes
    most = min(service.spec.max_replicas, MAX_REPLICAS)
    return replace(desired, replicas=max(desired.replicas, most)).processes


def _colour() -> bool:
    return (
        sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def _params(service: LLMService, options: Options) -> ServiceParams:
    """The control law's bounds; `--replicas` is a person's number, as `spec.replicas` is."""
    params = ServiceParams.of(service.spec)
    if options.replicas is not None:
        params = replace(params, replicas=options.replicas)
    return replace(
        params,
        min_replicas=min(params.min_replicas, MAX_REPLICAS),
        max_replicas=min(params.max_replicas, MAX_REPLICAS),
    )


def _real_commands(workspace: Workspace, service: LLMService, options: Options) -> Commands:
    return ChildCommands(
        service=service.metadata.name,
        manifest=workspace.manifest,
        upstreams=workspace.upstreams,
        token=secrets.token_urlsafe(32),
        device=options.device,
        grace_ns=options.grace_ns,
        environment=os.environ.copy(),
    )
