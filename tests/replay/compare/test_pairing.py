"""Requests of two runs are paired by id in any order of the records, and few of them wait."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.replay.conftest import make_run, write_run

from goodput_core.slo.judging import JudgementKind, judge, targets_for
from goodput_core.units import NS_PER_S
from goodput_replay.compare.pairing import MAX_CHANGED, match, pair_requests
from goodput_replay.compare.runs import load_run
from goodput_replay.runs.columns import RunColumns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.replay.conftest import SyntheticRun

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.compare.pairing import Matching

LONG = "a" * 5000
NAMES = st.sampled_from(["", "é", "id\x00", LONG]) | st.integers(0, 60).map(str)


class Parts:
    """Parts of a run with these ids, and the number of passes over them."""

    def __init__(self, ids: Sequence[str], part: int, arrivals_s: Sequence[float]) -> None:
        self.passes = 0
        self._ids = ids
        self._part = part
        self._arrivals_s = arrivals_s

    def __call__(self) -> Iterator[RunColumns]:
        self.passes += 1
        for first in range(0, len(self._ids), self._part):
            ids = self._ids[first : first + self._part]
            times = np.array(self._arrivals_s[first : first + self._part]) * NS_PER_S
            zeros = np.zeros(len(ids), dtype=np.int64)
            yield RunColumns(
                class_names=("chat",),
                class_code=zeros,
                outcome_code=zeros,
                kind_code=zeros,
                reason_code=zeros,
                scheduled_ns=times,
                sent_ns=times,
                first_token_ns=times,
                last_token_ns=times,
                end_ns=times,
                input_tokens=zeros,
                output_tokens=zeros,
                tbt_p99_us=times,
                row=np.arange(first, first + len(ids)),
                ids=pa.array(ids, type=pa.string()),
            )


def pairs_of(baseline: Parts, candidate: Parts, max_waiting: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for before, after in pair_requests(baseline, candidate, max_waiting=max_waiting):
        found += zip(before["row"].tolist(), after["row"].tolist(), strict=True)
    return found


@given(
    first=st.lists(NAMES, unique=True, max_size=60),
    second=st.lists(NAMES, unique=True, max_size=60),
    parts=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    max_waiting=st.integers(0, 40),
    rng=st.randoms(use_true_random=False),
)
def test_every_id_of_both_runs_is_paired_once(
    first: list[str],
    second: list[str],
    parts: tuple[int, int],
    max_waiting: int,
    rng: random.Random,
) -> None:
    old, new = (
        Parts(ids, part, [rng.uniform(0, 100) for _ in ids])
        for ids, part in zip((first, second), parts, strict=True)
    )
    found = pairs_of(old, new, max_waiting)
    expected = [(first.index(name), second.index(name)) for name in first if name in second]
    assert sorted(found) == sorted(expected)


def test_an_id_that_a_run_has_twice_is_paired_once() -> None:
    first = Parts(["a", "a", "b"], 1, [0, 1, 2])
    second = Parts(["b", "a", "a", "a"], 2, [0, 1, 2, 3])
    for max_waiting in (0, 100):
        found = pairs_of(first, second, max_waiting)
        assert [len({pair[side] for pair in found}) for side in (0, 1)] == [len(found)] * 2
        assert (2, 0) in found


@pytest.mark.parametrize(
    ("shuffled_s", "passes"), [(1, 1), (20, 1), (10**6, 8)], ids=["ends", "late ends", "any order"]
)
def test_runs_whose_order_nearly_agrees_are_read_once(shuffled_s: float, passes: int) -> None:
    """Requests end up to some seconds after they begin, at 100/s."""
    count, rng = 20_000, random.Random(1)

    def run() -> Parts:
        order = sorted(range(count), key=lambda i: i / 100 + rng.uniform(0, shuffled_s))
        return Parts([f"row-{i}" for i in order], 500, [i / 100 for i in order])

    first, second = run(), run()
    assert len(pairs_of(first, second, 6000)) == count
    assert first.passes == second.passes
    assert first.passes <= passes
    assert (first.passes > 1) == (passes > 1)


def test_a_short_run_beside_a_long_one_is_read_once() -> None:
    long = Parts([str(i) for i in range(20_000)], 500, [i / 100 for i in range(20_000)])
    short = Parts([str(i) for i in range(2000)], 500, [i / 100 for i in range(2000)])
    assert len(pairs_of(long, short, 3000)) == 2000
    assert len(pairs_of(short, long, 3000)) == 2000
    assert long.passes == short.passes == 2


@pytest.fixture(scope="module")
def run() -> SyntheticRun:
    """Half a minute, with every outcome."""
    return make_run(window_s=30, rate_per_s=12, failures=0.1)


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 2**32), max_waiting=st.sampled_from([0, 30, 1 << 18]))
def test_a_matching_is_that_of_all_records_at_once(
    tmp_path_factory: pytest.TempPathFactory,
    run: SyntheticRun,
    seed: int,
    max_waiting: int,
) -> None:
    """The second run has other latencies and another order, and lacks some of the requests."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("pair")
    records = []
    for record in run.records:
        changed = record
        if record.first_token_ns is not None and rng.random() < 0.3:
            later = rng.choice((-20, 400, 900)) * 1_000_000
            changed = replace(record, first_token_ns=max(0, record.first_token_ns + later))
        if rng.random() < 0.95:
            records.append(changed)
    rng.shuffle(records)
    write_run(folder / "old", run.info, run.records)
    write_run(folder / "new", run.info, records)
    old, new = load_run(folder / "old"), load_run(folder / "new")
    matching = match(old, new, max_waiting=max_waiting)
    _check_matching(matching, run, records)


def _check_matching(matching: Matching, run: SyntheticRun, records: list[RequestRecord]) -> None:
    classes = run.info.slo.by_name()

    def judged(record: RequestRecord) -> tuple[bool, bool, str]:
        judgement = judge(record, targets_for(record, classes))
        reason = judgement.reasons[0] if judgement.reasons else ""
        attained = judgement.kind is JudgementKind.ATTAINED
        return attained or judgement.kind is JudgementKind.MISSED, attained, reason

    before = {r.request_id: (row, r, *judged(r)) for row, r in enumerate(run.records)}
    changes: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
    reasons: dict[bool, Counter[tuple[str, str]]] = {True: Counter(), False: Counter()}
    totals: Counter[tuple[str, int]] = Counter()
    dropped = len(run.records) - len(records)
    for after_row, record in enumerate(records):
        row, old, was_judged, was_good, old_reason = before[record.request_id]
        is_judged, is_good, reason = judged(record)
        if not (was_judged and is_judged):
            dropped += 1
            continue
        totals[old.slo_class, old.scheduled_ns // NS_PER_S] += 1
        if was_good != is_good:
            changes[was_good].append((old.scheduled_ns, after_row, row))
            reasons[was_good][old.slo_class, reason if was_good else old_reason] += 1
    assert matching.dropped == dropped
    for name in ("interactive", "batch"):
        counts = matching.counts(name)
        assert list(counts.total) == [totals[name, second] for second in range(30)]
        for is_lost, by_reason in (
            (True, matching.lost_by_reason[name]),
            (False, matching.gained_by_reason[name]),
        ):
            mine = {why: n for (cls, why), n in reasons[is_lost].items() if cls == name}
            assert by_reason == mine
            # The most frequent first, and of equally frequent ones that of the earliest record.
            assert list(by_reason.values()) == sorted(mine.values(), reverse=True)
            assert list(by_reason) == [why for why, _ in Counter(mine).most_common()]
    expected = [
        (is_lost, row, after_row)
        for is_lost in (True, False)
        for _, after_row, row in sorted(changes[is_lost])
    ]
    listed = [(one.lost, one.baseline_row, one.candidate_row) for one in matching.changed]
    assert listed == expected[:MAX_CHANGED]
