"""The report of a run is one page with all results, of bounded size."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from tests.replay.conftest import write_run

from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import SLOClass, Targets
from goodput_replay.report.run_report import render, write_report
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun

    from goodput_replay.runs.summary_builder import RunInfo

HOSTILE = "\"><script>alert('1')</script><img src=https://evil.example/x onerror=alert(1)>&amp;"
_SECTIONS = (
    "verdict",
    "classes",
    "validity",
    "time",
    "latency",
    "outcomes",
    "slowest",
    "inputs",
)
_VOID = {"meta", "link", "br", "img", "input", "hr"}


class _Page(HTMLParser):
    """Tags with their attributes, ids, text and outline of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.outline: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)
        if tag in {"section", "figure", "article", "table"}:
            name = dict(attrs).get("id") or tag
            self.outline.append(f"{'  ' * self._open.count('section')}{name}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self._open):
            self.text += data

    def values(self, *names: str) -> list[str]:
        return [v for _, attrs in self.tags for n, v in attrs.items() if n in names and v]


def _make(folder: Path, info: RunInfo, records: Sequence[RequestRecord]) -> str:
    write_run(folder, info, records, force=True)
    return render(folder)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory, synthetic_run: SyntheticRun) -> str:
    return _make(tmp_path_factory.mktemp("page"), synthetic_run.info, synthetic_run.records)


def test_the_page_has_all_sections_and_unique_ids(html: str) -> None:
    page = _Page(html)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert set(_SECTIONS) <= set(ids)


@pytest.mark.golden
def test_the_outline_of_the_page_does_not_change(
    html: str, golden: Callable[[str, str], None]
) -> None:
    golden("outline.txt", "\n".join(_Page(html).outline) + "\n")


def _figures(html: str) -> dict[str, Any]:
    """Return the figures of the JSON block by name."""
    return {figure["name"]: figure for figure in _data(html)["figures"]}


def _data(html: str) -> Any:
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return json.loads(block)


def test_every_figure_has_a_place_on_the_page_and_values(html: str) -> None:
    figures = _figures(html)
    assert list(figures) == [
        "so-far", "attainment", "goodput", "misses", "rates", "in-flight", "lag",
        "ttft", "tpot", "tbt", "e2e",
    ]  # fmt: skip
    assert set(figures) <= set(_Page(html).values("id"))
    for figure in figures.values():
        assert figure["x"] == sorted(figure["x"])
        for one in figure["series"]:
            lengths = {len(figure["x"]), *map(len, filter(None, (one["lower"], one["upper"])))}
            assert {len(one["values"])} == lengths, figure["name"]


def test_the_last_attainment_so_far_is_that_of_the_summary(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    info = replace(synthetic_run.info, slo=replace(synthetic_run.info.slo, outage_s=2))
    figure = _figures(_make(tmp_path, info, synthetic_run.records))["so-far"]
    summary = read_summary(tmp_path)
    assert summary.outage_s == 2
    for one, expected in zip(figure["series"], summary.classes, strict=True):
        assert expected.interval is not None
        last = (one["values"][-1], one["lower"][-1], one["upper"][-1])
        figures = (expected.attainment, expected.interval.lower, expected.interval.upper)
        assert last == pytest.approx(figures, abs=2e-6)


def test_targets_objectives_and_the_lag_limit_are_marked(html: str) -> None:
    figures = _figures(html)
    marks = {
        name: [(mark["label"], mark["group"]) for mark in figure["marks"]]
        for name, figure in figures.items()
    }
    assert marks["attainment"] == marks["so-far"] == [("95%", 0), ("90%", 1)]
    assert marks["ttft"] == [("500 ms", 0), ("30 s", 1)]
    assert marks["tbt"] == [("400 ms", 1)]
    assert marks["lag"] == [("25 ms", None)]
    assert marks["goodput"] == []


def test_colours_come_from_the_style_sheet_so_that_dark_mode_works(html: str) -> None:
    assert "prefers-color-scheme: dark" in html
    for used in set(re.findall(r"var\((--[a-z0-9-]+)\)", html)):
        assert f"{used}:" in html or used == "--tone", f"{used} is never set"
    for figure in _figures(html).values():
        for one in (*figure["series"], *figure["marks"]):
            assert f"--{one['colour']}:" in html


def test_the_first_screen_shows_verdict_attainment_and_validity(html: str) -> None:
    text = " ".join(_Page(html).text.split())
    top = text[: text.index("Over time")]
    for expected in ("PASS", "1,915 of 1,972", "97.10%", "TTFT ≤ 500 ms", "synthetic trace"):
        assert expected in top
    for expected in ("The client kept up", "1.316 ms", "of 25 ms allowed", "0 of 2,629"):
        assert expected in top


def test_the_same_run_gives_the_same_bytes(
    tmp_path: Path, html: str, synthetic_run: SyntheticRun
) -> None:
    assert _make(tmp_path, synthetic_run.info, synthetic_run.records) == html


def test_hostile_text_is_escaped(tmp_path: Path, synthetic_run: SyntheticRun) -> None:
    base = synthetic_run.info
    info = replace(
        base,
        trace=replace(base.trace, name=HOSTILE, source=HOSTILE, licence=HOSTILE, clock=HOSTILE),
        target=replace(base.target, service=HOSTILE, model=HOSTILE, url=HOSTILE),
        run=replace(
            base.run,
            command=("replay", HOSTILE),
            salt=HOSTILE,
            started_at=HOSTILE,
            complete=False,
            abort_reason=HOSTILE,
        ),
        slo=SLOClasses(classes=(SLOClass(name=HOSTILE, ttft_ms=1, tpot_ms=1),), default=HOSTILE),
    )
    records = [
        replace(r, request_id=HOSTILE, slo_class=HOSTILE, replica=HOSTILE, detail=HOSTILE)
        for r in synthetic_run.records[:50]
    ]
    html = _make(tmp_path, info, records)
    page = _Page(html)
    assert [tag for tag, _ in page.tags if tag in {"script", "img"}] == ["script"] * 3
    assert _data(html)["groups"] == [HOSTILE]
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert page.text.count("onerror=alert(1)") > 10
    assert all("evil" not in value for value in page.values("src", "href", "style"))


def test_an_hour_of_traffic_makes_a_page_of_less_than_two_megabytes(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    hour_ns = 3600 * 10**9
    records = [
        replace(
            synthetic_run.records[index % len(synthetic_run.records)],
            request_id=f"r{index}",
            scheduled_ns=index * (hour_ns // 20_000),
            sent_ns=index * (hour_ns // 20_000),
            first_token_ns=index * (hour_ns // 20_000) + 10**8 + index,
            last_token_ns=index * (hour_ns // 20_000) + 10**9,
            end_ns=index * (hour_ns // 20_000) + 10**9,
            gaps_us=(1,),
        )
        for index in range(20_000)
    ]
    info = replace(synthetic_run.info, window_ns=hour_ns, rows_planned=len(records))
    assert len(_make(tmp_path, info, records)) < 256 << 10


def test_of_many_classes_those_with_an_objective_and_the_most_requests_are_shown(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    names = [f"tenant-{index}" for index in range(500)]
    records = [
        replace(r, slo_class=names[min(index, len(names)) - 1 if index < 600 else 7])
        for index, r in enumerate(synthetic_run.records[:900])
    ]
    objective = SLOClass(name="rare", ttft_ms=500, tpot_ms=50, objective=Fraction("0.9"))
    info = replace(synthetic_run.info, slo=SLOClasses(classes=(objective,), default="rare"))
    html = _make(tmp_path, info, records)
    groups = _data(html)["groups"]
    assert len(groups) == 24
    assert groups[0] == "rare"
    assert {"tenant-7", "tenant-499"} <= set(groups)
    assert "477 more classes are in summary.json" in _Page(html).text
    assert len(html) < 512 << 10


def _no_requests(run: SyntheticRun) -> tuple[RunInfo, list[RequestRecord]]:
    return replace(run.info.incomplete("interrupted"), rows_planned=0), []


def _no_slo(run: SyntheticRun) -> tuple[RunInfo, list[RequestRecord]]:
    records = [replace(r, slo_class="", targets=Targets()) for r in run.records[:200]]
    return replace(run.info, slo=SLOClasses()), records


def _no_slo_and_no_requests(run: SyntheticRun) -> tuple[RunInfo, list[RequestRecord]]:
    return replace(run.info, slo=SLOClasses(), rows_planned=0), []


def _all_failed(run: SyntheticRun) -> tuple[RunInfo, list[RequestRecord]]:
    return run.info, [
        RequestRecord(
            request_id=r.request_id,
            slo_class=r.slo_class,
            scheduled_ns=r.scheduled_ns,
            sent_ns=r.sent_ns,
            end_ns=r.end_ns,
            outcome=Outcome.ERROR,
        )
        for r in run.records[:100]
    ]


def _one_request(run: SyntheticRun) -> tuple[RunInfo, list[RequestRecord]]:
    return replace(run.info, rows_planned=1, window_ns=1), list(run.records[:1])


def _one_token(run: SyntheticRun) -> tuple[RunInfo, list[RequestRecord]]:
    return run.info, [
        replace(r, output_tokens=1, gaps_us=(), pinned_output_tokens=1) for r in run.records[:50]
    ]


def _sixteen_classes(run: SyntheticRun) -> tuple[RunInfo, list[RequestRecord]]:
    names = [f"class-{index}-{'x' * 30}" for index in range(16)]
    classes = tuple(SLOClass(name=name, ttft_ms=100, tpot_ms=10) for name in names)
    records = [replace(r, slo_class=names[index % 15]) for index, r in enumerate(run.records[:400])]
    return replace(run.info, slo=SLOClasses(classes=classes, default=names[0])), records


@pytest.mark.parametrize(
    "make",
    [
        _no_requests,
        _no_slo,
        _no_slo_and_no_requests,
        _all_failed,
        _one_request,
        _one_token,
        _sixteen_classes,
    ],
    ids=lambda make: make.__name__.strip("_"),
)
def test_an_unusual_run_has_a_report(
    tmp_path: Path, synthetic_run: SyntheticRun, make: Callable[[SyntheticRun], object]
) -> None:
    made = make(synthetic_run)
    assert isinstance(made, tuple)
    page = _Page(_make(tmp_path, *made))
    assert set(_SECTIONS) <= set(page.values("id"))
    assert "nan" not in page.text.split()


def test_classes_of_an_invalid_run_are_not_judged(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    info = replace(synthetic_run.info, rows_planned=9999)
    page = _Page(_make(tmp_path, info, synthetic_run.records))
    assert "not judged: invalid run" in page.text
    assert not [attrs for _, attrs in page.tags if attrs.get("class") == "tag PASS"]


def test_the_report_can_be_written_elsewhere(tmp_path: Path, synthetic_run: SyntheticRun) -> None:
    html = _make(tmp_path, synthetic_run.info, synthetic_run.records[:50])
    out = tmp_path / "elsewhere.html"
    assert write_report(tmp_path, out) == out
    assert out.read_text() == html
    assert not (tmp_path / "report.html").exists()
