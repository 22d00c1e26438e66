"""Programs that the tests of dashboards and alerts run."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Expected", "inserted", "run_alert_test", "run_promtool", "series"]


def run_promtool(*words: str) -> str:
    """Run promtool and return its output; skip the test if it is missing.

    Raises:
        AssertionError: promtool failed; the text is its output.
    """
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("NOT RUN: promtool is missing; install it with `apt-get install prometheus`")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def inserted(expr: str, namespace: str = "prod", service: str = "chat") -> str:
    """Return a panel's query with the values that Grafana would insert."""
    variables = {
        # Long enough for the runs on both engines of a gate in the cluster, and the replay that has
        # ended: a busy machine needs minutes for them and for the queries.
        "$__rate_interval": "4m",
        "$__range": "5m",
        "$namespace": namespace,
        "$llmservice": service,
    }
    for name, value in variables.items():
        expr = expr.replace(name, value)
    return expr


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """Return a series in promtool's notation."""
    return {"series": f"{name}{{{_labels_text(labels)}}}", "values": values}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """An alert that fires, or does not fire, at a time.

    Args:
        alert: name of the alert.
        at: the time, such as `1h5m`.
        labels: labels of the firing alert; None if it does not fire.
        window: the window of the alert; None if it has none or any of them is meant.
        slo_class: the class of the alert; None if any is meant.
    """

    alert: str
    at: str
    labels: dict[str, str] | None
    window: str | None = None
    slo_class: str | None = None


def run_alert_test(
    folder: Path,
    rules: Path,
    *,
    inputs: Sequence[dict[str, str]],
    expected: Sequence[Expected],
    evaluation_interval: str = "1m",
) -> None:
    """Evaluate the rules on series in steps of a minute.

    Raises:
        AssertionError: an alert fires or is silent against expectation.
    """
    tests = {
        "rule_files": [str(rules)],
        "evaluation_interval": evaluation_interval,
        "tests": [
            {
                "interval": "1m",
                "input_series": list(inputs),
                "promql_expr_test": [
                    {
                        "expr": f"ALERTS{{{_labels_text(_selected(one))}}}",
                        "eval_time": one.at,
                        "exp_samples": [] if one.labels is None else [_sample(one, one.labels)],
                    }
                    for one in expected
                ],
            }
        ],
    }
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump(tests), encoding="utf-8")
    run_promtool("test", "rules", str(path))


def _selected(one: Expected) -> dict[str, str]:
    found = {"alertname": one.alert, "alertstate": "firing"}
    if one.window is not None:
        found["window"] = one.window
    if one.slo_class is not None:
        found["slo_class"] = one.slo_class
    return found


def _sample(one: Expected, labels: dict[str, str]) -> dict[str, object]:
    found = {"alertname": one.alert, "alertstate": "firing", **labels}
    return {"labels": f"ALERTS{{{_labels_text(found)}}}", "value": 1}


def _labels_text(labels: dict[str, str]) -> str:
    return ",".join(f'{key}="{value}"' for key, value in labels.items())
