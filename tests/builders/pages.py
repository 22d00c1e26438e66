"""Pages in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

__all__ = ["chromium", "opened", "wait_until"]

# Root, as in a container, has no sandbox.
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_REPORT_VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser without a window; skip the test if there is no Chromium on this machine."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("NOT RUN: chromium is missing; install it with `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, phone: bool = False, **context: Any) -> Iterator[Page]:
    """Open a page, and fail if it logs an error or violates its content security policy.

    Args:
        browser: browser of the module.
        url: address of the page.
        phone: True for the width of a phone.
        context: options of Playwright's browser context, such as `color_scheme`.
    """
    size = {"width": 390, "height": 844} if phone else {"width": 1200, "height": 1000}
    with browser.new_context(**{"viewport": size, **context}) as made:
        page = made.new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.add_init_script(_REPORT_VIOLATIONS)
        page.goto(url)
        yield page
        if context.get("java_script_enabled", True):
            problems += page.evaluate(
                "new Promise((done) => setTimeout(done, 0, window.violations))"
            )
    if problems:
        raise AssertionError("; ".join(problems))


def wait_until(page: Page, script: str) -> None:
    """Wait until a script returns true.

    `Page.wait_for_function` cannot be used: from its second attempt on, it evaluates a string
    inside the page, which the page's content security policy forbids.
    """
    for _ in range(200):
        if page.evaluate(script):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"not true within 10 s: {script}")
