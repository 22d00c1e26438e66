"""Recording and alerting rules.

The burn of an error budget is watched over two windows: the long one shows that enough of the
budget is burnt, the short one that it still burns. Both are computed from recorded rates of five
minutes, whose sums over days are cheap to query.

Source: Beyer et al., The Site Reliability Workbook, chapter 5, "Multiwindow, Multi-Burn-Rate
Alerts". The budget is that of 30 days.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import yaml

from goodput_core.contract import (
    METRIC_OPERATOR_LEADER,
    METRIC_OPERATOR_OVERDUE,
    METRIC_REQUESTS,
    METRIC_SERVICE_CONDITION,
    METRIC_SERVICE_CONDITION_REASON,
    METRIC_SERVICE_GATE,
    METRIC_SERVICE_OBJECTIVE,
)

__all__ = ["MINIMUM_REQUESTS", "RUNBOOKS", "make_rules", "render_rules"]

MINIMUM_REQUESTS: Final = "__MINIMUM_REQUESTS__"
"""Replaced by the chart: judged requests below which no burn alert fires."""
RUNBOOKS: Final = "__RUNBOOKS__"
"""Replaced by the chart: URL of the folder with the pages."""
_INTERVAL_S: Final = 30
_BRIDGED: Final = "6m"
"""Gap that does not restart the wait of an alert; longer than the pause of five minutes before the
kubelet restarts a container that crashes."""
_RECORDED: Final = "5m"
"""Window of the recorded rates."""
_PERIOD_HOURS: Final = 30 * 24
_BY: Final = "by (namespace, llmservice, slo_class)"
_ON: Final = "on (namespace, llmservice, slo_class)"
_SERVICE: Final = "on (namespace, llmservice)"
_ATTAINED: Final = "llmservice_class:goodput_attained_requests:rate5m"
_JUDGED: Final = "llmservice_class:goodput_judged_requests:rate5m"
_BUDGET: Final = "llmservice_class:goodput_error_budget:ratio"
_WINDOWS: Final = {"5m": 300, "30m": 1800, "1h": 3600, "2h": 7200, "6h": 21600, "1d": 86400,
                   "3d": 259200}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Burn:
    """One alert on the burn of a budget: a share of it in the long window."""

    long: str
    short: str
    budget_percent: int
    severity: str

    @property
    def rate(self) -> float:
        """The burn rate that uses this share of the budget of 30 days in the long window."""
        hours = _WINDOWS[self.long] / 3600
        return round(self.budget_percent / 100 * _PERIOD_HOURS / hours, 6)


_BURNS: Final = (
    _Burn(long="1h", short="5m", budget_percent=2, severity="page"),
    _Burn(long="6h", short="30m", budget_percent=5, severity="page"),
    _Burn(long="1d", short="2h", budget_percent=10, severity="ticket"),
    _Burn(long="3d", short="6h", budget_percent=10, severity="ticket"),
)


def make_rules(*, minimum_requests: str = "100", runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """Return the groups of rules.

    Args:
        minimum_requests: judged requests in the long window below which no burn alert fires.
        runbooks: URL of the folder with the pages.
    """
    return {
        "groups": [
            {
                "name": "goodput-recorded",
                "interval": f"{_INTERVAL_S}s",
                "rules": list(_recorded()),
            },
            {
                "name": "goodput-error-budget",
                "rules": [_burn_alert(one, minimum_requests, runbooks) for one in _BURNS],
            },
            {"name": "goodput-operator", "rules": _operator_alerts(runbooks)},
            {"name": "goodput-services", "rules": _service_alerts(runbooks)},
        ]
    }


def render_rules() -> str:
    """Return the chart's file, with placeholders."""
    groups = make_rules(minimum_requests=MINIMUM_REQUESTS)
    head = "# Made by `make golden` from tools/monitoring/alerts.py.\n"
    return head + yaml.dump(
        groups, Dumper=_BlockDumper, sort_keys=False, width=1000, allow_unicode=True
    )


class _BlockDumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_BlockDumper.add_representer(str, _represent)


def _recorded() -> list[dict[str, Any]]:
    judged = 'outcome=~"attained|missed|shed|error|timeout"'
    rules = [
        {
            "record": _ATTAINED,
            "expr": f'sum {_BY} (rate({METRIC_REQUESTS}{{outcome="attained"}}[5m]))',
        },
        {"record": _JUDGED, "expr": f"sum {_BY} (rate({METRIC_REQUESTS}{{{judged}}}[5m]))"},
        {"record": _BUDGET, "expr": _budget()},
    ]
    rules += [
        {
            "record": _burn_metric(window),
            "expr": f"(1 - {_over(_ATTAINED, window)} / ({_over(_JUDGED, window)} > 0)) "
            f"/ {_ON} {_BUDGET}",
        }
        for window in _WINDOWS
    ]
    return rules


def _budget() -> str:
    """Return a query of the error budgets, known for an hour after the last sample of an objective.

    The rule keeps what it recorded before while routers report requests of the class, but no
    operator reports a valid spec. Otherwise, an alert would end while the outage goes on.
    """
    valid = f'{METRIC_SERVICE_CONDITION_REASON}{{condition="Stalled",reason!="InvalidSpec"}}'
    return (
        f"1 - max {_BY} (last_over_time({METRIC_SERVICE_OBJECTIVE}[1h]))\n"
        f"or last_over_time({_BUDGET}[10m]) and {_ON} {_JUDGED}\n"
        f"unless {_SERVICE} last_over_time({valid}[1h])\n"
    )


def _over(rate: str, window: str) -> str:
    """Return a query of the sum of a recorded rate of five minutes, which begins with the window.

    A sum of these rates over five minutes would include requests of ten minutes.
    """
    return rate if window == _RECORDED else f"sum_over_time({rate}[{window}])"


def _burn_metric(window: str) -> str:
    return f"llmservice_class:goodput_budget_burn:ratio{window}"


def _burn_alert(burn: _Burn, minimum_requests: str, runbooks: str) -> dict[str, Any]:
    fast = burn.severity == "page"
    requests = f"sum_over_time({_JUDGED}[{burn.long}]) * {_INTERVAL_S}"
    return _alert(
        "GoodputErrorBudgetBurnsFast" if fast else "GoodputErrorBudgetBurns",
        expr=f"{_burn_metric(burn.long)} > {burn.rate:g}\n"
        f"and {_ON} {_burn_metric(burn.short)} > {burn.rate:g}\n"
        f"and {_ON} {requests} >= {minimum_requests}\n",
        lasts=None,
        severity=burn.severity,
        labels={"window": burn.long},
        summary="{{ $labels.namespace }}/{{ $labels.llmservice }} burns the error budget of class "
        "{{ $labels.slo_class }}.",
        description="Requests missed their targets {{ $value | humanize }} times as often as the "
        f"objective permits during {burn.long}, and still do. At {burn.rate:g} times, "
        f"{burn.budget_percent} % of the budget of 30 days are gone after {burn.long}.",
        runbooks=runbooks,
    )


def _operator_alerts(runbooks: str) -> list[dict[str, Any]]:
    return [
        _alert(
            "GoodputOperatorDown",
            # Also one of several installations that led in the last day, while others lead.
            expr=f"(sum({METRIC_OPERATOR_LEADER}) or vector(0)) == 0\n"
            "or (\n"
            f"sum by (namespace) (max_over_time({METRIC_OPERATOR_LEADER}[1d])) > 0\n"
            f"unless on (namespace) sum by (namespace) ({METRIC_OPERATOR_LEADER}) > 0\n"
            f"and on () sum({METRIC_OPERATOR_LEADER}) > 0\n"
            ")\n",
            lasts="5m",
            severity="page",
            summary="No operator of Goodput holds the Lease"
            "{{ with $labels.namespace }} in the namespace {{ . }}{{ end }}.",
            description="Services keep running with their last limits, but nothing is scaled, "
            "repaired or rolled out.",
            runbooks=runbooks,
        ),
        _alert(
            "GoodputOperatorStalled",
            expr=f"max({METRIC_OPERATOR_OVERDUE}) > 120",
            lasts="2m",
            severity="page",
            summary="The operator of Goodput does not reconcile a service that is due.",
            description="A service has been due for {{ $value | humanizeDuration }}.",
            runbooks=runbooks,
        ),
    ]


def _service_alerts(runbooks: str) -> list[dict[str, Any]]:
    service = "{{ $labels.namespace }}/{{ $labels.llmservice }}"
    return [
        _alert(
            "GoodputServiceStalled",
            # A held rollout makes the service stalled too, and has an alert of its own.
            expr=_bridged(_reason_while("Stalled", unless="RolloutPaused")),
            lasts="10m",
            severity="ticket",
            summary=f"{service} is stalled: {{{{ $labels.reason }}}}.",
            description="The service needs an intervention. The message of its condition Stalled "
            "names the problem.",
            runbooks=runbooks,
        ),
        _alert(
            "GoodputReplicasAtMaximum",
            expr=_bridged(_reason_while("ScalingLimited")),
            lasts="15m",
            severity="ticket",
            summary=f"{service} needs more replicas than it can get: {{{{ $labels.reason }}}}.",
            description="The replica law needs more replicas than spec.maxReplicas, or pods "
            "cannot be created or scheduled.",
            runbooks=runbooks,
        ),
        _alert(
            "GoodputGateFailed",
            expr=_failed_gate(),
            lasts=None,
            severity="ticket",
            summary=f"The new revision {{{{ $labels.revision }}}} of {service} failed its gate.",
            description="The earlier revision keeps serving. The failed one is not tried again "
            "until the spec changes or the gate is repeated by hand.",
            runbooks=runbooks,
        ),
        _alert(
            "GoodputRolloutPaused",
            expr=f"{_bridged(_reason_while('RolloutPaused'))}"
            f"unless {_SERVICE} (\n{_failed_gate()})\n",
            lasts="10m",
            severity="ticket",
            summary=f"The rollout of {service} is paused: {{{{ $labels.reason }}}}.",
            description="The earlier revision keeps serving until the rollout is continued or the "
            "spec changes.",
            runbooks=runbooks,
        ),
    ]


def _reason_while(condition: str, *, unless: str = "") -> str:
    """Return a query of the reason of a condition while the condition is true.

    The series have no labels of the operator's pod, so another pod continues them.

    Args:
        condition: type of the condition.
        unless: a reason that the query leaves out.
    """
    reasons = f',reason!="{unless}"' if unless else ""
    return (
        "max by (namespace, llmservice, condition, reason) "
        f'({METRIC_SERVICE_CONDITION_REASON}{{condition="{condition}"{reasons}}})\n'
        f"and {_SERVICE} "
        f'{METRIC_SERVICE_CONDITION}{{condition="{condition}",status="True"}} == 1\n'
    )


def _failed_gate() -> str:
    """Return a query of the failed gate of a service, until the gate is repeated."""
    failed = (
        "max by (namespace, llmservice, revision, phase, verdict) "
        f'({METRIC_SERVICE_GATE}{{phase="Failed"}}) == 1\n'
    )
    return f'{_bridged(failed)}unless {_SERVICE} {METRIC_SERVICE_GATE}{{phase!="Failed"}}\n'


def _bridged(expr: str) -> str:
    """Return a query that keeps a series for some minutes after its last sample.

    A container that crashes again and again runs between two crashes, and two problems that take
    turns change the reason. An operator that is replaced reports nothing for a while. Without this,
    each of these gaps would end an alert, or restart its wait.
    """
    return f"last_over_time((\n{expr})[{_BRIDGED}:{_INTERVAL_S}s])\n"


def _alert(
    name: str,
    *,
    expr: str,
    lasts: str | None,
    severity: str,
    summary: str,
    description: str,
    runbooks: str,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        **({} if lasts is None else {"for": lasts}),
        "labels": {"severity": severity, **(labels or {})},
        "annotations": {
            "summary": summary,
            "description": description,
            "runbook_url": f"{runbooks}/{name}.md",
        },
    }
