"""Shares of `slo` in the bounds, and the rule by which they are judged."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from benchmarks.against_bounds import Shares, main

SHARES = Shares(
    mix="uniform",
    factor=1.2,
    offered=150,
    bound=100,
    schedule=98,
    informed=95,
    chosen=97,
    known=96,
    hidden=91,
    alone={"a": 60, "b": 50},
    groups={"all, third 1": {"offered": 150}},
)


@pytest.mark.parametrize(
    ("schedule", "reference", "hidden_reference"),
    [(98, 100, 95), (95, 100, 95), (94, 94, 94)],
    ids=["near", "at the limit", "loose bound"],
)
def test_a_schedule_far_below_the_bound_is_the_reference(
    schedule: float, reference: float, hidden_reference: float
) -> None:
    one = replace(SHARES, schedule=schedule, chosen=90, known=90)
    assert one.reference == reference
    assert one.hidden_reference == hidden_reference


def test_a_run_of_slo_with_some_of_the_requests_is_a_schedule_too() -> None:
    poor = replace(SHARES, schedule=80, chosen=78, known=82)
    assert poor.reference == 82
    assert replace(poor, alone={"a": 90, "b": 30}).reference == 90
    assert replace(poor, alone={"a": 97, "b": 30}).reference == poor.bound


@pytest.mark.parametrize(
    ("factor", "known", "hidden", "missed"),
    [
        (1.2, 95, 91, False),
        (1.2, 94, 91, True),
        (1.2, 95, 90, True),
        (2, 90, 86, False),
        (2, 89, 86, True),
        (2, 90, 85, True),
    ],
)
def test_the_aim_is_lower_above_the_knee(
    factor: float, known: float, hidden: float, missed: bool
) -> None:
    assert replace(SHARES, factor=factor, known=known, hidden=hidden).missed == missed


def test_nothing_is_missed_where_nothing_can_be_served() -> None:
    none = replace(SHARES, bound=0, schedule=0, informed=0, chosen=0, known=0, hidden=0)
    assert (none.known_share, none.hidden_share, none.missed) == (1, 1, False)


def test_seeds_add_up_by_group() -> None:
    other = replace(SHARES, known=50, alone={"c": 4}, groups={"all, third 2": {"offered": 7}})
    both = SHARES.plus(other).plus(SHARES)
    assert both.known == 242
    assert both.alone == {"a": 120, "b": 100, "c": 4}
    assert both.groups == {"all, third 1": {"offered": 300}, "all, third 2": {"offered": 7}}


def test_the_command_compares_kept_requests_with_bounds_of_the_same_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--mixes two-classes --factors 2 --seeds 1 --rounds 6 --jobs 1 --json"
    code = main(options.split())
    (row,) = json.loads(capsys.readouterr().out)
    assert row["known"] <= row["bound"] <= row["offered"]
    assert row["informed"] <= row["bound"] + 1e-6
    assert row["alone"] == {"interactive": pytest.approx(row["known"], rel=0.05)}
    assert row["chosen"] <= row["schedule"] <= row["bound"]
    assert {name.partition(",")[0] for name in row["groups"]} == {"interactive"}
    counts = row["groups"].values()
    assert sum(one["offered"] for one in counts) == row["offered"]
    assert sum(one.get("schedule", 0) for one in counts) == row["schedule"]
    for lengths in ("known", "hidden"):
        assert sum(one.get(f"{lengths} kept", 0) for one in counts) == row[lengths]
        fates = sum(
            count for one in counts for name, count in one.items() if name.startswith(lengths)
        )
        assert fates == row["offered"]
    assert code == (min(row["known_share"], row["hidden_share"]) < row["aim"])
