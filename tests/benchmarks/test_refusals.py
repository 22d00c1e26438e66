"""Refused requests that are forced in, obedient clients, and the exit code of the command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import pytest
from benchmarks.comparison.cells import Cell, planned_requests, run_cell
from benchmarks.comparison.design import read_knees
from benchmarks.comparison.forced import (
    ForcedResult,
    RefusedRequest,
    WatchedRun,
    draw,
    refusal_cells,
    serve_forced,
    serve_watched,
)
from benchmarks.comparison.loads import Arrivals, Load, offered
from benchmarks.comparison.retries import Clients, RetryResult, retry_cells, serve_clients
from benchmarks.refusals import main, misses_aim
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_MS
from goodput_engine.scheduler.admission import Rejection
from goodput_replay.emulation.requests import make_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_replay.plan import PlannedRequest

SEED = 101


def cell_of(mix: str, factor: float) -> Cell:
    return refusal_cells(read_knees(), mixes=[mix], factors=[factor])[0]


@lru_cache
def watched(mix: str, factor: float) -> WatchedRun:
    return serve_watched(cell_of(mix, factor), SEED)


# --- forced requests -------------------------------------------------------------------------
def test_a_watched_run_is_the_run_of_the_policy() -> None:
    run, plain = watched("two-classes", 2), run_cell(cell_of("two-classes", 2), "slo", SEED)
    assert len(run.kept) == plain.kept
    assert run.offered == plain.offered
    assert 0 < len(run.refused) < plain.refused


def test_a_forced_request_is_served_and_nothing_before_it_changes() -> None:
    before = watched("chat", 2)
    runs = ((one, serve_watched(one.cell, SEED, forced=one.number)) for one in before.refused[1::3])
    request, after = next((one, run) for one, run in runs if one.number in run.kept)
    assert request.number not in {one.number for one in after.refused}
    earlier = [
        [one for one in run.refused if one.number < request.number] for run in (before, after)
    ]
    assert earlier[0] == earlier[1] != []


def test_a_displaced_request_can_be_forced_in() -> None:
    before = watched("two-classes", 4)
    request = next(one for one in before.refused if one.reason.startswith("displaced"))
    after = serve_watched(request.cell, SEED, forced=request.number)
    assert request.number not in {one.number for one in after.refused}


def test_no_request_is_counted_that_arrives_in_the_last_slack() -> None:
    cell, run = cell_of("chat", 2), watched("chat", 2)
    requests = offered(cell.load, SEED)
    last_ns = max(requests[one.number].arrival_ns for one in run.refused)
    assert last_ns < cell.load.horizon_s * 1e9 * 2 / 3 < requests[-1].arrival_ns
    assert len(run.kept) + len(run.refused) < run.offered


def test_the_effect_of_a_forced_request_adds_up() -> None:
    before = watched("three-classes", 2)
    result = serve_forced(before.refused[0], before.kept)
    assert result.change == sum(result.levels.values()) + result.kept * 1
    assert result.slo_class == "batch"
    assert not result.reason.startswith("unattainable: unattainable")


@pytest.mark.parametrize(
    ("kept", "lost", "levels", "strict", "net"),
    [
        (True, 0, {}, True, True),
        (True, 1, {0: 0.0}, False, True),
        (True, 1, {0: -1.0}, False, False),
        (True, 2, {1: -1.0, 0: 5.0}, False, False),
        (False, 0, {}, False, False),
    ],
    ids=["no-loss", "others-gain-as-much", "a-loss", "a-loss-at-one-level", "late-itself"],
)
def test_a_refusal_was_false_if_the_others_lost_nothing(
    kept: bool, lost: int, levels: Mapping[int, float], strict: bool, net: bool
) -> None:
    result = ForcedResult(
        cell="cell",
        mix="chat",
        factor=1.2,
        known_lengths=True,
        seed=1,
        number=0,
        slo_class="all",
        reason="unattainable",
        kept=kept,
        lost=lost,
        gained=0,
        levels=levels,
        change=0,
    )
    assert (result.false_strict, result.false_net) == (strict, net)


@given(counts=st.lists(st.integers(0, 12), max_size=6), count=st.integers(0, 40))
def test_requests_are_drawn_evenly(counts: list[int], count: int) -> None:
    cell = cell_of("chat", 2)
    urns = [
        [RefusedRequest(cell=cell, seed=urn, number=n, reason="") for n in range(size)]
        for urn, size in enumerate(counts)
    ]
    drawn = draw(urns, count)
    assert len(drawn) == len({(one.seed, one.number) for one in drawn})
    assert len(drawn) == min(count, sum(counts))
    taken = [sum(one.seed == urn for one in drawn) for urn in range(len(urns))]
    most = max(taken, default=0)
    assert all(took >= min(size, most - 1) for took, size in zip(taken, counts, strict=True))
    assert drawn == draw(urns, count)


# --- clients that retry ----------------------------------------------------------------------
def sent(
    waits_s: Mapping[str, int], *, most_retries: int = 4, every_ms: int = 400, count: int = 10
) -> dict[str, int]:
    """Return the send time in ms of each attempt if some attempts are refused at once.

    Args:
        waits_s: the stated wait of each refused attempt, by its id.
        most_retries: retries of a client.
        every_ms: time between two new clients.
        count: number of clients.
    """
    load = Load(
        mix="chat",
        rate_per_s=1000 / every_ms,
        horizon_s=count * every_ms / 1000,
        arrivals=Arrivals.EVEN,
    )
    planned = planned_requests({str(n): one for n, one in enumerate(offered(load, 1))})
    assert len(planned) == count
    rejections: dict[int, Rejection] = {}
    clients = Clients(planned, rejections, most_retries=most_retries)
    times_ms: dict[str, int] = {}
    pending: list[tuple[PlannedRequest, RequestRecord]] = []
    for rid, attempt in enumerate(clients.requests(), start=1):
        times_ms[attempt.request_id] = attempt.scheduled_ns // NS_PER_MS
        # The fleet reports the end of a request after it has taken the next one.
        for one, record in pending:
            clients.on_record(one, record)
        refused = attempt.request_id in waits_s
        if refused:
            wait_s = waits_s[attempt.request_id]
            rejections[rid] = Rejection(reason="unattainable", detail="", retry_after_s=wait_s)
        outcome = Outcome.SHED if refused else Outcome.OK
        pending = [(attempt, make_record(attempt, outcome, attempt.scheduled_ns))]
    return times_ms


def test_a_refused_client_retries_after_the_stated_time() -> None:
    times_ms = sent({"1-1": 1, "2-1": 2})
    assert times_ms["1-2"] == times_ms["1-1"] + 1000
    assert times_ms["2-2"] == times_ms["2-1"] + 2000
    assert len(times_ms) == 12
    assert list(times_ms.values()) == sorted(times_ms.values())


def test_a_client_gives_up_after_its_last_retry() -> None:
    refused = {f"0-{attempt}": 1 for attempt in range(1, 9)}
    assert [name for name in sent(refused, most_retries=2) if name[0] == "0"] == [
        "0-1",
        "0-2",
        "0-3",
    ]


def test_no_client_retries_after_the_last_arrival() -> None:
    times_ms = sent({"9-1": 1, "8-1": 1, "0-1": 60})
    assert set(times_ms) == {f"{n}-1" for n in range(10)}


def test_a_retry_in_a_long_gap_comes_with_the_next_arrival() -> None:
    times_ms = sent({"1-1": 1}, every_ms=3000, count=4)
    assert times_ms["1-2"] == times_ms["2-1"] == 6000


def test_a_request_that_an_idle_replica_serves_too_late_cannot_enter() -> None:
    """With targets that only the shortest outputs meet, a retry is no help for the others."""
    cell = retry_cells(read_knees(), mixes=["tight-deadlines"], factors=[0.8])[0]
    cell = replace(cell, load=replace(cell.load, horizon_s=4))
    result = serve_clients(cell, SEED, most_retries=1)
    assert 0 < result.impossible <= result.refused
    assert result.retried <= result.refused - result.impossible


def test_clients_without_retries_are_the_run_of_the_policy() -> None:
    cell = retry_cells(read_knees(), mixes=["chat"], factors=[1.2])[0]
    cell = replace(cell, load=replace(cell.load, horizon_s=10))
    result, plain = serve_clients(cell, SEED, most_retries=2), run_cell(cell, "slo", SEED)
    assert (result.clients, result.kept_without) == (plain.offered, plain.kept)
    assert 0 < result.entered <= result.retried <= result.refused


# --- the command -----------------------------------------------------------------------------
def clients_of(*, factor: float = 1.2, entered: int = 80, kept: int = 900) -> RetryResult:
    return RetryResult(
        cell="cell",
        mix="chat",
        factor=factor,
        duration_s=10,
        clients=1000,
        refused=120,
        impossible=10,
        retried=100,
        entered=entered,
        mean_wait_s=1,
        kept=kept,
        kept_without=900,
    )


@pytest.mark.parametrize(
    ("result", "missed"),
    [
        (clients_of(), False),
        (clients_of(entered=79), True),
        (clients_of(kept=890), True),
        (clients_of(factor=1.5, entered=0, kept=0), False),
    ],
    ids=["met", "too-few-enter", "less-is-kept", "not-judged-at-this-load"],
)
def test_the_aim_of_retries(result: RetryResult, missed: bool) -> None:
    assert misses_aim([result]) == missed


@pytest.mark.parametrize(("most", "missed"), [(-1.0, 1), (1.0, 0)], ids=["missed", "met"])
def test_the_command_prints_json_and_fails_where_an_aim_is_missed(
    most: float, missed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.refusals.MOST_FALSE", most)
    options = "--checks forced --mixes chat --factors 2 --requests 2 --seeds 1 --jobs 1 --json"
    code = main(options.split())
    document = json.loads(capsys.readouterr().out)
    assert len(document["forced"]) == 2
    assert len(document["refused"]) == 2
    assert code == document["missed"] == missed


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--mixes", "chat", "--requests", "2", "--max-retries", "1", "--jobs", "1"])
    printed = capsys.readouterr().out
    assert "False refusals: " in printed
    assert "A client retries at most 1 times." in printed
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith("chat ")] == [
        ["chat", "1.2x"],
        ["chat", "1.2x"],
    ]
