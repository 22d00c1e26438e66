"""Write the dashboards and the rules into the chart.

python -m tools.monitoring
"""

from __future__ import annotations

from pathlib import Path

from tools.monitoring.alerts import render_rules
from tools.monitoring.dashboards import render_dashboard
from tools.monitoring.panels import FLEET, SERVICE

CHART_FILES = Path(__file__).resolve().parents[2] / "charts/goodput/files"


def chart_files() -> dict[Path, str]:
    """Return the generated files of the chart."""
    files = {
        CHART_FILES / "dashboards" / f"{name}.json": render_dashboard(spec)
        for name, spec in (("service", SERVICE), ("services", FLEET))
    }
    return {**files, CHART_FILES / "rules.yaml": render_rules()}


if __name__ == "__main__":
    for path, text in chart_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
