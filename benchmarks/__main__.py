"""Run every benchmark in its short form: `python -m benchmarks` or `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WITHOUT_SHORT_FORM = {"__main__", "behaviour", "design", "export_cell"}
"""Commands that measure nothing by themselves, because they need files or an earlier revision."""


def short_forms() -> list[str]:
    """Return the names of the benchmarks, which all accept `--quick`."""
    return sorted({script.stem for script in HERE.glob("*.py")} - WITHOUT_SHORT_FORM)


def main() -> int:
    """Run the benchmarks one after another and return the worst exit code."""
    worst = 0
    for name in short_forms():
        print(f"\n== {name}", flush=True)
        finished = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", "--quick"], check=False
        )
        worst = max(worst, finished.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
