"""Prometheus accepts the scrape configuration of docs/dashboards.md.

The end-to-end test of the dashboards scrapes a cluster with it, and tests/charts compares its rules
with those of the chart's PodMonitor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.builders.documented import documented_yaml
from tests.monitoring.programs import run_promtool

if TYPE_CHECKING:
    from pathlib import Path


ROLES = ("endpoints", "pod", "pod")
"""Roles of the discovery of Kubernetes; Debian builds promtool without it."""


def check(jobs: list[dict[str, Any]], folder: Path) -> str:
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump({"scrape_configs": jobs}), encoding="utf-8")
    return run_promtool("check", "config", str(path))


def test_promtool_accepts_the_documented_configuration(tmp_path: Path) -> None:
    jobs = documented_yaml("dashboards.md", "scrape_configs:")["scrape_configs"]
    discoveries = [job.pop("kubernetes_sd_configs") for job in jobs]
    assert discoveries == [[{"role": role}] for role in ROLES]
    output = check(jobs, tmp_path)
    assert "SUCCESS" in output
    wrong = {**jobs[1], "metric_relabel_configs": [{"action": "drops"}]}
    with pytest.raises(AssertionError, match='unknown relabel action "drops"'):
        check([wrong], tmp_path)
