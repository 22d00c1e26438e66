"""The output of the plugin, as JSON and as tables, from objects of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "TextTable",
    "class_rows",
    "condition_rows",
    "decision_views",
    "first_decision_time",
    "gate_view",
    "input_lines",
    "load_view",
    "server_state",
    "service_view",
    "why_unjudged",
]

_EVENT_DECISION: Final = "decision"
_REJECTED: Final = frozenset({"InvalidSpec", "NotBuilt"})
"""Reasons of the condition Stalled while the spec is not applied."""
_BEFORE_DECISION: Final = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Rows of text under a heading each."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def service_view(service: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a service that one line shows."""
    metadata, spec = service["metadata"], service.get("spec") or {}
    status = service.get("status") or {}
    summary = status.get("summary") or {}
    return {
        "namespace": metadata.get("namespace", ""),
        "name": metadata["name"],
        "phase": summary.get("phase"),
        "replicas": summary.get("replicas"),
        "min_replicas": spec.get("minReplicas", 1),
        "max_replicas": spec.get("maxReplicas", 8),
        "recommended_replicas": status.get("recommendedReplicas"),
        "token_budget": status.get("tokenBudget"),
        "goodput": status.get("goodput"),
        "attainment": summary.get("attainment"),
        "gate": summary.get("gate"),
        "revision": status.get("currentRevision"),
        "update_revision": status.get("updateRevision"),
        "classes": list(status.get("classes") or ()),
        "conditions": list(status.get("conditions") or ()),
    }


def class_rows(service: Mapping[str, Any]) -> TextTable:
    """Return the classes of a service with targets and attainment."""
    classes = ((service.get("spec") or {}).get("slo") or {}).get("classes") or ()
    measured = {one["name"]: one for one in (service.get("status") or {}).get("classes") or ()}
    rows = []
    for one in classes:
        found = measured.get(one["name"], {})
        bounds = f"{found['lower']} to {found['upper']}" if "lower" in found else "–"
        counts = f"{found['good']}/{found['total']}" if found else "–"
        rows.append(
            (
                one["name"],
                f"{one['ttftMs']} ms",
                f"{one['tpotMs']} ms",
                one.get("objective", "–"),
                counts,
                found.get("attainment", "–"),
                bounds,
            )
        )
    columns = ("CLASS", "TTFT", "TPOT", "OBJECTIVE", "ATTAINED", "SHARE", "BOUNDS")
    return TextTable(columns=columns, rows=rows)


def condition_rows(service: Mapping[str, Any]) -> TextTable:
    """Return the conditions of a service."""
    conditions = (service.get("status") or {}).get("conditions") or ()
    rows = [
        (one["type"], one["status"], one.get("reason", ""), one.get("message", ""))
        for one in conditions
    ]
    return TextTable(columns=("CONDITION", "STATUS", "REASON", "MESSAGE"), rows=rows)


def decision_views(
    service: Mapping[str, Any], log: Iterable[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the decisions of a service, newest first, with their inputs.

    Args:
        service: the LLMService.
        log: events of the operator's log; None if it cannot be read.

    Returns:
        The decisions of the status, with null inputs for decisions that the log lacks.
    """
    metadata = service["metadata"]
    events = [
        event
        for event in log or ()
        if event.get("event") == _EVENT_DECISION
        and event.get("llmservice") == metadata["name"]
        and event.get("namespace") == metadata.get("namespace", "")
    ]
    views = []
    for decision in (service.get("status") or {}).get("decisions") or ():
        # Equal decisions are matched by their order, from the latest on.
        same = [event for event in events if event.get("detail") == decision["message"]]
        event = same[-1] if same else None
        if event is not None:
            events.remove(event)
        views.append({**decision, "inputs": None if event is None else event.get("inputs")})
    return views


def first_decision_time(service: Mapping[str, Any]) -> str | None:
    """Return a time just before the oldest decision of the status; None without a decision."""
    decisions = (service.get("status") or {}).get("decisions") or ()
    times = [datetime.fromisoformat(one["at"]) for one in decisions]
    return (min(times) - _BEFORE_DECISION).isoformat() if times else None


def input_lines(inputs: Mapping[str, Any]) -> list[str]:
    """Return the inputs of a decision as sentences, the most important first."""
    lines = []
    seconds = inputs.get("interval_seconds")
    if seconds:
        rate = inputs.get("arrivals", 0) / seconds
        lines.append(
            f"{rate:.2f} requests/s over {seconds:g} s ({inputs.get('signal', 'unknown')}), "
            f"{inputs.get('in_flight', 0)} in flight"
        )
    for one in inputs.get("classes") or ():
        missed = [
            f"{name.upper()} missed by {counts['missed']} of {counts['judged']}"
            for name in ("ttft", "tpot")
            if (counts := one.get(name)) and counts.get("judged")
        ]
        if missed:
            lines.append(f"class {one.get('name')}: {', '.join(missed)}")
    phases = inputs.get("replicas") or {}
    replicas = ", ".join(f"{count} {phase}" for phase, count in phases.items()) or "none"
    used, total = inputs.get("kv_used_blocks", 0), inputs.get("kv_total_blocks", 0)
    line = f"replicas: {replicas}"
    measured = inputs.get("measured_replicas", 1 if total else None)
    if measured is not None:
        line += f" of {inputs.get('min_replicas')} to {inputs.get('max_replicas')}; "
        preemptions = inputs.get("preemptions")
        line += (
            f"{inputs.get('running', 0)} running, {inputs.get('waiting', 0)} waiting, "
            f"KV {f'{used / total:.0%}' if total else 'unknown'}, "
            f"{'unknown' if preemptions is None else preemptions} preemptions"
            if measured
            else "no readings of running and queued requests"
        )
    lines.append(line)
    law = inputs.get("replica_law") or {}
    rates = [
        f"{text} {law[name]:.2f}/s"
        for name, text in (
            ("arrivals_per_s", "arrivals"),
            ("peak_per_s", "bursts"),
            ("sustained_per_s", "sustained"),
            ("fewer_sustained_per_s", "sustained by fewer"),
        )
        if isinstance(law.get(name), int | float)
    ]
    if rates:
        lines.append(f"replica law: {', '.join(rates)}")
    return lines


def gate_view(service: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of a service's gate; None if it has none."""
    status = service.get("status") or {}
    gate = status.get("gate")
    if not isinstance(gate, dict):
        return None
    return {
        **gate,
        "currentRevision": status.get("currentRevision"),
        "failedRevision": status.get("failedRevision"),
    }


def why_unjudged(service: Mapping[str, Any], gate: Mapping[str, Any]) -> str:
    """Return why the latest gate of a service did not judge its spec; empty if it did.

    Args:
        service: the service.
        gate: its gate.
    """
    status = service.get("status") or {}
    generation, observed = service["metadata"].get("generation"), status.get("observedGeneration")
    if observed != generation:
        return f"the operator has not yet read generation {generation} of the spec"
    for condition in status.get("conditions") or ():
        is_stalled = condition.get("type") == "Stalled" and condition.get("status") == "True"
        if is_stalled and condition.get("reason") in _REJECTED:
            return f"the spec is rejected ({condition['reason']})"
    revision, update = gate.get("revision"), status.get("updateRevision")
    if revision != update:
        return f"it judged {revision}, and the revision of the spec is {update}"
    return ""


def load_view(
    pod: str, role: str, before: Mapping[str, Any], after: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """Return the load of an engine or a router from two readings of its state.

    Args:
        pod: name of the pod.
        role: `router` or `engine`.
        before: the first reading.
        after: the second one.
        seconds: time between them.

    Returns:
        The figures, with null rates if the process restarted in between.
    """
    restarted = before.get("epoch") != after.get("epoch")

    def rate(name: str) -> float | None:
        if restarted or name not in after:
            return None
        change: float = after[name] - before.get(name, 0)
        return change / seconds

    view: dict[str, Any] = {"pod": pod, "role": role, "draining": after.get("draining")}
    if role == "router":
        good = (_attained(after) - _attained(before)) / seconds
        return view | {
            "in_flight": after.get("in_flight"),
            "arrivals_per_s": rate("arrivals"),
            "goodput_per_s": None if restarted else good,
        }
    total, free = after.get("kv_total_blocks", 0), after.get("kv_free_blocks", 0)
    busy_ns = rate("step_ns")
    return view | {
        "running": after.get("running"),
        "waiting": after.get("waiting"),
        "kv_used_ratio": (total - free) / total if total else None,
        "token_budget": after.get("token_budget"),
        "max_num_seqs": after.get("max_num_seqs"),
        "busy_ratio": None if busy_ns is None else busy_ns / NS_PER_S,
        "output_tokens_per_s": rate("output_tokens"),
    }


def server_state(page: str) -> dict[str, Any]:
    """Return the load of another server than Goodput's engine from its metrics page.

    Raises:
        ValueError: the page has no known metrics.
    """
    from goodput_operator.control.server_pages import decode_server  # noqa: PLC0415 - heavy

    counters = decode_server(page.encode())
    state = counters.state
    known = {} if "output_tokens" in counters.unknown else {"output_tokens": state.output_tokens}
    return {
        "epoch": counters.epoch,
        "running": state.running,
        "waiting": state.waiting,
        **known,
        "kv_total_blocks": state.kv_total_blocks,
        "kv_free_blocks": state.kv_free_blocks,
    }


def _attained(state: Mapping[str, Any]) -> int:
    classes = (state.get("outcomes") or {}).values()
    return sum(one.get("attained", 0) for one in classes)
