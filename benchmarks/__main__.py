"""Run every benchmark in its short form: `python -m benchmarks` or `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Modules that other benchmarks import or start.
PARTS = {
    "__main__.py",
    "fake_pods.py",
    "forced.py",
    "autoscalers.py",
    "bare_api_server.py",
    "cells.py",
    "clairvoyant.py",
    "control_view.py",
    "design.py",
    "loads.py",
    "mock_server.py",
    "plateau.py",
    "policies_view.py",
    "preemption_modes.py",
    "prices.py",
    "recorded_pods.py",
    "retries.py",
    "rule.py",
    "schedule_search.py",
    "stages.py",
    "stand_in_nodes.py",
    "step_bounds.py",
    "stretched_day.py",
}


def main() -> int:
    """Run the benchmarks one after another and return the worst exit code."""
    worst = 0
    for script in sorted(HERE.glob("*.py")):
        if script.name in PARTS:
            continue
        print(f"\n== {script.name}", flush=True)
        finished = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{script.stem}", "--quick"], check=False
        )
        worst = max(worst, finished.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
