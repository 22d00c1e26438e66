"""Each alert fires and clears, in Prometheus' own evaluation of the rules at chosen times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from tests.monitoring.programs import Expected, run_alert_test, run_promtool, series
from tools.monitoring.alerts import make_rules

if TYPE_CHECKING:
    from pathlib import Path

SERVICE = {"namespace": "prod", "llmservice": "chat"}
CLASS = {**SERVICE, "slo_class": "interactive"}


Inputs = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Series in steps of a minute, and the times at which an alert is and is not firing.

    Args:
        alert: name of the alert.
        inputs: the series.
        fires: labels of the firing alert by time.
        silent: times at which it does not fire.
        window: the window of the alert; None if it has none or any of them is meant.
    """

    alert: str
    inputs: list[dict[str, str]]
    fires: dict[str, dict[str, str]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    window: str | None = None


def requests(attained: str, missed: str, objective: float = 0.99) -> list[dict[str, str]]:
    """Counters of two routers with half of the requests each, and the objective."""
    found = [series("goodput_service_objective_ratio", f"{objective}x20000", **CLASS)]
    for pod in ("chat-router-0", "chat-router-1"):
        for outcome, values in (("attained", attained), ("missed", missed)):
            labels = {"pod": pod, "outcome": outcome, **CLASS}
            found.append(series("goodput_requests_total", values, **labels))
    return found


def condition(kind: str, reason: str, true_minutes: int) -> list[dict[str, str]]:
    """A condition that is true for some minutes and then false."""
    on, off = f"1x{true_minutes}", "0x100"
    return [
        series("goodput_service_condition", f"{on} {off}", condition=kind, status="True",
               **SERVICE),
        series("goodput_service_condition_reason", f"1x{true_minutes} _x100", condition=kind,
               reason=reason, **SERVICE),
        series("goodput_service_condition_reason", f"_x{true_minutes + 1} 1x100", condition=kind,
               reason="Unhindered", **SERVICE),
    ]  # fmt: skip


def alternating(
    kind: str, reasons: tuple[str, str], minutes: tuple[int, int], times: int
) -> Inputs:
    """A condition with two reasons in turn; it is false with the reasons that mean so.

    Args:
        kind: type of the condition.
        reasons: both reasons.
        minutes: minutes with the first and with the second reason.
        times: repetitions of both.
    """
    on = {reason: int(reason not in {"Unhindered", "NotLimited"}) for reason in reasons}
    truth = [
        str(on[reason]) for reason, last in zip(reasons, minutes, strict=True) for _ in range(last)
    ]
    found = [
        series(
            "goodput_service_condition",
            " ".join(truth * times),
            condition=kind,
            status="True",
            **SERVICE,
        )
    ]
    for chosen in reasons:
        values = [
            "1" if reason == chosen else "stale"
            for reason, last in zip(reasons, minutes, strict=True)
            for _ in range(last)
        ]
        found.append(
            series(
                "goodput_service_condition_reason",
                " ".join(values * times),
                condition=kind,
                reason=chosen,
                **SERVICE,
            )
        )
    return found


def handed_over(inputs: Inputs, minutes: int, gap: int, *, total: int = 100) -> Inputs:
    """Series of value 1 of an operator, and of another pod after some minutes and a gap."""
    found = []
    for one in inputs:
        name = one["series"].removesuffix("}")
        found += [
            {"series": f'{name},pod="op-0"}}', "values": f"1x{minutes} stale"},
            {"series": f'{name},pod="op-1"}}', "values": f"_x{minutes + 1 + gap} 1x{total}"},
        ]
    return found


FAST = {**CLASS, "severity": "page", "window": "1h"}
SLOWER = {**CLASS, "severity": "page", "window": "6h"}
DAY = {**CLASS, "severity": "ticket", "window": "1d"}
THREE_DAYS = {**CLASS, "severity": "ticket", "window": "3d"}
CASES = {
    # 20 % of 60 requests a minute miss for 40 minutes, then none: a burn of 20.
    "a burst of misses pages and clears soon after its end": Case(
        alert="GoodputErrorBudgetBurnsFast",
        inputs=requests("0+24x40 960+30x300", "0+6x40 240+0x300"),
        fires={"35m": FAST},
        silent=("1m", "58m"),
        window="1h",
    ),
    # All requests miss: a burn of 1 / (1 - 0.931) = 14.5, and of 14.3 with 93 %.
    "an objective of 93.1 % can page within an hour": Case(
        alert="GoodputErrorBudgetBurnsFast",
        inputs=requests("0x200", "0+30x200", objective=0.931),
        fires={"35m": FAST},
        window="1h",
    ),
    "an objective of 93 % cannot page within an hour": Case(
        alert="GoodputErrorBudgetBurnsFast",
        inputs=requests("0x200", "0+30x200", objective=0.93),
        silent=("35m", "3h"),
        window="1h",
    ),
    "an objective of 83 % cannot page": Case(
        alert="GoodputErrorBudgetBurnsFast",
        inputs=requests("0x500", "0+30x500", objective=0.83),
        silent=("35m", "7h"),
    ),
    # 8 % miss for 5 hours: a burn of 8, which only the longer window reports.
    "constant misses over hours page by the window of six hours": Case(
        alert="GoodputErrorBudgetBurnsFast",
        inputs=requests("0+46x300 13800+50x200", "0+4x300 1200+0x200"),
        fires={"4h": SLOWER},
        silent=("6h30m",),
        window="6h",
    ),
    # 20 % of one request in two minutes miss: 30 requests in an hour prove nothing.
    "few requests prove nothing": Case(
        alert="GoodputErrorBudgetBurnsFast",
        inputs=requests("0+0.2x400", "0+0.05x400"),
        silent=("30m", "59m"),
    ),
    "a rate of misses that the objective permits is silent": Case(
        alert="GoodputErrorBudgetBurnsFast",
        inputs=requests("0+594x400", "0+6x400"),
        silent=("30m", "90m"),
    ),
    # 5 % miss: a burn of 5, below both pages and above the ticket of a day.
    "misses over a day are a ticket and no page": Case(
        alert="GoodputErrorBudgetBurns",
        inputs=requests("0+95x300 28500+100x300", "0+5x300 1500+0x300"),
        fires={"5h": DAY},
        silent=("8h30m",),
        window="1d",
    ),
    # 2 % miss: a burn of 2, which only the window of three days reports.
    "a slow burn over three days is a ticket": Case(
        alert="GoodputErrorBudgetBurns",
        inputs=requests("0+98x300 29400+100x500", "0+2x300 600+0x500"),
        fires={"5h": THREE_DAYS},
        silent=("12h",),
        window="3d",
    ),
    "an operator without the Lease pages after five minutes and clears": Case(
        alert="GoodputOperatorDown",
        inputs=[series("goodput_operator_leader", "1x5 0x10 1x10", pod="op-0")],
        fires={"13m": {"severity": "page"}},
        silent=("5m", "8m", "20m"),
    ),
    "an operator that is not scraped pages, too": Case(
        alert="GoodputOperatorDown",
        inputs=[series("goodput_operator_leader", "1x5 _x30 1x10", pod="op-0")],
        fires={"20m": {"severity": "page"}},
        silent=("4m", "40m"),
    ),
    "the second operator that waits for the Lease is no failure": Case(
        alert="GoodputOperatorDown",
        inputs=[
            series("goodput_operator_leader", "1x30", pod="op-0"),
            series("goodput_operator_leader", "0x30", pod="op-1"),
        ],
        silent=("10m", "29m"),
    ),
    "a service that stays due pages": Case(
        alert="GoodputOperatorStalled",
        inputs=[series("goodput_operator_overdue_seconds", "0 60 130 190 250 310 0x10", pod="op")],
        fires={"5m": {"severity": "page"}},
        silent=("3m", "8m"),
    ),
    "a stalled service is a ticket with the reason": Case(
        alert="GoodputServiceStalled",
        inputs=condition("Stalled", "ImagePullFailed", 20),
        fires={
            "15m": {
                **SERVICE,
                "severity": "ticket",
                "condition": "Stalled",
                "reason": "ImagePullFailed",
            }
        },
        silent=("5m", "28m"),
    ),
    "an engine that serves for two minutes between its crashes is a ticket": Case(
        alert="GoodputServiceStalled",
        inputs=alternating("Stalled", ("CrashLooping", "Unhindered"), (5, 2), 6),
        fires={
            at: {
                **SERVICE,
                "severity": "ticket",
                "condition": "Stalled",
                "reason": "CrashLooping",
            }
            for at in ("11m", "13m", "20m", "40m")
        },
        silent=("9m", "60m"),
    ),
    "a crash loop with another problem between is a ticket": Case(
        alert="GoodputServiceStalled",
        inputs=alternating("Stalled", ("CrashLooping", "RolloutPaused"), (5, 2), 6),
        fires={
            "20m": {
                **SERVICE,
                "severity": "ticket",
                "condition": "Stalled",
                "reason": "CrashLooping",
            }
        },
        silent=("9m",),
    ),
    "one crash is no stalled service": Case(
        alert="GoodputServiceStalled",
        inputs=alternating("Stalled", ("CrashLooping", "Unhindered"), (3, 60), 1),
        silent=("8m", "9m", "12m", "30m"),
    ),
    "a replica law that asks for too much most of the time is a ticket": Case(
        alert="GoodputReplicasAtMaximum",
        inputs=alternating("ScalingLimited", ("MaxReplicas", "NotLimited"), (4, 2), 8),
        fires={
            "17m": {
                **SERVICE,
                "severity": "ticket",
                "condition": "ScalingLimited",
                "reason": "MaxReplicas",
            }
        },
        silent=("14m", "59m"),
    ),
    "a replica law at its ceiling is a ticket": Case(
        alert="GoodputReplicasAtMaximum",
        inputs=condition("ScalingLimited", "MaxReplicas", 30),
        fires={
            "20m": {
                **SERVICE,
                "severity": "ticket",
                "condition": "ScalingLimited",
                "reason": "MaxReplicas",
            }
        },
        silent=("10m", "40m"),
    ),
    "a held rollout stalls the service, and has its own ticket": Case(
        alert="GoodputServiceStalled",
        inputs=condition("Stalled", "RolloutPaused", 30),
        silent=("15m", "29m"),
    ),
    "another operator continues the ticket of a stalled service": Case(
        alert="GoodputServiceStalled",
        inputs=handed_over(
            [
                series("goodput_service_condition", "", condition="Stalled", status="True",
                       **SERVICE),
                series("goodput_service_condition_reason", "", condition="Stalled",
                       reason="ImagePullFailed", **SERVICE),
            ],
            minutes=6,
            gap=2,
        ),
        fires={
            at: {
                **SERVICE,
                "severity": "ticket",
                "condition": "Stalled",
                "reason": "ImagePullFailed",
            }
            for at in ("11m", "15m", "20m")
        },
        silent=("9m",),
    ),
    "another operator continues the ticket of a replica law": Case(
        alert="GoodputReplicasAtMaximum",
        inputs=handed_over(
            [
                series("goodput_service_condition", "", condition="ScalingLimited", status="True",
                       **SERVICE),
                series("goodput_service_condition_reason", "", condition="ScalingLimited",
                       reason="MaxReplicas", **SERVICE),
            ],
            minutes=20,
            gap=1,
        ),
        fires={
            f"{minute}m": {
                **SERVICE,
                "severity": "ticket",
                "condition": "ScalingLimited",
                "reason": "MaxReplicas",
            }
            for minute in range(16, 30)
        },
        silent=("14m",),
    ),
    "another operator continues the ticket of a paused rollout": Case(
        alert="GoodputRolloutPaused",
        inputs=handed_over(
            [
                series("goodput_service_condition", "", condition="RolloutPaused", status="True",
                       **SERVICE),
                series("goodput_service_condition_reason", "", condition="RolloutPaused",
                       reason="Inconclusive", **SERVICE),
            ],
            minutes=20,
            gap=2,
        ),
        fires={
            f"{minute}m": {
                **SERVICE,
                "severity": "ticket",
                "condition": "RolloutPaused",
                "reason": "Inconclusive",
            }
            for minute in range(11, 40)
        },
        silent=("9m",),
    ),
    "a failed gate has no second ticket after another operator took over": Case(
        alert="GoodputRolloutPaused",
        inputs=handed_over(
            [
                series("goodput_service_condition", "", condition="RolloutPaused", status="True",
                       **SERVICE),
                series("goodput_service_condition_reason", "", condition="RolloutPaused",
                       reason="GateFailed", **SERVICE),
                series("goodput_service_gate", "", phase="Failed", verdict="FAIL", revision="r2",
                       **SERVICE),
            ],
            minutes=20,
            gap=2,
        ),
        silent=tuple(f"{minute}m" for minute in range(10, 40)),
    ),
    "another operator continues the ticket of a failed gate": Case(
        alert="GoodputGateFailed",
        inputs=handed_over(
            [
                series("goodput_service_gate", "", phase="Failed", verdict="FAIL", revision="r2",
                       **SERVICE),
            ],
            minutes=20,
            gap=2,
        ),
        fires={
            f"{minute}m": {
                **SERVICE,
                "severity": "ticket",
                "revision": "r2",
                "phase": "Failed",
                "verdict": "FAIL",
            }
            for minute in range(1, 40)
        },
    ),
    "a failed gate is a ticket for six minutes after the spec changed": Case(
        alert="GoodputGateFailed",
        inputs=[
            series("goodput_service_gate", "1x10 stale", phase="Failed", verdict="FAIL",
                   revision="r2", **SERVICE),
        ],
        fires={
            "16m": {
                **SERVICE,
                "severity": "ticket",
                "revision": "r2",
                "phase": "Failed",
                "verdict": "FAIL",
            },
        },
        silent=("17m",),
    ),
    "a paused rollout is a ticket": Case(
        alert="GoodputRolloutPaused",
        inputs=[
            *condition("RolloutPaused", "Inconclusive", 30),
            series("goodput_service_gate", "1x30", phase="Paused", verdict="INCONCLUSIVE",
                   revision="r2", **SERVICE),
        ],
        fires={
            "20m": {
                **SERVICE,
                "severity": "ticket",
                "condition": "RolloutPaused",
                "reason": "Inconclusive",
            }
        },
        silent=("5m", "40m"),
    ),
    "a failed gate pauses the rollout, and has its own ticket": Case(
        alert="GoodputRolloutPaused",
        inputs=[
            *condition("RolloutPaused", "GateFailed", 30),
            series("goodput_service_gate", "1x30", phase="Failed", verdict="FAIL", revision="r2",
                   **SERVICE),
        ],
        silent=("15m", "29m"),
    ),
    "a failed gate is a ticket until the spec changes or the gate is repeated": Case(
        alert="GoodputGateFailed",
        inputs=[
            series("goodput_service_gate", "1x5 stale", phase="Replaying", verdict="",
                   revision="r2", **SERVICE),
            series("goodput_service_gate", "_x6 1x10 stale", phase="Failed", verdict="FAIL",
                   revision="r2", **SERVICE),
            series("goodput_service_gate", "_x17 1x30", phase="Starting", verdict="", revision="r2",
                   **SERVICE),
        ],
        fires={
            "10m": {
                **SERVICE,
                "severity": "ticket",
                "revision": "r2",
                "phase": "Failed",
                "verdict": "FAIL",
            },
        },
        silent=("4m", "18m", "25m"),
    ),
}  # fmt: skip


def test_prometheus_accepts_the_rules(rules: Path) -> None:
    run_promtool("check", "rules", str(rules))


def test_every_alert_has_a_case_that_fires_and_clears() -> None:
    alerts = {
        (rule["alert"], rule["labels"].get("window"))
        for group in make_rules()["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    fired = {
        (case.alert, labels.get("window"))
        for case in CASES.values()
        for labels in case.fires.values()
        if case.silent
    }
    assert fired == alerts


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_alert_fires_and_clears(rules: Path, tmp_path: Path, case: Case) -> None:
    run_alert_test(
        tmp_path,
        rules,
        inputs=case.inputs,
        expected=[
            Expected(alert=case.alert, at=at, window=case.window, labels=labels)
            for at, labels in (*case.fires.items(), *((at, None) for at in case.silent))
        ],
    )
