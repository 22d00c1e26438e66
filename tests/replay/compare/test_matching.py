"""Requests of two runs, matched by id."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.replay.compare.recorded import CHAT, chat_run
from tests.replay.conftest import INFO

from goodput_core.slo.targets import SLOClass
from goodput_replay.compare.pairing import match
from goodput_replay.compare.runs import difference_between, load_run
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    from pathlib import Path


def test_changed_requests_are_counted_in_the_second_of_their_arrival(tmp_path: Path) -> None:
    old = load_run(chat_run(tmp_path / "old", missed={5, 25}))
    new = load_run(chat_run(tmp_path / "new", missed={25, 31, 32}))
    counts = match(old, new).counts("chat")
    assert [s for s, n in enumerate(counts.gained) if n] == [0]
    assert [(s, n) for s, n in enumerate(counts.lost) if n] == [(3, 2)]
    assert list(counts.total) == [10] * 60


def test_requests_of_one_run_only_are_dropped_and_counted(tmp_path: Path) -> None:
    old = load_run(chat_run(tmp_path / "old", absent={1}, cancelled={2, 3}))
    new = load_run(chat_run(tmp_path / "new", absent={7, 8}, cancelled={3, 4}))
    matching = match(old, new)
    assert (matching.only_baseline, matching.only_candidate) == (2, 1)
    assert matching.not_judged == 3
    assert matching.dropped == 6
    assert sum(matching.counts("chat").total) == 600 - 3 - 3
    assert not matching.changed


@settings(max_examples=examples(15), deadline=None)
@given(
    old=st.sets(st.integers(0, 59), max_size=20),
    new=st.sets(st.integers(0, 59), max_size=20),
)
def test_gained_and_lost_requests_are_the_differences_of_the_sets(
    old: set[int], new: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    runs = [
        load_run(chat_run(folder / name, missed=missed, seconds=6))
        for name, missed in (("old", old), ("new", new))
    ]
    counts = match(*runs).counts("chat")
    assert sum(counts.gained) == len(old - new)
    assert sum(counts.lost) == len(new - old)


_OTHER_SLO = SLOClasses(
    classes=(SLOClass(name="chat", ttft_ms=400, tpot_ms=50, objective=Fraction("0.99")),),
    default="chat",
)
_TRACE = INFO.trace


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trace": replace(_TRACE, digest="sha256:" + "00" * 32)}, "the trace differs"),
        ({"trace": replace(_TRACE, transforms=("--speed 2",))}, "the trace selection differs"),
        ({"slo": _OTHER_SLO}, "ttft_ms of chat differs: 500 and 400"),
        ({"slo": replace(CHAT, outage_s=10)}, "slo.outageSeconds differs: 0 and 10"),
        ({"warmup_rows": 5}, "--warmup differs: 0 and 5"),
        ({"seconds": 61}, "the length of the window differs"),
    ],
    ids=["trace", "transforms", "targets", "outage", "warm-up", "window"],
)
def test_runs_of_different_requests_or_targets_cannot_be_paired(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    old = load_run(chat_run(tmp_path / "old"))
    new = load_run(chat_run(tmp_path / "new", **changes))
    assert difference_between(old.summary, new.summary).startswith(text)


def test_the_name_of_the_trace_file_and_the_salt_do_not_matter(tmp_path: Path) -> None:
    old = load_run(chat_run(tmp_path / "old"))
    new = load_run(
        chat_run(
            tmp_path / "new",
            trace=replace(_TRACE, name="copy.parquet"),
            run=replace(INFO.run, salt="other", seed=99),
        )
    )
    assert difference_between(old.summary, new.summary) == ""


def test_the_seed_matters_where_rows_are_sampled(tmp_path: Path) -> None:
    scaled = replace(_TRACE, transforms=("--rate-scale 2",))
    old = load_run(chat_run(tmp_path / "old", trace=scaled))
    other = replace(INFO.run, seed=99)
    new = load_run(chat_run(tmp_path / "new", trace=scaled, run=other))
    assert difference_between(old.summary, new.summary) == "--seed differs: 7 and 99"
