"""`kubectl goodput`: arguments, requests and output."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from goodput_core.cli import CommandParser
from goodput_core.contract import ANNOTATION_METRICS, ANNOTATION_RUNTIME, OBJECT_LABEL_ROLE
from goodput_core.errors import ExitCode, InputError, UnreachableError, UsageError
from goodput_core.slo.verdict import VerdictKind
from goodput_core.text import printable
from goodput_operator.plugin.kubectl import Kubectl, KubectlError
from goodput_operator.plugin.views import (
    TextTable,
    class_rows,
    condition_rows,
    decision_views,
    first_decision_time,
    gate_view,
    input_lines,
    load_view,
    server_state,
    service_view,
    why_unjudged,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["main", "make_parser"]

_PROG: Final = "kubectl goodput"
_BETWEEN_READINGS_S: Final = 1.0
_ENDED: Final = frozenset({"Passed", "Failed", "Paused"})
"""Phases of a gate whose verdict is final."""


def main(argv: Sequence[str]) -> int:
    """Run the plugin.

    Raises:
        UsageError: an argument is invalid, or kubectl is missing.
        InputError: the service does not exist, or has no gate.
        UnreachableError: kubectl failed.
    """
    given = make_parser().parse_args(argv)
    if not given.json:
        # A missing package is reported before the cluster is read.
        import rich  # noqa: F401, PLC0415 - heavy
    kubectl = Kubectl.find(context=given.context, kubeconfig=given.kubeconfig)
    code: int = given.run(kubectl, given)
    return code


def make_parser() -> CommandParser:
    """Build the parser of the plugin."""
    parser = CommandParser(
        _PROG,
        summary="Show the LLMServices of a cluster: attainment, decisions, gates and load. Uses "
        "kubectl with its contexts and credentials, and changes nothing.",
        examples=(
            "kubectl goodput status -A",
            "kubectl goodput why chat -n team",
            "kubectl goodput gate chat --exit-code",
        ),
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Any, summary: str, *examples: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            prog=f"{_PROG} {name}",
            summary=summary,
            help=summary,
            examples=tuple(f"{_PROG} {one}" for one in examples),
        )
        command.set_defaults(run=run)
        command.add_argument(
            "-n", "--namespace", metavar="NAME", help="the namespace (default: that of kubectl)"
        )
        command.add_argument("--context", metavar="NAME", help="the context of kubectl")
        command.add_argument("--kubeconfig", metavar="FILE", help="credentials of kubectl")
        command.add_argument("--json", action="store_true", help="print JSON and no tables")
        return command

    status = add(
        "status",
        _status,
        "Show services with their attainment, or one service with its classes and conditions.",
        "status",
        "status -A --json",
        "status chat -n team",
    )
    status.add_argument("name", metavar="NAME", nargs="?", help="one service (default: all)")
    status.add_argument(
        "-A", "--all-namespaces", action="store_true", help="services of all namespaces"
    )
    why = add(
        "why",
        _why,
        "Show the latest decisions of a service's control laws with their inputs, which the "
        "operator's log has.",
        "why chat",
        "why chat --operator-namespace goodput-system --json",
    )
    why.add_argument("name", metavar="NAME", help="the service")
    why.add_argument(
        "--operator-namespace",
        metavar="NAME",
        help="namespace of the operator (default: search for it)",
    )
    gate = add(
        "gate",
        _gate,
        "Show the latest gate of a service: phase, verdict, interval and the place of the report.",
        "gate chat",
        "gate chat --exit-code",
    )
    gate.add_argument("name", metavar="NAME", help="the service")
    gate.add_argument(
        "--exit-code",
        action="store_true",
        help="exit with the verdict on the present spec: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, "
        "3 INVALID, and 64 without one",
    )
    top = add(
        "top",
        _top,
        "Show the present load of a service's routers and engines, measured during a second.",
        "top chat",
        "top chat --json",
    )
    top.add_argument("name", metavar="NAME", help="the service")
    return parser


def _status(kubectl: Kubectl, given: argparse.Namespace) -> int:
    if given.name is not None:
        if given.all_namespaces:
            raise UsageError(f"-A shows all services; name the namespace of {given.name} with -n")
        service = kubectl.service(given.name, given.namespace)
        if given.json:
            return _print_json(service_view(service))
        _print_services([service])
        _print_table(class_rows(service))
        _print_table(condition_rows(service))
        return ExitCode.PASS
    services = kubectl.services(given.namespace, everywhere=given.all_namespaces)
    if given.json:
        return _print_json([service_view(one) for one in services])
    if services:
        _print_services(services)
    else:
        _print_note("there is no LLMService here; -A shows those of all namespaces")
    return ExitCode.PASS


def _print_services(services: Iterable[Any]) -> None:
    rows = []
    for service in services:
        view = service_view(service)
        bounds = f"{view['min_replicas']}–{view['max_replicas']}"
        rows.append(
            (
                view["namespace"],
                view["name"],
                _text(view["phase"]),
                f"{_text(view['replicas'])} ({bounds})",
                _text(view["attainment"]),
                _text(view["goodput"]),
                _text(view["token_budget"]),
                _text(view["gate"]),
            )
        )
    columns = (
        *("NAMESPACE", "NAME", "PHASE", "REPLICAS", "ATTAINMENT", "GOODPUT", "BUDGET", "GATE"),
    )
    _print_table(TextTable(columns=columns, rows=rows))


def _why(kubectl: Kubectl, given: argparse.Namespace) -> int:
    service = kubectl.service(given.name, given.namespace)
    problem = ""
    log = None
    try:
        if since := first_decision_time(service):
            log = kubectl.operator_log(given.operator_namespace, since=since)
    except KubectlError as error:
        problem = (
            f"the inputs of decisions are in the operator's log, which cannot be read: {error}"
        )
    decisions = decision_views(service, log)
    if given.json:
        return _print_json({"decisions": decisions, "problem": problem or None})
    if not decisions:
        _print_note("the control laws have not changed anything yet")
    for one in decisions:
        applied = "" if one["applied"] else " (recommended, not applied)"
        _print_line(f"{one['at']}  {one['knob']}: {one['reason']}{applied}", style="bold")
        _print_line(f"  {one['message']}")
        for line in input_lines(one["inputs"] or {}) if one["inputs"] else ():
            _print_line(f"    {line}", style="dim")
    if problem:
        _print_note(problem)
    return ExitCode.PASS


def _gate(kubectl: Kubectl, given: argparse.Namespace) -> int:
    service = kubectl.service(given.name, given.namespace)
    gate = gate_view(service)
    if gate is None:
        raise InputError(
            f"LLMService {given.name} has had no gate; set spec.rollout.gate and change the spec"
        )
    if given.json:
        _print_json(gate)
    else:
        names = ("phase", "verdict", "reason", "pairs", "attempt", "revision", "baseline",
                 "interval", "message", "report", "startedAt", "failedRevision")  # fmt: skip
        rows = [(name, _text(gate[name])) for name in names if gate.get(name) is not None]
        _print_table(TextTable(columns=("FIELD", "VALUE"), rows=rows))
    if not given.exit_code:
        return ExitCode.PASS
    if reason := why_unjudged(service, gate):
        raise InputError(
            f"the gate of LLMService {given.name} says nothing about its spec: {reason}"
        )
    # A gate in progress reports the verdict so far, too.
    if gate.get("phase") not in _ENDED:
        raise InputError(f"the gate of LLMService {given.name} has no verdict yet")
    if not gate.get("verdict"):
        raise InputError(
            f"the gate of LLMService {given.name} ended without a verdict ({gate.get('reason')}); "
            "its message has the cause"
        )
    return VerdictKind(gate["verdict"]).exit_code


def _top(kubectl: Kubectl, given: argparse.Namespace) -> int:
    service = kubectl.service(given.name, given.namespace)
    namespace = service["metadata"]["namespace"]
    running = {
        pod["metadata"]["name"]: pod["metadata"]
        for pod in kubectl.pods(given.name, namespace)
        if (pod.get("status") or {}).get("phase") == "Running"
    }
    # A pod that starts or ends does not respond.
    first = {pod: one for pod, its in running.items() if (one := _reading(kubectl, its))}
    if running and not first:
        raise UnreachableError(
            f"no engine or router of LLMService {given.name} responds through the API server; "
            "the user needs the right to get pods/proxy"
        )
    time.sleep(_BETWEEN_READINGS_S)
    views = []
    roles = {pod: its["labels"][OBJECT_LABEL_ROLE] for pod, its in running.items()}
    for pod in sorted(running, key=lambda one: (roles[one] != "router", one)):
        second = _reading(kubectl, running[pod]) if pod in first else None
        if second is None:
            _print_note(_silence(running[pod]))
            continue
        (before_s, before), (after_s, after) = first[pod], second
        views.append(load_view(pod, roles[pod], before, after, after_s - before_s))
    if given.json:
        return _print_json(views)
    if not views:
        _print_note(f"no engine or router of LLMService {given.name} is running")
    for role, columns in _COLUMNS.items():
        rows = [
            (view["pod"], *(form(view[name]) for name, _, form in columns))
            for view in views
            if view["role"] == role
        ]
        if rows:
            headings = (role.upper(), *(heading for _, heading, _ in columns))
            _print_table(TextTable(columns=headings, rows=rows))
    return ExitCode.PASS


def _reading(
    kubectl: Kubectl, metadata: Mapping[str, Any]
) -> tuple[float, Mapping[str, Any]] | None:
    """Return the time and the state of a pod; None if it does not respond.

    The state of another server than Goodput's engine is read from its metrics page.
    """
    pod, namespace = metadata["name"], metadata["namespace"]
    annotations = metadata.get("annotations") or {}
    state: Mapping[str, Any]
    try:
        if ANNOTATION_RUNTIME not in annotations:
            state = kubectl.state(pod, namespace)
        elif (place := annotations.get(ANNOTATION_METRICS)) is not None:
            state = server_state(kubectl.page(pod, namespace, place))
        else:
            return None
    except (KubectlError, ValueError):
        return None
    return time.monotonic(), state


def _silence(metadata: Mapping[str, Any]) -> str:
    """Return why the load of a running pod is missing."""
    annotations = metadata.get("annotations") or {}
    if ANNOTATION_RUNTIME in annotations and ANNOTATION_METRICS not in annotations:
        return f"{metadata['name']} has no metrics page; name one with runtime.metricsPath"
    return f"{metadata['name']} does not respond with its load"


def _text(value: Any) -> str:
    return "–" if value is None or value == "" else str(value)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


_COLUMNS: Final = {
    "router": (
        ("in_flight", "IN FLIGHT", _text),
        ("arrivals_per_s", "ARRIVALS/S", _rate),
        ("goodput_per_s", "GOODPUT/S", _rate),
    ),
    "engine": (
        ("running", "RUNNING", _text),
        ("waiting", "WAITING", _text),
        ("kv_used_ratio", "KV", _percent),
        ("busy_ratio", "BUSY", _percent),
        ("output_tokens_per_s", "TOKENS/S", _rate),
        ("token_budget", "BUDGET", _text),
        ("max_num_seqs", "WIDTH", _text),
    ),
}


def _print_json(value: Any) -> int:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    return ExitCode.PASS


def _print_table(table: TextTable) -> None:
    from rich import box  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    shown = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(printable(str(cell))) for cell in row))
    console = _console()
    if sys.stdout.isatty():
        console.print(shown)
        return
    with console.capture() as text:
        console.print(shown)
    # A long message in one row would otherwise pad all others to its length.
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in text.get().splitlines()))


def _print_line(text: str, *, style: str = "") -> None:
    from rich.text import Text  # noqa: PLC0415 - heavy

    _console().print(Text(printable(text)), style=style or None)


def _print_note(text: str) -> None:
    sys.stderr.write(f"{printable(text)}\n")


def _console() -> Any:
    """Return a console; in a pipe it has no colours, and lines are not wrapped."""
    from rich.console import Console  # noqa: PLC0415 - heavy

    wide = None if sys.stdout.isatty() else 1_000
    return Console(file=sys.stdout, highlight=False, width=wide, soft_wrap=wide is not None)
