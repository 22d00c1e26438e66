"""`goodput wait`: wait for the end of a TraceReplay, and exit with its verdict.

The replay is read again every two seconds. An outage of the API server does not end the wait, as
long as it is shorter than a minute.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from goodput_core.cli import CommandParser, argument_type
from goodput_core.contract import KIND_TRACEREPLAY, PLURAL_TRACEREPLAY
from goodput_core.errors import ExitCode, InputError, UnreachableError, UsageError
from goodput_core.slo.verdict import VerdictKind
from goodput_core.text import printable
from goodput_core.units import NS_PER_S, format_duration, parse_some_duration

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from goodput_operator.kube.client import ApiResponse

__all__ = ["exit_code_of", "main", "make_parser", "parse_resource", "wait_for_end"]

_KINDS: Final = ("trp", KIND_TRACEREPLAY.lower(), PLURAL_TRACEREPLAY)
_POLL_S: Final = 2.0
_CALL_NS: Final = 10 * NS_PER_S
_OUTAGE_NS: Final = 60 * NS_PER_S


def make_parser() -> CommandParser:
    """Build the parser of `goodput wait`."""
    parser = CommandParser(
        "goodput wait",
        summary="Wait for the end of a TraceReplay, print its verdict and exit with it: 0 PASS, "
        "1 FAIL, 2 INCONCLUSIVE, 3 INVALID. Without spec.gate: 0 valid, 3 invalid.",
        examples=("goodput wait trp/nightly", "goodput wait trp/nightly -n team --timeout 2h"),
    )
    parser.add_argument(
        "resource",
        metavar="trp/NAME",
        type=argument_type(parse_resource, "NAME"),
        help="the TraceReplay",
    )
    parser.add_argument(
        "-n", "--namespace", metavar="NAME", help="its namespace (default: that of kubectl)"
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_ns",
        metavar="TIME",
        type=argument_type(parse_some_duration, "TIME"),
        help="give up after this time with exit code 64 (default: never)",
    )
    parser.add_argument(
        "--kubeconfig", metavar="FILE", type=Path, help="credentials (default: kubectl's)"
    )
    return parser


def parse_resource(text: str) -> str:
    """Return the name in `trp/NAME`, `tracereplay/NAME` or `tracereplays/NAME`.

    Raises:
        ValueError: the text has another form.
    """
    kind, slash, name = text.partition("/")
    if not slash or kind.lower() not in _KINDS or not name or "/" in name:
        raise ValueError(f"{text!r} is not a TraceReplay; write trp/NAME")
    return name


def main(argv: list[str]) -> int:
    """Wait, print the verdict, and return its exit code.

    Raises:
        UsageError: an argument is invalid, or `--timeout` passed.
        InputError: there is no such TraceReplay.
        UnreachableError: the cluster cannot be reached.
    """
    given = make_parser().parse_args(argv)
    replay = asyncio.run(_wait(given))
    status = replay["status"]
    verdict = VerdictKind(status["verdict"])
    sys.stdout.write(f"{verdict} ({printable(status['reason'])}) {printable(status['message'])}\n")
    if interval := status.get("interval"):
        sys.stdout.write(f"against the baseline: {printable(interval)}\n")
    if report := status.get("report"):
        sys.stdout.write(f"report: {printable(report)}\n")
    return exit_code_of(replay)


async def _wait(given: Any) -> Mapping[str, Any]:
    # Imported here, because they load the Kubernetes client.
    from kubernetes.aio import config  # noqa: PLC0415
    from kubernetes.aio.config.config_exception import ConfigException  # noqa: PLC0415

    from goodput_operator.kube.client import ReadClient  # noqa: PLC0415
    from goodput_operator.kube.objects import TRACEREPLAY  # noqa: PLC0415
    from goodput_operator.kube.watch import connect  # noqa: PLC0415

    # `connect` reports an invalid file; its parser would also log it.
    logging.getLogger("kubernetes.aio.config").setLevel(logging.CRITICAL)
    namespace = given.namespace
    if namespace is None:
        file = None if given.kubeconfig is None else str(given.kubeconfig)
        try:
            _, active = config.list_kube_config_contexts(config_file=file)
            namespace = active["context"].get("namespace")
        except (ConfigException, OSError, KeyError, TypeError):
            namespace = None
    namespace = namespace or "default"
    async with await connect(given.kubeconfig) as api:
        client = ReadClient(api, timeout_ns=_CALL_NS, count=lambda *_: None)
        return await wait_for_end(
            lambda: client.read(TRACEREPLAY, namespace, given.resource),
            where=f"TraceReplay {given.resource} in namespace {namespace}",
            timeout_ns=given.timeout_ns,
        )


async def wait_for_end(
    read: Callable[[], Awaitable[ApiResponse]],
    *,
    where: str,
    timeout_ns: int | None,
    poll_s: float = _POLL_S,
) -> Mapping[str, Any]:
    """Return the TraceReplay once it has its verdict.

    Args:
        read: reads it.
        where: its description, for errors.
        timeout_ns: longest wait; None for no limit.
        poll_s: time between two reads.

    Raises:
        InputError: it does not exist, or was deleted.
        UnreachableError: the first read failed, or all reads of a minute did.
        UsageError: the time limit passed.
    """
    from goodput_operator.kube.client import FailedCall  # noqa: PLC0415

    started_ns, seen_ns = time.monotonic_ns(), None
    while True:
        response = await read()
        now_ns = time.monotonic_ns()
        if not isinstance(response, FailedCall):
            seen_ns = now_ns
            if (response.get("status") or {}).get("verdict"):
                return response
        elif response.not_found:
            problem = "does not exist" if seen_ns is None else "was deleted before its end"
            raise InputError(f"{where} {problem}; check its name and the namespace")
        elif seen_ns is None or not response.transient or now_ns - seen_ns > _OUTAGE_NS:
            raise UnreachableError(f"{where} cannot be read: {response.message}")
        if timeout_ns is not None and now_ns - started_ns >= timeout_ns:
            raise UsageError(
                f"--timeout: {where} has no verdict after {format_duration(timeout_ns)}; see its "
                "status, or wait longer"
            )
        await asyncio.sleep(poll_s)


def exit_code_of(replay: Mapping[str, Any]) -> ExitCode:
    """Return the exit code of a TraceReplay that has its verdict."""
    verdict = VerdictKind(replay["status"]["verdict"])
    if (replay.get("spec") or {}).get("gate") is None and verdict is not VerdictKind.INVALID:
        return ExitCode.PASS
    return verdict.exit_code
