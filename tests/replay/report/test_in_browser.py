"""The report in a browser: charts, switches, zoom, widths, colours and print."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.pages import opened, wait_until
from tests.replay.conftest import write_run

from goodput_core.slo.targets import SLOClass
from goodput_core.units import NS_PER_S
from goodput_replay.report.run_report import write_report
from goodput_replay.runs.files import SERVER_METRICS_FILE
from goodput_replay.runs.server_metrics import ServerMetrics, write_server_metrics
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page
    from tests.replay.conftest import SyntheticRun

HOSTILE = "</script><script>window.hacked = 1</script>\u2028<img src=x onerror='hacked = 1'>"
CHARTS = 11


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, synthetic_run: SyntheticRun) -> str:
    folder = tmp_path_factory.mktemp("report")
    write_run(
        folder, synthetic_run.info, synthetic_run.records, force=True, write_report=write_report
    )
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def hostile_url(tmp_path_factory: pytest.TempPathFactory, synthetic_run: SyntheticRun) -> str:
    folder = tmp_path_factory.mktemp("hostile")
    info = replace(
        synthetic_run.info,
        slo=SLOClasses(
            classes=(
                SLOClass(name=HOSTILE, ttft_ms=500, tpot_ms=50),
                SLOClass(name="x" * 300, ttft_ms=500, tpot_ms=50),
            ),
            default=HOSTILE,
        ),
    )
    records = [
        replace(
            r,
            slo_class=HOSTILE if index % 2 else "x" * 300,
            request_id=HOSTILE,
            detail=HOSTILE,
            replica=HOSTILE,
        )
        for index, r in enumerate(synthetic_run.records[:200])
    ]
    write_run(folder, info, records, force=True, write_report=write_report)
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory, synthetic_run: SyntheticRun) -> str:
    """A report with the metrics of a server, one of whose series has only one value."""
    folder = tmp_path_factory.mktemp("server")
    write_run(folder, synthetic_run.info, synthetic_run.records, force=True)
    metrics = ServerMetrics(every_ns=10 * NS_PER_S, metrics=("work_of_a_very_long_name_" * 3,))
    for at_s in range(0, 300, 10):
        values = {"running_requests": float(at_s)}
        if at_s == 100:
            values |= {"waiting_requests": 5.0, metrics.metrics[0]: 4e9}
        metrics.add("http://127.0.0.1:8001/metrics", at_s * NS_PER_S, values)
    write_server_metrics(folder / SERVER_METRICS_FILE, metrics)
    return write_report(folder).as_uri()


def _hover(page: Page, figure: str, share: float) -> Locator:
    """Point at a share of a chart's width, and return the values that are shown."""
    area = page.locator(f"#{figure} .u-over")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    return page.locator(f"#{figure} .tip")


def _drag(page: Page, figure: str, start: float, end: float) -> None:
    _hover(page, figure, start)
    page.mouse.down()
    _hover(page, figure, end)
    page.mouse.up()


def test_the_page_draws_every_chart_without_errors(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        assert page.locator("figure .uplot canvas").count() == CHARTS
        drawn = page.evaluate(
            """[...document.querySelectorAll("figure canvas")].map((canvas) => {
              const { width, height } = canvas;
              const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
              return new Set(new Uint32Array(data.buffer)).size;
            })"""
        )
        assert all(colours > 3 for colours in drawn), "no canvas is empty"


@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_metrics_of_the_server_are_drawn_on_the_time_axis_of_the_run(
    phone: bool, scheme: str, browser: Browser, server_url: str
) -> None:
    with opened(browser, server_url, phone=phone, color_scheme=scheme) as page:
        assert page.locator("figure .uplot canvas").count() == CHARTS + 3
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width == (390 if phone else 1200)
        for figure, value in (("server-0", "150"), ("server-1", "")):
            text = _hover(page, figure, 0.51).inner_text().split()
            assert text[:3] == ["2:30", "–", "2:40"]
            assert text[-1] == (value or "2:40")
        client = _hover(page, "rates", 0.51).inner_text().split()
        assert client[0] == "2:30", "the client's charts have intervals of 5 s"


def test_a_value_between_two_gaps_is_visible(browser: Browser, server_url: str) -> None:
    with opened(browser, server_url) as page:
        drawn = page.evaluate(
            """() => {
              const canvas = document.querySelector("#server-1 canvas");
              const { width, height } = canvas;
              const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
              const blue = (at) => `${data.slice(at, at + 3)}` === "34,102,204";
              const columns = new Set();
              for (let at = 0; at < data.length; at += 4) {
                if (blue(at)) columns.add((at / 4) % width);
              }
              return columns.size / width;
            }"""
        )
        # The line of 10 s of the 300 s, in a chart with an axis on its left.
        assert 0.015 < drawn < 0.06


def test_errors_and_violations_of_the_policy_are_found(browser: Browser, url: str) -> None:
    with (
        pytest.raises(AssertionError, match=r"script-src-elem inline"),
        opened(browser, url) as page,
    ):
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: '1'}))"
        )


def test_the_policy_forbids_requests(browser: Browser, url: str) -> None:
    with pytest.raises(AssertionError, match="connect-src"), opened(browser, url) as page:
        page.evaluate("fetch('http://127.0.0.1:1/').catch(() => 0)")


def test_pointing_at_a_chart_shows_the_values_of_its_classes(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        tip = _hover(page, "goodput", 0.41)
        assert tip.is_visible()
        # 300 seconds in intervals of 5: 0.41 of the width is in the 25th.
        text = tip.inner_text().split()
        assert text[:3] == ["2:00", "–", "2:05"]
        expected = page.evaluate(
            """(at) => JSON.parse(document.getElementById("data").textContent).figures
               .find((figure) => figure.name === "goodput").series.map((one) => one.values[at])""",
            24,
        )
        shown = [float(word.removesuffix("/s")) for word in text if word.endswith("/s")]
        assert shown == pytest.approx(expected, rel=1e-3)
        bounds = _hover(page, "so-far", 0.9).inner_text()
        assert bounds.count("–") == 2, "the bounds of both classes"
        assert not page.locator("#goodput .tip").is_visible()
        assert _hover(page, "ttft", 0.5).inner_text().startswith("p")


def test_a_switch_hides_a_class_in_every_chart(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        switch = page.locator("#switches").get_by_role("button", name="batch")
        assert switch.get_attribute("aria-pressed") == "true"
        switch.click()
        assert switch.get_attribute("aria-pressed") == "false"
        for figure in ("goodput", "attainment", "ttft"):
            shown = _hover(page, figure, 0.3).inner_text()
            assert "interactive" in shown
            assert "batch" not in shown
        page.keyboard.press("Tab")
        switch.focus()
        page.keyboard.press("Enter")
        assert switch.get_attribute("aria-pressed") == "true"
        assert "batch" in _hover(page, "goodput", 0.3).inner_text()


def test_a_key_hides_a_line_of_its_own_chart(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        page.locator("#goodput").get_by_role("button", name="judged").click()
        assert "judged" not in _hover(page, "goodput", 0.3).inner_text()
        assert "offered" in _hover(page, "rates", 0.3).inner_text()


def test_dragging_zooms_all_charts_over_time_until_reset(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        reset = page.get_by_role("button", name="Reset zoom")
        assert reset.count() == 0
        _drag(page, "goodput", 0.2, 0.4)
        assert _hover(page, "rates", 0.02).inner_text().startswith("1:00"), "from 60 s"
        assert _hover(page, "misses", 0.98).inner_text().startswith(("1:50", "1:55")), "to 120 s"
        assert _hover(page, "ttft", 0.999).inner_text().startswith("p99.9"), "is not over time"
        reset.click()
        assert reset.count() == 0
        assert _hover(page, "rates", 0.02).inner_text().startswith("0:05")
        _drag(page, "ttft", 0.5, 0.9)
        area = page.locator("#ttft .u-over")
        area.dblclick()
        assert reset.count() == 0
        assert _hover(page, "ttft", 0.001).inner_text().startswith("p0")


@pytest.mark.parametrize("width", [390, 320])
def test_a_phone_needs_no_horizontal_scrolling(
    browser: Browser, url: str, hostile_url: str, width: int
) -> None:
    for address in (url, hostile_url):
        with opened(browser, address, viewport={"width": width, "height": 700}) as page:
            assert page.evaluate("document.documentElement.scrollWidth") == width
            widths = page.locator("figure .uplot").evaluate_all(
                "all => all.map((one) => one.getBoundingClientRect().right)"
            )
            assert max(widths) <= width


def test_charts_follow_the_width_of_the_window(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        page.set_viewport_size({"width": 420, "height": 800})
        wait_until(
            page,
            "() => [...document.querySelectorAll('.uplot')].every((one) => one.clientWidth < 420)",
        )
        assert page.evaluate("document.documentElement.scrollWidth") == 420


# The ratio of WCAG 2 between each text and the nearest background behind it.
_CONTRASTS = """() => {
  const parse = (text) => text.match(/[0-9.]+/g).map(Number);
  const luminance = (rgb) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.getClientRects().length) continue;
    let behind = element;
    while (behind && parse(getComputedStyle(behind).backgroundColor)[3] === 0) {
      behind = behind.parentElement;
    }
    const style = getComputedStyle(element);
    const ink = element.closest("svg") ? style.fill : style.color;
    const levels = [parse(ink), parse(getComputedStyle(behind || document.body).backgroundColor)]
      .map((colour) => luminance(colour.slice(0, 3)));
    const ratio = (Math.max(...levels) + 0.05) / (Math.min(...levels) + 0.05);
    found.push([ratio, node.data.trim().slice(0, 40)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(browser: Browser, url: str, scheme: str) -> None:
    with opened(browser, url, color_scheme=scheme) as page:
        _hover(page, "goodput", 0.4)
        contrasts: list[Any] = page.evaluate(_CONTRASTS)
        assert len(contrasts) > 300
        assert [text for ratio, text in contrasts if ratio < 4.5] == []
        ink = page.evaluate("getComputedStyle(document.body).color")
        assert (ink == "rgb(230, 234, 240)") == (scheme == "dark")


def test_the_charts_change_colours_with_the_scheme_and_are_light_on_paper(
    browser: Browser, url: str
) -> None:
    colour = """() => {
      const canvas = document.querySelector("#in-flight canvas");
      const { width, height } = canvas;
      // Chromium warns of many reads from a canvas that does not announce them.
      const copy = Object.assign(document.createElement("canvas"), { width, height });
      const context = copy.getContext("2d", { willReadFrequently: true });
      context.drawImage(canvas, 0, 0);
      const { data } = context.getImageData(0, 0, width, height);
      const counts = new Map();
      for (let at = 0; at < data.length; at += 4) {
        if (data[at + 3] < 255 || data[at + 2] < data[at] + 60) continue;  // blue: the line
        const key = [...data.slice(at, at + 3)].join();
        counts.set(key, (counts.get(key) || 0) + 1);
      }
      return [...counts].sort((a, b) => b[1] - a[1])[0][0];
    }"""
    with opened(browser, url) as page:
        light = page.evaluate(colour)
        page.emulate_media(color_scheme="dark")
        wait_until(page, f"({colour})() !== '{light}'")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate(colour) == light
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate(colour) != light
        assert len(page.pdf()) > 50_000


def test_hostile_names_are_shown_as_text(browser: Browser, hostile_url: str) -> None:
    with opened(browser, hostile_url) as page:
        assert page.evaluate("window.hacked") is None
        shown = HOSTILE.replace("\u2028", r"\u2028")
        assert page.locator("#switches button span").first.text_content() == shown
        assert "onerror" in _hover(page, "goodput", 0.05).inner_text()
        assert page.locator("img").count() == 0


def test_without_scripts_the_tables_remain(browser: Browser, url: str) -> None:
    with opened(browser, url, java_script_enabled=False) as page:
        assert page.get_by_text("The charts need JavaScript").is_visible()
        assert not page.locator("figure").first.is_visible()
        for section in ("#latency", "#outcomes", "#slowest"):
            assert page.locator(f"{section} table").first.is_visible()
        page.get_by_text("The values as a table").click()
        assert page.locator("#time table tbody tr").count() == 60
        assert page.locator("#time table").is_visible()
