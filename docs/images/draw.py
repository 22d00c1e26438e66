"""Draw the picture of a run's report for the documentation: a screenshot of its top.

    python docs/images/draw.py runs/azure docs/images/report.png

Requires Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def main() -> None:
    """Save a screenshot of one report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("image", type=Path, help="the PNG to write")
    parser.add_argument("--size", default="1200,1500", help="width,height in CSS pixels")
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("no chromium on this machine; install it with: apt-get install chromium")
    report = (options.run / "report.html").resolve()
    if not report.is_file():
        sys.exit(f"{report} is missing; make it with: replay report {options.run}")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                *_FLAGS,
                # Root has no sandbox; the page is a local file that Goodput wrote.
                "--no-sandbox",
                f"--user-data-dir={profile}",
                f"--window-size={options.size}",
                f"--screenshot={options.image.resolve()}",
                report.as_uri(),
            ],
            check=True,
            timeout=120,
        )


if __name__ == "__main__":
    main()
