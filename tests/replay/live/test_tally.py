"""A live run that has ended has the figures of its finished report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from tests.replay.conftest import write_run
from tests.replay.live.builders import make_progress, make_tally, make_window

from goodput_core.slo.record import Outcome
from goodput_core.text import printable
from goodput_core.units import NS_PER_S
from goodput_replay.live.messages import OBSERVED, Begin, End
from goodput_replay.live.page import LivePage
from goodput_replay.live.summary import summarise_so_far
from goodput_replay.live.tally import MAX_CLASSES, LiveTally
from goodput_replay.report.timeline import cut_timeline
from goodput_replay.runs.columns import ColumnParts

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028"


def test_the_figures_at_the_end_are_those_of_the_finished_run(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    finished = write_run(tmp_path, synthetic_run.info, synthetic_run.records, force=True)
    live = summarise_so_far(
        make_tally(synthetic_run).so_far(make_progress(synthetic_run)), synthetic_run.info
    )
    assert live.verdict == finished.verdict
    for mine, its in zip((*live.classes, live.overall), (*finished.classes, finished.overall),
                         strict=True):  # fmt: skip
        for name in ("good", "total", "attainment", "interval", "outcomes", "misses", "excluded",
                     "unjudged", "verdict", "objective", "goodput_per_s", "offered_per_s",
                     "output_tokens"):  # fmt: skip
            assert getattr(mine, name) == getattr(its, name), name
    for mine, its in zip(live.classes, finished.classes, strict=True):
        for measure in ("ttft_ms", "ttft_from_send_ms", "tpot_ms", "e2e_ms"):
            found, expected = getattr(mine, measure), getattr(its, measure)
            assert found.count == expected.count
            assert found.p50 == pytest.approx(expected.p50, rel=0.011)
            assert found.p99 == pytest.approx(expected.p99, rel=0.011)
            assert found.max == pytest.approx(expected.max, rel=1e-6)
    assert finished.validity.lag_ms is not None
    assert live.validity.lag_ms is not None
    assert live.validity.lag_ms.p99 == pytest.approx(finished.validity.lag_ms.p99, rel=0.011)


def test_the_timeline_at_the_end_is_that_of_the_finished_run(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    write_run(tmp_path, synthetic_run.info, synthetic_run.records, force=True)
    expected = cut_timeline(
        ColumnParts(tmp_path), ("interactive", "batch"), start_s=0, length_s=300
    )
    found = make_tally(synthetic_run).timeline(make_progress(synthetic_run))
    for name in ("edges_s", "offered", "served", "lag_max_ms"):
        assert np.allclose(getattr(found, name), getattr(expected, name), equal_nan=True), name
    assert list(found.misses) == list(expected.misses)
    for mine, its in zip(found.classes, expected.classes, strict=True):
        assert mine.good.tolist() == its.good.tolist()
        assert mine.total.tolist() == its.total.tolist()


@pytest.mark.parametrize(
    ("now_s", "edges_s"), [(62, [55, 62]), (62.5, [60, 62.5])], ids=["a rest", "half an interval"]
)
def test_the_timeline_ends_at_the_present(
    synthetic_run: SyntheticRun, now_s: float, edges_s: list[float]
) -> None:
    tally = LiveTally(make_window(synthetic_run))
    for record in synthetic_run.records:
        if record.end_ns is not None and record.end_ns < now_s * NS_PER_S:
            tally.add(record)
    progress = make_progress(synthetic_run, now_s, in_flight=7)
    tally.sample(progress)
    timeline = tally.timeline(progress)
    assert timeline.edges_s[-2:].tolist() == edges_s
    assert timeline.in_flight.tolist() == [0] * (len(timeline.widths_s) - 1) + [7]
    assert timeline.served.sum() == tally.so_far(progress).evidence.overall.outcomes[Outcome.OK]
    verdict = tally.so_far(progress).verdict
    assert "so far" not in verdict.sentence
    assert tally.so_far(progress).evidence.window_ns == now_s * NS_PER_S


def test_memory_is_bounded_for_many_classes_and_errors(synthetic_run: SyntheticRun) -> None:
    tally = LiveTally(make_window(synthetic_run))
    failed = next(r for r in synthetic_run.records if r.detail)
    for index in range(1000):
        tally.add(replace(failed, slo_class=f"class-{index}", detail=f"error {index}"))
    so_far = tally.so_far(make_progress(synthetic_run))
    assert len(so_far.evidence.counts) == MAX_CLASSES + 1
    assert so_far.evidence.overall.rows == 1000
    assert sum(count for _, count in so_far.errors) + so_far.other_errors == 1000
    assert len(so_far.errors) == 5


def test_an_update_escapes_hostile_texts_and_fits_in_a_line(synthetic_run: SyntheticRun) -> None:
    tally = LiveTally(make_window(synthetic_run))
    for record in synthetic_run.records[:300]:
        tally.add(replace(record, slo_class=HOSTILE, detail=HOSTILE))
    page = LivePage(tally, synthetic_run.info, lambda: make_progress(synthetic_run, 100))
    update = page.update()
    assert b"\n" not in update
    decoded = msgspec.json.decode(update)
    assert set(decoded["parts"]) == {
        "progress", "verdict", "classes", "validity", "quantiles", "outcomes",
    }  # fmt: skip
    html = "".join(decoded["parts"].values())
    assert "onerror" in html
    assert "<img" not in html
    assert decoded["data"]["groups"] == ["interactive", "batch", printable(HOSTILE)]
    assert "</script><img" not in page.render()


def test_a_page_shows_overrides_of_the_text_direction_as_escapes(
    synthetic_run: SyntheticRun,
) -> None:
    tally = LiveTally(make_window(synthetic_run))
    for record in synthetic_run.records[:300]:
        tally.add(replace(record, slo_class="\u202eevil", detail="a\u2066b"))
    html = LivePage(tally, synthetic_run.info, lambda: make_progress(synthetic_run, 100)).render()
    texts = html.partition("<body")[2].partition("<script")[0]
    assert r"\u202eevil" in texts
    assert not {"\u202e", "\u2066"} & set(texts)


def test_an_update_of_a_day_is_small_and_quick(synthetic_run: SyntheticRun) -> None:
    length_ns = 86_400 * NS_PER_S
    tally = LiveTally(replace(make_window(synthetic_run), length_ns=length_ns))
    for index, record in enumerate(synthetic_run.records):
        tally.add(replace(record, scheduled_ns=index * 30 * NS_PER_S))
    progress = replace(make_progress(synthetic_run), elapsed_ns=length_ns)
    info = replace(synthetic_run.info, window_ns=length_ns)
    assert len(LivePage(tally, info, lambda: progress).update()) < 100_000


async def test_messages_arrive_as_they_were_sent(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    import asyncio

    records = [(record, index % 2 == 0) for index, record in enumerate(synthetic_run.records[:64])]
    begin = Begin(window=make_window(synthetic_run), info=synthetic_run.info)
    progress, end = make_progress(synthetic_run), End(folder=tmp_path)
    pipe = asyncio.StreamReader(limit=1 << 20)
    sent = (
        OBSERVED.encode(begin),
        OBSERVED.encode_records(records),
        OBSERVED.encode(progress),
        OBSERVED.encode(end),
    )
    pipe.feed_data(b"".join(sent) + sent[1][:40])
    pipe.feed_eof()
    found = [message async for message in _messages(pipe)]
    assert found[0] == begin
    received = found[1]
    assert isinstance(received, list)
    assert [(replace(r, gaps_us=tuple(r.gaps_us)), warmup) for r, warmup in received] == records
    assert found[2:] == [progress, end], "a frame that was cut off is not a message"


async def _messages(pipe: asyncio.StreamReader):  # type: ignore[no-untyped-def]
    while (message := await OBSERVED.read(pipe)) is not None:
        yield message
