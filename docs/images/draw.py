"""Draw pictures of a report for the documentation: its top, or one of its sections.

    python docs/images/draw.py runs/azure docs/images/report.png
    python docs/images/draw.py compare.html docs/images/compare.png
    python docs/images/draw.py runs/slow docs/images/server-metrics.png --section server

Requires Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    """Save a screenshot of one report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run's folder, or a page")
    parser.add_argument("image", type=Path, help="the PNG to write")
    parser.add_argument("--size", default="1200,1500", help="width,height in CSS pixels")
    parser.add_argument("--section", help="id of a section (default: the top of the page)")
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("no chromium on this machine; install it with: apt-get install chromium")
    page_given = options.run.suffix == ".html"
    report = (options.run if page_given else options.run / "report.html").resolve()
    if not report.is_file():
        sys.exit(f"{report} is missing; make it with: replay report {options.run}")
    width, height = map(int, options.size.split(","))
    with sync_playwright() as playwright:
        # Root has no sandbox; the page is a local file that Goodput wrote.
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": width, "height": height}, bypass_csp=True)
        page.goto(report.as_uri())
        if options.section is None:
            page.screenshot(path=options.image)
        else:
            # The bar with the switches would cover a part of the section.
            page.add_style_tag(content=".switches { display: none !important; }")
            page.locator(f"#{options.section}").screenshot(path=options.image)
        chromium.close()


if __name__ == "__main__":
    main()
