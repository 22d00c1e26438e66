"""The comparison of policies: its rule, its runs, and its exit code."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from benchmarks.comparison.admitted import Admitted
from benchmarks.comparison.cells import Cell, Fleet, Kept, planned_requests, run_cell, slo_classes
from benchmarks.comparison.cells import fleet_settings as cell_settings
from benchmarks.comparison.design import poisson_cell, read_knees
from benchmarks.comparison.loads import Arrivals, Load, offered
from benchmarks.comparison.plateau import Curve, Point, Series, plateau_series
from benchmarks.comparison.preemption_modes import ModeResult, mode_cells
from benchmarks.comparison.rule import chances_by_mix, compare, judge_cell
from benchmarks.policies_everywhere import main, serve, settle

from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.spec.llmservice import LLMService
from goodput_core.units import NS_PER_S
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import fleet_settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import PlannedRequest

CELL = Cell(
    name="small",
    load=Load(mix="chat", rate_per_s=45, horizon_s=4),
    fleet=Fleet(replicas=2),
)


def kept(*levels: tuple[int, float, float]) -> Kept:
    """Return a run with offered and kept weight by priority level."""
    whole, good = sum(level[1] for level in levels), sum(level[2] for level in levels)
    return Kept(
        offered=int(whole),
        kept=int(good),
        offered_weight=whole,
        kept_weight=good,
        levels={level: (offered, won) for level, offered, won in levels},
        classes={},
        admitted=int(whole),
        admitted_parts=Admitted(),
        refused=0,
        preemptions=0,
        end_ns=0,
        cpu_s=0,
    )


def flat(*counts: int) -> dict[int, Kept]:
    return {seed: kept((0, 100, count)) for seed, count in enumerate(counts)}


def test_the_rule_holds_for_equal_policies() -> None:
    result = judge_cell("cell", {"slo": flat(90, 91, 92), "sjf": flat(90, 91, 92)})
    assert not result.broken
    assert result.differences[0].low == 0
    assert result.worst_seed == 1


def test_the_rule_is_broken_by_a_lower_mean() -> None:
    result = judge_cell("cell", {"slo": flat(88, 89, 90), "sjf": flat(90, 91, 92)})
    assert result.mean_broken
    assert not result.seed_broken
    assert result.differences[0].mean == pytest.approx(-0.02)


def test_the_rule_is_broken_by_an_uncertain_mean() -> None:
    result = judge_cell("cell", {"slo": flat(85, 95, 97), "sjf": flat(88, 90, 91)})
    assert result.differences[0].mean > 0
    assert result.mean_broken


def test_new_seeds_decide_where_the_bound_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean must allow it: a difference below −1 % is broken, whatever other seeds show."""
    theirs = flat(88, 90, 91)
    results = [
        judge_cell("a", {"slo": flat(85, 95, 97), "sjf": theirs}),
        judge_cell("b", {"slo": flat(80, 81, 82), "sjf": theirs}),
    ]
    assert [result.open_policies for result in results] == [["sjf"], []]
    served: list[tuple[str, list[int]]] = []

    def more(
        _: Executor, cells: Sequence[Cell], policies: Sequence[str], seeds: range, **__: object
    ) -> dict[str, dict[str, dict[int, Kept]]]:
        served.extend((cell.name, list(seeds)) for cell in cells)
        same = {seed: kept((0, 100, 90)) for seed in seeds}
        return {cell.name: dict.fromkeys(policies, same) for cell in cells}

    monkeypatch.setattr("benchmarks.policies_everywhere.serve", more)
    with ThreadPoolExecutor(1) as pool:
        cells = [replace(CELL, name=name) for name in "ab"]
        settled = settle(pool, cells, results, range(3))
    assert served == [("a", [3, 4, 5, 6, 7, 8])], "no seed twice"
    assert [result.mean_broken for result in settled] == [False, True]
    assert settled[0].differences[0].seeds == 6
    assert settled[0].opened == results[0].differences
    assert settled[0].worst_seed == results[0].worst_seed


def test_the_rule_is_broken_by_one_seed() -> None:
    ours, theirs = [99] * 20, [97] * 20
    ours[7], theirs[7] = 92, 97
    result = judge_cell("cell", {"slo": flat(*ours), "sjf": flat(*theirs)})
    assert not result.mean_broken
    assert result.seed_broken
    assert result.worst_seed_number == 7
    assert result.worst_seed == pytest.approx(92 / 97)


@pytest.mark.parametrize(("in_time", "broken"), [(990, False), (989, True)])
def test_the_rule_is_broken_by_late_requests_whose_targets_could_be_ensured(
    in_time: int, broken: bool
) -> None:
    run = replace(kept((0, 100, 90)), admitted_parts=Admitted(sure=1000, sure_kept=in_time))
    result = judge_cell("cell", {"slo": {0: run}})
    assert result.admitted_broken == result.broken == broken


@pytest.mark.parametrize(
    ("others", "in_time", "broken"),
    [(1000, 880, False), (1000, 879, True), (1000, 921, True), (100, 80, False)],
    ids=["within 2 points", "too high", "too low", "few"],
)
def test_the_rule_is_broken_by_wrong_chances_in_a_mix(
    others: int, in_time: int, broken: bool
) -> None:
    half = Admitted(others=others // 2, others_kept=in_time // 2, predicted=0.45 * others)
    rest = replace(half, others_kept=in_time - in_time // 2)
    results = [
        judge_cell(f"mix/{number}", {"slo": {0: replace(kept((0, 9, 9)), admitted_parts=parts)}})
        for number, parts in enumerate((half, rest))
    ]
    (chances,) = chances_by_mix(results)
    assert (chances.mix, chances.admitted.others) == ("mix", others)
    assert chances.broken == broken
    assert not any(result.broken for result in results)


def test_admitted_requests_whose_targets_can_be_ensured_are_counted_apart() -> None:
    """An idle engine meets the targets of some requests even with the longest output."""
    cell = poisson_cell("deadline", 4.0, read_knees(), known_lengths=False, small_kv=True)
    run = run_cell(cell, "slo", 1)
    by = run.admitted_parts
    assert by.sure > 0 < by.others
    assert by.sure + by.others == run.admitted
    assert by.sure_kept + by.others_kept == run.kept
    assert 0.5 * by.others < by.predicted <= by.others
    known = poisson_cell("chat", 1.0, read_knees(), known_lengths=True)
    assert run_cell(known, "slo", 1).admitted_parts.others == 0


def test_a_seed_of_a_cell_with_few_requests_is_several_loads() -> None:
    cell = Cell(name="few", load=Load(mix="chat", rate_per_s=8, horizon_s=4), fleet=Fleet())
    with ThreadPoolExecutor(1) as pool:
        runs = serve(pool, [cell], ["slo"], [1], whole=True)["few"]["slo"]
    alone = [run_cell(cell, "slo", seed) for seed in (1, 1_000_001, 2_000_001, 3_000_001)]
    assert runs[1].offered == sum(run.offered for run in alone)
    assert runs[1].kept_weight == sum(run.kept_weight for run in alone)
    assert runs[1].levels[0][0] == runs[1].classes["all"][0] == runs[1].offered


def test_the_best_policy_of_each_seed_counts() -> None:
    runs = {"slo": flat(95, 95), "sjf": flat(99, 50), "vllm": flat(50, 99)}
    result = judge_cell("cell", runs)
    assert result.worst_seed == pytest.approx(95 / 99)


def test_a_higher_level_outweighs_a_lower_one() -> None:
    ours, theirs = kept((1, 50, 50), (0, 50, 10)), kept((1, 50, 40), (0, 50, 50))
    assert compare([ours], [theirs]) == (1, [0.2])
    assert compare([theirs], [ours]) == (1, [-0.2])


def test_lower_levels_count_where_the_higher_ones_are_equal() -> None:
    ours, theirs = kept((1, 50, 50), (0, 50, 10)), kept((1, 50, 50), (0, 50, 20))
    assert compare([ours], [theirs]) == (0, [-0.1])


def test_a_policy_that_left_a_cell_early_does_not_break_the_rule() -> None:
    runs = {"slo": flat(90, 90, 90, 90), "static": flat(20, 70)}
    (difference,) = judge_cell("cell", runs).differences
    assert (difference.seeds, difference.low) == (2, 0.2)
    assert not difference.broken


@pytest.mark.parametrize(("whole", "seeds"), [(False, 2), (True, 3)])
def test_a_policy_far_below_slo_leaves_a_cell(whole: bool, seeds: int) -> None:
    cell = replace(CELL, load=replace(CELL.load, rate_per_s=60))
    with ThreadPoolExecutor(1) as pool:
        runs = serve(pool, [cell], ["slo", "static"], range(1, 4), whole=whole)
    assert len(runs["small"]["slo"]) == 3
    assert len(runs["small"]["static"]) == seeds


def test_a_run_ends_when_no_promise_can_be_kept_any_more() -> None:
    """The requests that are cancelled then would not have been kept."""
    cell = replace(CELL, load=replace(CELL.load, rate_per_s=120))
    requests = offered(cell.load, 1)
    planned = planned_requests({f"1-{i}": request for i, request in enumerate(requests)})
    records: list[dict[str, bool]] = []
    for each in (planned, [replace(one, cancel_after_ns=None) for one in planned]):
        good: dict[str, bool] = {}

        def on_record(
            one: PlannedRequest, record: RequestRecord, good: dict[str, bool] = good
        ) -> None:
            good[one.request_id] = judge(record, one.targets).kind is JudgementKind.ATTAINED

        settings = cell_settings(cell, "sarathi", 1, "recompute", slo=slo_classes(requests))
        outcome = emulate(iter(each), settings, on_record)
        records.append(good)
    assert records[0] == records[1]
    assert 0 < sum(records[0].values()) < len(requests)
    last_ns = max(request.arrival_ns + (request.slack_ns or 0) for request in requests)
    assert run_cell(cell, "sarathi", 1, "recompute").end_ns <= last_ns + 1 < outcome.end_ns


def test_a_run_depends_on_its_seed_only() -> None:
    one, again = run_cell(CELL, "slo", 3), run_cell(CELL, "slo", 3)
    assert replace(one, cpu_s=0) == replace(again, cpu_s=0)
    assert one.offered != run_cell(CELL, "slo", 4).offered


def test_counts_of_a_run_agree() -> None:
    run = run_cell(replace(CELL, load=replace(CELL.load, rate_per_s=150)), "slo", 1)
    assert run.offered == run.admitted + run.refused
    assert sum(offered for offered, _ in run.classes.values()) == run.offered
    assert sum(good for _, good in run.classes.values()) == run.kept == run.kept_weight
    assert 0 < run.kept < run.offered
    assert run.refused > 0


@pytest.mark.parametrize("policy", ["slo", "sarathi"])
def test_a_run_is_the_run_of_a_manifest(policy: str) -> None:
    """A manifest with the values of the cell keeps the same requests."""
    service = LLMService.from_dict(
        {
            "apiVersion": "goodput.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": {"name": "cell"},
            "spec": {
                "model": {"source": "emulated://llama-3-8b-h100"},
                "engine": {"policy": policy, "preemption": "hybrid"},
                "replicas": 2,
                "slo": {
                    "classes": [{"name": "all", "ttftMs": 500, "tpotMs": 50}],
                    "default": "all",
                },
            },
        }
    )
    requests = offered(CELL.load, 5)
    good = 0

    def on_record(planned: PlannedRequest, record: RequestRecord) -> None:
        nonlocal good
        good += judge(record, planned.targets).kind is JudgementKind.ATTAINED

    emulate(
        iter(planned_requests({f"5-{i}": request for i, request in enumerate(requests)})),
        fleet_settings(service, device=None, source="test", timeout_ns=120 * NS_PER_S, seed=5),
        on_record,
    )
    assert good == run_cell(CELL, policy, 5, "hybrid").kept


def point(factor: float, kept_per_s: float) -> Point:
    return Point(
        factor=factor,
        offered_per_s=10 * factor,
        kept_per_s=kept_per_s,
        admitted_kept=1,
        sure_kept=1,
    )


@pytest.mark.parametrize(
    ("kept_per_s", "lowest", "broken"),
    [
        ((5, 10, 10, 10), 1, False),
        ((5, 10, 9.8, 9.9), 0.98, False),
        ((5, 10, 9.5, 10), 0.95, True),
        ((5, 10, 12, 11), 11 / 12, True),
    ],
    ids=["plateau", "within-3-percent", "dip", "fall-from-a-late-peak"],
)
def test_a_plateau_keeps_what_a_lower_load_kept(
    kept_per_s: tuple[float, ...], lowest: float, broken: bool
) -> None:
    points = tuple(point(factor, kept) for factor, kept in enumerate(kept_per_s, start=1))
    curve = Curve(name="chat", policy="slo", points=points)
    assert curve.lowest == pytest.approx(lowest)
    assert curve.broken == broken


@pytest.mark.parametrize(("in_time", "broken"), [(0.99, False), (0.989, True)])
def test_on_a_plateau_the_admitted_requests_are_in_time(in_time: float, *, broken: bool) -> None:
    points = (point(1, 10), replace(point(2, 10), sure_kept=in_time), point(4, 10))
    assert Curve(name="chat", policy="slo", points=points).broken == broken


@pytest.mark.parametrize(
    ("hybrid", "high", "broken"),
    [(0.7, 0.01, False), (0.695, -0.001, False), (0.685, 0.001, False), (0.685, -0.001, True)],
    ids=["equal", "within 1 %", "perhaps by chance", "worse"],
)
def test_hybrid_is_compared_to_the_better_mode(hybrid: float, high: float, broken: bool) -> None:
    result = ModeResult(
        cell="cell",
        policy="slo",
        shares={"recompute": 0.5, "swap": 0.7, "hybrid": hybrid},
        high=high,
        preemptions=1,
    )
    assert result.broken == broken


def test_cells_of_little_memory_hold_every_request() -> None:
    for cell in mode_cells(read_knees()):
        profile = cell.fleet.profile()
        capacity = profile.kv_blocks * profile.block_size
        longest = max(r.prompt_tokens + r.output_tokens for r in offered(cell.load, 1))
        assert longest <= capacity, cell.name


@pytest.mark.parametrize(("tolerance", "broken"), [(-2, 1), (2, 0)], ids=["broken", "kept"])
def test_the_command_prints_json_and_fails_where_the_rule_is_broken(
    tolerance: float,
    broken: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("benchmarks.comparison.rule.TOLERANCE", tolerance)
    monkeypatch.setattr("benchmarks.comparison.rule.SEED_SHARE", 0)
    monkeypatch.setattr("benchmarks.comparison.rule.SURE_SHARE", 0)
    options = "--checks rule --seeds 2 --policies slo,orca --json"
    code = main(["--cells", "textbook/recompute", *options.split()])
    document = json.loads(capsys.readouterr().out)
    (cell,) = document["rule"]
    assert cell["cell"] == "textbook/recompute"
    assert set(cell["shares"]) == {"slo", "orca"}
    assert code == document["broken"] == cell["broken"] == broken


def test_the_command_lists_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(set(names)) == len(names)
    assert {"textbook/hybrid", "plateau/chat"} <= set(names)


def test_each_value_of_a_wide_series_occurs_with_every_mix() -> None:
    usual = plateau_series(["azure"])
    assert {(one.arrivals, one.replicas, one.known_lengths) for one in usual} == {
        (Arrivals.POISSON, 1, True)
    }
    wide = plateau_series(["azure"], wide=True)
    assert len({one.name for one in wide}) == len(wide)
    for mix in (one.mix for one in usual):
        series = [one for one in wide if one.mix == mix]
        assert {one.replicas for one in series} == {1, 2, 4}
        assert {one.known_lengths for one in series} == {True, False}
        assert {one.arrivals for one in series} == {
            Arrivals.POISSON,
            Arrivals.GAMMA,
            Arrivals.ON_OFF,
        }
    knees = read_knees()
    knee = knees["chat/full"]
    cells = [Series(mix="chat", replicas=2).cell(factor, knees, {}) for factor in (0.5, 4)]
    assert [cell.load.rate_per_s for cell in cells] == [knee, 8 * knee]
    assert cells[0].load.horizon_s == cells[1].load.horizon_s
    assert {cell.fleet.replicas for cell in cells} == {2}


def test_weights_reach_the_engine_through_the_classes_of_a_manifest() -> None:
    requests = offered(Load(mix="three-classes", rate_per_s=30), 1)
    classes = slo_classes(requests).by_name()
    assert {name: (c.priority, c.weight) for name, c in classes.items()} == {
        "voice": (1, 1),
        "chat": (0, 3),
        "batch": (0, 1),
    }
    assert all(classes[r.slo_class].targets == r.targets for r in requests)


def test_equal_weights_need_no_classes() -> None:
    assert slo_classes(offered(Load(mix="deadline", rate_per_s=30), 1)).classes == ()


def test_kept_requests_count_by_weight() -> None:
    cell = Cell(
        name="weights",
        load=Load(mix="three-classes", rate_per_s=60, horizon_s=2),
        fleet=Fleet(),
    )
    run = run_cell(cell, "sarathi", 1)
    assert 0 < run.kept < run.offered
    classes, levels = run.classes, run.levels
    for which in (0, 1):
        assert levels[1][which] == classes["voice"][which]
        assert levels[0][which] == 3 * classes["chat"][which] + classes["batch"][which]
    assert run.kept_weight == sum(kept for _, kept in levels.values())


def test_kept_weight_is_compared_with_the_bound_of_the_same_seeds() -> None:
    runs = {"slo": flat(80, 90, 10), "sjf": flat(80, 90, 10)}
    assert judge_cell("cell", runs, bounds={0: 100, 1: 100}).bound_share == pytest.approx(0.85)
    assert judge_cell("cell", runs).bound_share is None


def test_no_run_keeps_more_than_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--checks rule --seeds 2 --policies slo,sjf --bound --json"
    main(["--cells", "textbook/recompute", *options.split()])
    (cell,) = json.loads(capsys.readouterr().out)["rule"]
    assert 0 < cell["bound_share"] <= 1
