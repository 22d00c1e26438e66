"""The page of a comparison: its contents, and its charts in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.builders.pages import opened
from tests.replay.compare.recorded import chat_run
from tests.replay.conftest import INFO

from goodput_core.errors import InputError
from goodput_core.units import NS_PER_S
from goodput_replay.compare.compare_command import main
from goodput_replay.runs.files import SERVER_METRICS_FILE
from goodput_replay.runs.server_metrics import ServerMetrics, write_server_metrics

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

HOSTILE = "</script><script>window.hacked = 1</script>\u2028<img src=x onerror='hacked = 1'>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    trace = replace(INFO.trace, name=HOSTILE)
    runs = [
        chat_run(folder / "old", missed={5}, trace=trace),
        chat_run(folder / "new", missed=range(100, 130), trace=trace, ttft_ms=150),
        chat_run(folder / "other window", seconds=30, trace=trace),
    ]
    main([*map(str, runs), "--html", str(folder / "compare.html")])
    return folder / "compare.html"


def test_the_page_has_the_differences_and_the_changed_requests_without_scripts(page: Path) -> None:
    text = page.read_text()
    assert "new, other window against old" in text
    assert "r00100" in text
    assert "unpaired" in text
    assert "−4.84 points" in text
    assert "<script>window.hacked" not in text


def test_every_chart_draws_each_run_and_no_text_becomes_code(page: Path, browser: Browser) -> None:
    with opened(browser, page.as_uri()) as shown:
        assert shown.locator(".u-over").count() == 4
        assert shown.evaluate("window.hacked === undefined")
        shown.locator("#switches button", has_text="old").first.click()
    with opened(browser, page.as_uri(), phone=True) as shown:
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_servers_of_scraped_runs_are_drawn_over_each_other(tmp_path: Path) -> None:
    runs = [chat_run(tmp_path / name, seconds=20) for name in ("old", "new", "unscraped")]
    for run, engines in zip(runs, (("a", "b"), ("c",)), strict=False):
        metrics = ServerMetrics(every_ns=2 * NS_PER_S, metrics=("level",))
        for at_s in range(0, 22, 2):
            for number, engine in enumerate(engines, start=1):
                values = {"running_requests": 3.0 * number, "kv_usage": 0.2 * number}
                if len(engines) == 1:
                    values["level"] = 7.0
                metrics.add(f"http://{engine}/metrics", at_s * NS_PER_S, values)
        write_server_metrics(run / SERVER_METRICS_FILE, metrics)
    page = tmp_path / "compare.html"
    main([*map(str, runs), "--html", str(page)])
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>',
                         page.read_text(), re.DOTALL)  # fmt: skip
    drawn = {
        figure["title"]: {line["label"]: set(line["values"]) for line in figure["series"]}
        for figure in json.loads(data)["figures"]
        if figure["name"].startswith("server")
    }
    assert drawn == {
        "Running in the server": {"old": {9.0}, "new": {3.0}},
        "KV memory of the server": {"old": {0.4}, "new": {0.2}},
        "level": {"new": {7.0}},
    }
    (runs[0] / SERVER_METRICS_FILE).write_text("torn")
    main([*map(str, runs), "--html", str(page)])
    assert "not the server metrics of a run" in page.read_text()


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    runs = [str(chat_run(tmp_path / name, seconds=5)) for name in ("a", "b")]
    with pytest.raises(InputError, match=r"c\.html: the page cannot be written"):
        main([*runs, "--html", str(tmp_path / "missing" / "c.html")])
