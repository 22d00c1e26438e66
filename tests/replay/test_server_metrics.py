"""The server's metrics of a run: their file, its export, and their charts."""

from __future__ import annotations

import csv
import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from tests.replay.conftest import write_run
from tests.replay.live.builders import make_progress, make_tally

from goodput_core.dispatch import run_command
from goodput_core.errors import InputError
from goodput_core.units import NS_PER_S
from goodput_replay.live.page import LivePage
from goodput_replay.report.run_report import render
from goodput_replay.report.server_figures import server_figures
from goodput_replay.runs.folder import RunWriter
from goodput_replay.runs.server_metrics import (
    SERVER_METRICS_SCHEMA,
    ServerMetrics,
    read_server_metrics,
    write_server_metrics,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun

    from goodput_replay.report.figures import Figure

FILE = "server_metrics.parquet"
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028"


def _metrics(*, seconds: int = 300, fail: range = range(0)) -> ServerMetrics:
    """Two sources, scraped every two seconds; the first fails for a while."""
    metrics = ServerMetrics(every_ns=2 * NS_PER_S, metrics=("mine", "work_total"))
    for at_s in range(0, seconds + 2, 2):
        late_ns = at_s * NS_PER_S + 3_000_000
        if at_s in fail:
            metrics.add_failure("http://a:1/metrics", late_ns, "responded with status 503")
        else:
            values = {"running_requests": float(at_s % 10), "mine": -1.0}
            if at_s:
                values["prompt_tokens"] = float(at_s)
            metrics.add("http://a:1/metrics", late_ns, values)
        metrics.add("chat-0", late_ns, {"running_requests": 1.0, "kv_usage": 0.5})
    return metrics


def _drawn(metrics: ServerMetrics, **window: float) -> dict[str, Figure]:
    window = {"start_s": 0.0, "length_s": 300.0, **window}
    return {one.title: one for one in server_figures(metrics, **window)}


def _data(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    decoded: dict[str, Any] = json.loads(found[1])
    return decoded


def test_a_file_has_what_was_written(tmp_path: Path) -> None:
    written = _metrics(fail=range(10, 20))
    assert not write_server_metrics(tmp_path / FILE, written)
    found = read_server_metrics(tmp_path)
    assert found is not None
    assert found.table().equals(written.table())
    assert found.table().schema.equals(SERVER_METRICS_SCHEMA)
    assert (found.every_ns, found.metrics) == (written.every_ns, written.metrics)
    assert found.sources == written.sources
    assert found.sources["http://a:1/metrics"].failed == 5


@pytest.mark.parametrize("where", ["full", "missing"])
def test_a_file_that_cannot_be_written_is_a_warning_and_absent(tiny_disk: Path, where: str) -> None:
    (tiny_disk / "full").mkdir()
    with (tiny_disk / "neighbour").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    path = tiny_disk / where / FILE
    why = "No space left on device" if where == "full" else "No such file or directory"
    expected = f"warning: {path}: the server's metrics were not written ({why})"
    assert write_server_metrics(path, _metrics()) == expected
    assert not path.exists()


def test_a_run_that_did_not_scrape_has_no_file(tmp_path: Path) -> None:
    assert read_server_metrics(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 1000], ids=["empty", "cut", "other"])
def test_a_file_that_cannot_be_read_is_a_sentence_in_the_report(
    content: bytes, tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    write_run(tmp_path, synthetic_run.info, synthetic_run.records, force=True)
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(InputError, match="not the server metrics of a run; remove the file"):
        read_server_metrics(tmp_path)
    assert "not the server metrics of a run; remove the file" in render(tmp_path)


def test_a_file_of_another_program_is_rejected(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"source": ["x"]}), tmp_path / FILE)
    with pytest.raises(InputError, match="not the server metrics of a run"):
        read_server_metrics(tmp_path)


def test_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goodput_replay.runs.server_metrics._MAX_VALUES", 100)
    metrics = _metrics()
    assert metrics.table().num_rows == 100
    assert metrics.sources["chat-0"].scrapes == 151


def test_an_earlier_file_does_not_outlive_its_run(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    (tmp_path / FILE).write_bytes(b"of an earlier run")
    write_run(tmp_path, synthetic_run.info, synthetic_run.records, force=True)
    assert not (tmp_path / FILE).exists()


def test_the_file_gets_its_name_together_with_the_records(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    folder = tmp_path / "run"
    with RunWriter(folder, slo=synthetic_run.info.slo) as writer:
        write_server_metrics(folder / f"{FILE}.partial", _metrics())
        for record in synthetic_run.records:
            writer.append(record)
        assert read_server_metrics(folder) is None
        writer.finish(synthetic_run.info)
    assert read_server_metrics(folder) is not None
    with RunWriter(tmp_path / "empty", slo=synthetic_run.info.slo):
        write_server_metrics(tmp_path / "empty" / f"{FILE}.partial", _metrics())
    assert not (tmp_path / "empty").exists(), "nothing was recorded"


def test_a_chart_has_a_line_for_each_page_and_a_gap_where_scrapes_failed() -> None:
    drawn = _drawn(_metrics(fail=range(100, 120)))["Running in the server"]
    chat, page = drawn.series
    assert (chat.label, page.label) == ("chat-0", "a:1")
    # 300 s in 75 intervals of 4 s, and the end of the last one.
    assert (drawn.x[0], drawn.x[1], drawn.x[-1], len(drawn.x)) == (0, 4, 300, 76)
    assert all(len(one.values) == 76 for one in drawn.series)
    assert set(chat.values) == {1}
    gap = [x for x, value in zip(drawn.x, page.values, strict=True) if value is None]
    assert gap == list(range(100, 120, 4))
    assert page.values[:3] == [2, 6, 8], "the maximum of each interval"


def test_a_rate_is_drawn_in_the_interval_before_its_scrape() -> None:
    drawn = _drawn(_metrics(seconds=20), length_s=20.0)["Prompt tokens"]
    assert list(drawn.x) == list(range(0, 22, 2))
    assert drawn.series[0].values == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 20]


def test_a_window_after_the_warm_up_begins_at_its_start() -> None:
    drawn = _drawn(_metrics(), start_s=100.0, length_s=20.0)["Running in the server"]
    assert drawn.series[1].values == [0, 2, 4, 6, 8, 0, 2, 4, 6, 8, 8]


def test_charts_of_a_day_are_small() -> None:
    metrics = _metrics(seconds=86_400)
    drawn = _drawn(metrics, length_s=86_400.0)["Running in the server"]
    assert len(drawn.x) <= 122
    assert [one.values[5] for one in drawn.series] == [1, 8]


def test_the_report_has_the_charts_and_their_values(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    write_run(tmp_path, synthetic_run.info, synthetic_run.records, force=True)
    without = render(tmp_path)
    assert 'id="server"' not in without
    write_server_metrics(tmp_path / FILE, _metrics(fail=range(100, 120)))
    html = render(tmp_path)
    titles = [one["title"] for one in _data(html)["figures"]]
    assert [t for t in titles if t not in [o["title"] for o in _data(without)["figures"]]] == [
        "Running in the server", "KV memory of the server", "Prompt tokens", "mine",
    ]  # fmt: skip
    text = re.sub(r"<[^>]+>", " ", html)
    assert "10 of 151 scrapes failed; the last: responded with status 503" in text
    assert "Running in the server: chat-0" in text
    assert len(html) < len(without) + 40_000
    assert _verdict(html) == _verdict(without)


def _verdict(html: str) -> str:
    return html.partition('<section id="verdict"')[2].partition("</section>")[0]


def test_texts_of_servers_are_escaped(tmp_path: Path, synthetic_run: SyntheticRun) -> None:
    metrics = ServerMetrics(every_ns=2 * NS_PER_S)
    for at_s in range(10):
        metrics.add(HOSTILE, at_s * NS_PER_S, {"running_requests": 1.0})
    metrics.add_failure(HOSTILE, 10 * NS_PER_S, HOSTILE)
    write_run(tmp_path, synthetic_run.info, synthetic_run.records, force=True)
    write_server_metrics(tmp_path / FILE, metrics)
    html = render(tmp_path)
    assert "onerror" in html
    assert "<img" not in html
    shown = HOSTILE.replace("\u2028", r"\u2028")
    assert any(line["label"] == shown for one in _data(html)["figures"] for line in one["series"])


def test_the_live_page_has_the_charts_from_its_start(synthetic_run: SyntheticRun) -> None:
    metrics = ServerMetrics(every_ns=2 * NS_PER_S)
    page = LivePage(
        make_tally(synthetic_run), synthetic_run.info, lambda: make_progress(synthetic_run), metrics
    )
    assert 'id="server-0"' in page.render(), "a chart without values yet"
    metrics.add("chat-0", NS_PER_S, {"running_requests": 4.0})
    metrics.add_failure("b", NS_PER_S, "not reachable")
    update = json.loads(page.update())
    (running,) = [one for one in update["data"]["figures"] if one["name"] == "server-0"]
    assert running["series"][0]["values"][0] == 4
    assert "b: 1 of 1 scrapes failed; the last: not reachable" in update["parts"]["scrapes"]


def test_an_export_has_the_rows_of_the_file(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    metrics = _metrics(seconds=4)
    write_server_metrics(tmp_path / FILE, metrics)
    assert run_command(["replay", "export", str(tmp_path), "--server-metrics"]) == 0
    rows = list(csv.DictReader(capsysbinary.readouterr().out.decode().splitlines()))
    assert len(rows) == metrics.table().num_rows
    assert rows[0] == {"source": "http://a:1/metrics", "series": "up", "at_ns": "3000000",
                       "value": "1"}  # fmt: skip


def test_an_export_of_a_run_without_metrics_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    assert (
        run_command(["replay", "export", str(tmp_path), "--server-metrics", "-o", str(out)]) == 64
    )
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: has no metrics of the server; run the replay with --scrape URL\n"
    )
