"""Alerts while an operator is lost, and after services or installations were deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.monitoring.programs import Expected, run_alert_test, series

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SERVICE = {"namespace": "prod", "llmservice": "chat"}
CLASS = {**SERVICE, "slo_class": "interactive"}
PAGE = "GoodputErrorBudgetBurnsFast"
TICKET = "GoodputErrorBudgetBurns"
FAST = {**CLASS, "severity": "page", "window": "1h"}
TOTAL_OUTAGE = "0+60x6000"
DOWN = "GoodputOperatorDown"


def outage(values: str = TOTAL_OUTAGE) -> list[dict[str, str]]:
    """Counters of a router that refuses each request."""
    labels = {"pod": "chat-router-0", **CLASS}
    return [
        series("goodput_requests_total", "0x6000", outcome="attained", **labels),
        series("goodput_requests_total", values, outcome="shed", **labels),
    ]


def reported(objective: str, valid: str = "1x6000", invalid: str = "stale") -> list[dict[str, str]]:
    """An objective, and times at which the operator reports a valid and an invalid spec."""
    labels = {"condition": "Stalled", "pod": "op-0", **SERVICE}
    return [
        series("goodput_service_objective_ratio", objective, pod="op-0", **CLASS),
        series("goodput_service_condition_reason", valid, reason="Unhindered", **labels),
        series("goodput_service_condition_reason", invalid, reason="InvalidSpec", **labels),
    ]


def expect(
    *, fires: Iterable[int] = (), silent: Iterable[int] = (), window: str = "1h"
) -> list[Expected]:
    """Return the expectations of a page at some minutes."""
    labels = {**FAST, "window": window}
    return [
        *(Expected(alert=PAGE, at=f"{m}m", window=window, labels=labels) for m in fires),
        *(Expected(alert=PAGE, at=f"{m}m", window=window, labels=None) for m in silent),
    ]


def ticket(at: str, *, fires: bool) -> Expected:
    labels = {**CLASS, "severity": "ticket", "window": "3d"}
    return Expected(alert=TICKET, at=at, window="3d", labels=labels if fires else None)


def test_a_page_continues_while_the_operator_is_lost(rules: Path, tmp_path: Path) -> None:
    run_alert_test(
        tmp_path,
        rules,
        inputs=[*outage(), *reported("0.99x30 stale", valid="1x30 stale")],
        expected=expect(fires=[29, *range(31, 150)]),
    )


def test_a_page_continues_for_more_than_a_day_after_the_operator_was_lost(
    rules: Path, tmp_path: Path
) -> None:
    run_alert_test(
        tmp_path,
        rules,
        inputs=[*outage(), *reported("0.99x30 stale", valid="1x30 stale")],
        expected=expect(fires=[20, 100, 1500]),
        evaluation_interval="5m",
    )


def test_alerts_end_within_an_hour_after_their_service_was_deleted(
    rules: Path, tmp_path: Path
) -> None:
    deleted = [{**one, "values": one["values"].split("x")[0] + "x30 stale"} for one in outage()]
    run_alert_test(
        tmp_path,
        rules,
        inputs=[*deleted, *reported("0.99x30 stale", valid="1x30 stale")],
        expected=[
            *expect(fires=[30], silent=range(37, 110)),
            # The short window of the ticket still has requests of the service.
            *(ticket(at, fires=fires) for at, fires in (("30m", True), ("100m", False))),
        ],
    )


def test_a_removed_objective_is_known_for_an_hour(rules: Path, tmp_path: Path) -> None:
    run_alert_test(
        tmp_path,
        rules,
        inputs=[*outage(), *reported("0.99x30 stale")],
        expected=expect(fires=[30, 85], silent=range(92, 130)),
    )


def test_a_removed_objective_stays_unknown_while_the_operator_is_replaced(
    rules: Path, tmp_path: Path
) -> None:
    run_alert_test(
        tmp_path,
        rules,
        inputs=[*outage(), *reported("0.99x30 stale", valid="1x200 stale _x5 1x200")],
        expected=expect(fires=[30], silent=range(190, 230)),
    )


def test_a_removed_objective_stays_unknown_after_the_operator_was_lost(
    rules: Path, tmp_path: Path
) -> None:
    run_alert_test(
        tmp_path,
        rules,
        inputs=[*outage(), *reported("0.99x30 stale", valid="1x50 stale")],
        expected=expect(fires=[30, 85], silent=range(92, 200)),
    )


def test_a_changed_objective_stays_changed_after_the_operator_was_lost(
    rules: Path, tmp_path: Path
) -> None:
    before = reported("0.99x30 stale", valid="1x30 stale")
    after = [
        {**one, "series": one["series"].replace("op-0", "op-1")}
        for one in reported("_x31 0.9x100 stale", valid="_x31 1x100 stale")
    ]
    run_alert_test(
        tmp_path,
        rules,
        inputs=[*outage(), *before, *after],
        # All requests miss: a burn of 10 under an objective of 90 %.
        expected=expect(fires=[30], silent=range(95, 300)),
    )


def test_an_invalid_spec_keeps_the_objective_after_the_operator_restarted(
    rules: Path, tmp_path: Path
) -> None:
    run_alert_test(
        tmp_path,
        rules,
        # The operator restarts after 50 minutes, and reads the invalid spec only.
        inputs=[*outage(), *reported("0.99x50 stale", valid="1x30 stale", invalid="_x31 1x6000")],
        expected=expect(fires=[29, *range(31, 150)]),
    )


def test_a_page_ends_within_five_minutes_of_good_traffic(rules: Path, tmp_path: Path) -> None:
    labels = {"pod": "chat-router-0", **CLASS}
    run_alert_test(
        tmp_path,
        rules,
        inputs=[
            series("goodput_requests_total", "0x40 0+60x100", outcome="attained", **labels),
            series("goodput_requests_total", "0+60x40 2400x100", outcome="missed", **labels),
            *reported("0.99x200"),
        ],
        expected=expect(fires=[35, 40, 43], silent=range(46, 80)),
        evaluation_interval="30s",
    )


def down(at: str, **labels: str) -> Expected:
    return Expected(alert=DOWN, at=at, labels={"severity": "page", **labels})


def not_down(at: str) -> Expected:
    return Expected(alert=DOWN, at=at, labels=None)


def test_the_loss_of_one_of_two_installations_pages_with_its_namespace(
    rules: Path, tmp_path: Path
) -> None:
    run_alert_test(
        tmp_path,
        rules,
        inputs=[
            series("goodput_operator_leader", "1x200", namespace="team-a", pod="op-a"),
            series("goodput_operator_leader", "0x200", namespace="team-a", pod="op-standby"),
            series("goodput_operator_leader", "1x20 stale _x20 1x200", namespace="team-b",
                   pod="op-b"),
        ],
        expected=[
            not_down("20m"),
            not_down("25m"),
            *(down(f"{minute}m", namespace="team-b") for minute in range(27, 42)),
            not_down("43m"),
        ],
    )  # fmt: skip


def test_the_loss_of_the_only_installation_pages_once(rules: Path, tmp_path: Path) -> None:
    run_alert_test(
        tmp_path,
        rules,
        inputs=[
            series("goodput_operator_leader", "1x20 stale", namespace="team-a", pod="op-a"),
        ],
        expected=[not_down("20m"), *(down(f"{minute}m") for minute in range(27, 60))],
    )


def test_an_installation_without_the_lease_for_a_day_is_no_loss(
    rules: Path, tmp_path: Path
) -> None:
    run_alert_test(
        tmp_path,
        rules,
        inputs=[
            series("goodput_operator_leader", "1x1500", namespace="team-a", pod="op-a"),
            series("goodput_operator_leader", "1x20 stale", namespace="team-b", pod="op-b"),
        ],
        expected=[down("1450m", namespace="team-b"), not_down("1470m")],
        evaluation_interval="5m",
    )
