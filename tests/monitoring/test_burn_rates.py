"""The factor of each burn-rate alert and its minimum of requests, from both sides.

A class has an objective of 99 %, so that a miss of one percent of the requests is a burn of 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.monitoring.programs import Expected, run_alert_test, series

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SERVICE = {"namespace": "prod", "llmservice": "chat"}


@dataclass(frozen=True, kw_only=True)
class DocumentedBurn:
    """An alert as the documentation states it.

    Args:
        alert: its name.
        severity: its severity.
        factor: the burn above which it fires, in both windows.
        short: minutes of the short window.
        data: minutes of data before the time of the question.
    """

    alert: str
    severity: str
    factor: float
    short: int
    data: int


PAGE, TICKET = "GoodputErrorBudgetBurnsFast", "GoodputErrorBudgetBurns"
BURNS = {
    "1h": DocumentedBurn(alert=PAGE, severity="page", factor=14.4, short=5, data=75),
    "6h": DocumentedBurn(alert=PAGE, severity="page", factor=6, short=30, data=240),
    "1d": DocumentedBurn(alert=TICKET, severity="ticket", factor=3, short=120, data=480),
    "3d": DocumentedBurn(alert=TICKET, severity="ticket", factor=1, short=360, data=900),
}
# The burn before and within the short window, in parts of the factor, and if the alert fires.
FACTORS = {
    "just-below": (0.99, 0.99, False),
    "just-above": (1.01, 1.01, True),
    "ended": (1.1, 0.99, False),
    "only-begun": (0.9, 1.01, False),
}
SMEAR = 10
"""Minutes until the recorded rates of five minutes follow a change."""


def counters(slo_class: str, parts: Sequence[tuple[int, float, float]]) -> list[dict[str, str]]:
    """Return the counters of a class and its objective.

    Args:
        slo_class: the class.
        parts: minutes, requests per minute and burn, one after another.
    """
    attained, missed = [0.0], [0.0]
    for minutes, per_minute, burn in parts:
        for _ in range(minutes):
            attained.append(attained[-1] + per_minute * (1 - 0.01 * burn))
            missed.append(missed[-1] + per_minute * 0.01 * burn)
    labels = {**SERVICE, "slo_class": slo_class}
    total = len(attained)
    return [
        series("goodput_service_objective_ratio", f"0.99x{total}", **labels),
        *(
            series("goodput_requests_total", " ".join(f"{one:.6f}" for one in values),
                   pod="chat-router-0", outcome=outcome, **labels)
            for outcome, values in (("attained", attained), ("missed", missed))
        ),
    ]  # fmt: skip


def expect(window: str, slo_class: str, *, at: int, fires: bool) -> Expected:
    burn = BURNS[window]
    labels = {**SERVICE, "slo_class": slo_class, "severity": burn.severity, "window": window}
    return Expected(
        alert=burn.alert,
        at=f"{at}m",
        window=window,
        slo_class=slo_class,
        labels=labels if fires else None,
    )


@pytest.mark.parametrize("window", BURNS)
def test_a_burn_alert_fires_above_its_factor_in_both_windows(
    rules: Path, tmp_path: Path, window: str
) -> None:
    burn = BURNS[window]
    within = burn.short + SMEAR
    inputs = []
    for slo_class, (before, now, _) in FACTORS.items():
        parts = [(burn.data - within, 1000, burn.factor * before),
                 (within, 1000, burn.factor * now)]  # fmt: skip
        inputs += counters(slo_class, parts)
    run_alert_test(
        tmp_path,
        rules,
        inputs=inputs,
        expected=[
            expect(window, slo_class, at=burn.data, fires=fires)
            for slo_class, (_, _, fires) in FACTORS.items()
        ],
    )


@pytest.mark.parametrize("window", BURNS)
def test_a_burn_alert_needs_a_hundred_requests_in_the_long_window(
    rules: Path, tmp_path: Path, window: str
) -> None:
    burn = BURNS[window]
    # Without requests before and after, so that the recorded rates of five minutes count all of
    # them but one. The short window of five minutes still has some.
    before, busy, after = 5, 45, 3
    inputs = []
    for slo_class, requests in (("few", 99), ("enough", 102)):
        parts = [(before, 0, 0), (busy, requests / busy, 2 * burn.factor), (after, 0, 0)]
        inputs += counters(slo_class, parts)
    minutes = before + busy + after
    run_alert_test(
        tmp_path,
        rules,
        inputs=inputs,
        expected=[
            expect(window, "few", at=minutes, fires=False),
            expect(window, "enough", at=minutes, fires=True),
        ],
        evaluation_interval="30s",  # as often as the recorded rates are evaluated in a cluster
    )
