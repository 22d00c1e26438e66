"""The recommended candidate, and the sentence about it."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from rich.console import Console
from tests.builders.manifests import manifest_path

from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.spec.manifest import parse_manifest
from goodput_replay.runs.tables import choose_table
from goodput_replay.sweep.candidates import Candidate, ClassResult, Evaluation, grid
from goodput_replay.sweep.picture import draw
from goodput_replay.sweep.recommendation import ranked, recommend, tables

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = manifest_path("recommended").read_text(encoding="utf-8")


def _parsed(text: str) -> Any:
    return parse_manifest(text, source="chat.yaml", yaml=yaml).spec


SPEC = _parsed(MANIFEST)
AUTO = replace(SPEC, control=replace(SPEC.control, mode=ControlMode.AUTO))


def _evaluation(
    policy: Policy,
    *,
    passed: bool,
    hours: float,
    goodput: float,
    good: int = 99,
    topology: str = "",
) -> Evaluation:
    one = ClassResult(
        name="chat",
        objective=0.95,
        good=good,
        total=100,
        low=0.9,
        high=1.0,
        verdict="PASS" if passed else "INCONCLUSIVE",
        ttft_p99_ms=1.0,
        tpot_p99_ms=1.0,
        tbt_p99_ms=1.0,
    )
    return Evaluation(
        candidate=Candidate(
            policy=policy,
            token_budget=2048,
            replicas=0 if topology else 2,
            preemption=Preemption.HYBRID,
            placement=RouterPolicy.LEAST_LOADED,
            topology=topology,
        ),
        classes=(one,),
        verdict=VerdictKind.PASS if passed else VerdictKind.INCONCLUSIVE,
        reason="Attained",
        requests=100,
        goodput_per_s=goodput,
        device_hours=hours,
        preemptions=0,
        recomputed_tokens=0,
        swapped_tokens=0,
        shed=0,
        illustrative=False,
    )


CHEAP = _evaluation(Policy.SLO, passed=True, hours=1.0, goodput=5.0)
EXPENSIVE = _evaluation(Policy.SARATHI, passed=True, hours=2.0, goodput=9.0)
FAST = _evaluation(Policy.VLLM, passed=False, hours=0.5, goodput=20.0, good=50)


def test_the_cheapest_candidate_with_a_pass_is_recommended() -> None:
    found = recommend([FAST, EXPENSIVE, CHEAP], SPEC)
    assert found.chosen is CHEAP
    assert found.sentence.startswith(
        "slo, budget 2048, hybrid, 2 replicas, least-loaded is the best of 2"
    )
    applied = _parsed(_merged(MANIFEST, found.lines))
    assert applied == CHEAP.candidate.apply(SPEC)
    assert (applied.engine.policy, applied.replicas) == (Policy.SLO, 2)
    assert applied.router.policy is RouterPolicy.LEAST_LOADED
    assert applied.router.replicas == 3


@pytest.mark.parametrize("budget", [64, 20_000], ids=["below the bounds", "above them"])
def test_the_lines_widen_the_bounds_to_a_budget_outside_of_them(budget: int) -> None:
    chosen = replace(CHEAP, candidate=replace(CHEAP.candidate, token_budget=budget))
    lines = recommend([chosen], SPEC).lines
    assert _parsed(_merged(MANIFEST, lines)).engine.token_budget.initial == budget


def test_the_sentence_states_that_mode_auto_was_compared_as_manual() -> None:
    found = recommend([CHEAP], AUTO)
    assert "control.mode Manual in place of the manifest's Auto" in found.sentence
    auto = MANIFEST.replace("Manual", "Auto")
    assert _parsed(_merged(auto, found.lines)) == CHEAP.candidate.apply(AUTO)
    assert "Manual" not in recommend([CHEAP], SPEC).sentence


def test_the_highest_goodput_is_recommended_at_equal_cost() -> None:
    better = replace(CHEAP, goodput_per_s=6.0, device_hours=1.001)
    assert recommend([CHEAP, better], SPEC).chosen is better


def test_costs_of_minutes_are_distinguished() -> None:
    one, two = replace(CHEAP, device_hours=0.0071), replace(CHEAP, device_hours=0.0141)
    two = replace(two, goodput_per_s=5.1)
    assert recommend([two, one], SPEC).chosen is one


def test_the_highest_goodput_is_recommended_without_a_pass() -> None:
    found = recommend([FAST, replace(FAST, goodput_per_s=1.0)], SPEC)
    assert found.chosen is FAST
    assert found.sentence.startswith("no candidate is shown to meet every objective")
    assert found.sentence.endswith("add replicas, or relax the targets")


def test_a_longer_window_is_advised_if_all_estimates_meet_the_objectives() -> None:
    seems = replace(CHEAP, verdict=VerdictKind.INCONCLUSIVE)
    assert recommend([seems], SPEC).sentence.endswith("so try a longer window")


def test_a_recommended_topology_is_reported_as_virtual_only() -> None:
    pools = _evaluation(Policy.SLO, passed=True, hours=0.1, goodput=5.0, topology="pools.yaml")
    found = recommend([CHEAP, pools], SPEC)
    assert found.chosen is pools
    assert "only in virtual time" in found.sentence
    assert not found.lines


def test_candidates_with_a_pass_rank_first_by_cost() -> None:
    assert ranked([FAST, EXPENSIVE, CHEAP]) == [CHEAP, EXPENSIVE, FAST]


def _grid(**changes: Any) -> tuple[Candidate, ...]:
    fields: dict[str, Any] = {
        "policies": [Policy.SLO, Policy.VLLM],
        "budgets": [512, 2048],
        "preemptions": [Preemption.SWAP],
        "replicas": [2, 3],
        "placements": [RouterPolicy.ROUND_ROBIN, RouterPolicy.POWER_OF_TWO],
    }
    return grid(**fields | changes)


def test_every_combination_is_a_candidate() -> None:
    candidates = _grid(pools=["pools.yaml"])
    assert len(candidates) == len(set(candidates)) == 2 * 2 * 2 * 2 + 2 * 2 * 2
    assert sum(c.topology == "pools.yaml" for c in candidates) == 8
    assert {c.replicas for c in candidates if c.topology} == {0}


def test_candidates_with_migration_have_the_given_replicas() -> None:
    moving = [c for c in _grid(migrations=["move.yaml"]) if c.topology]
    assert {c.replicas for c in moving} == {2, 3}
    assert len(moving) == 2 * 2 * 2 * 2


def test_a_single_replica_is_combined_with_one_placement() -> None:
    alone = [c for c in _grid(replicas=[1, 2]) if c.replicas == 1]
    assert {c.placement for c in alone} == {RouterPolicy.ROUND_ROBIN}
    assert len(alone) == 2 * 2


UNJUDGED = replace(CHEAP.classes[0], objective=None, good=0, total=0, low=None, high=None)


@pytest.mark.parametrize(
    "evaluations",
    [
        [FAST, EXPENSIVE, CHEAP],
        [replace(CHEAP, goodput_per_s=0.0)],
        [replace(CHEAP, classes=(replace(CHEAP.classes[0], objective=None),))],
        [replace(CHEAP, classes=(UNJUDGED,))],
        [_evaluation(Policy.SLO, passed=True, hours=0.1, goodput=5.0, topology="pools.yaml")],
        [replace(CHEAP, candidate=replace(CHEAP.candidate, replicas=n)) for n in range(60)],
    ],
    ids=["some", "no goodput", "no objective", "nothing judged", "a topology", "many"],
)
def test_any_comparison_can_be_drawn(evaluations: list[Evaluation], tmp_path: Path) -> None:
    draw(evaluations, evaluations[0], tmp_path / "it.png")
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def _merged(manifest: str, lines: str) -> str:
    """Return the manifest with the fields of these lines."""
    document = yaml.safe_load(manifest)
    _merge(document, yaml.safe_load(lines))
    return yaml.safe_dump(document)


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def test_control_characters_of_a_class_and_a_topology_are_escaped() -> None:
    one = _evaluation(Policy.SLO, passed=True, hours=1.0, goodput=5.0, topology="\x1b]0;t\x07")
    named = replace(one, classes=(replace(one.classes[0], name="\x1b]0;c\x07[b]"),))
    plain = replace(EXPENSIVE, classes=named.classes)
    console = Console(file=(sink := io.StringIO()), width=200)
    console.print(next(tables([named, plain])))
    shown = sink.getvalue()
    assert shown.replace("\n", "").isprintable()
    assert r"\x1b]0;c\x07[b] met" in shown
    assert r"\x1b]0;t\x07" in shown


def _compared(*names: str) -> list[Evaluation]:
    """Two candidates that differ in every field, with classes of these names."""
    one = _evaluation(Policy.FASTSERVE, passed=False, hours=123.4, goodput=1234.5)
    other = replace(
        one.candidate,
        token_budget=512,
        replicas=16,
        preemption=Preemption.RECOMPUTE,
        placement=RouterPolicy.PREFIX_AFFINITY,
    )
    classes = tuple(replace(one.classes[0], name=name) for name in names)
    counted = replace(one, classes=classes, recomputed_tokens=10**7, swapped_tokens=10**7)
    return [counted, replace(counted, candidate=other)]


@pytest.mark.parametrize("width", [60, 72, 80, 100, 140, 200])
@pytest.mark.parametrize(
    "names",
    [("",), ("interactive", "batch"), ("interactive-premium", "batch-of-the-night", "x")],
    ids=["one class", "two classes", "long names"],
)
def test_the_table_fits_the_terminal_without_cutting_names(
    names: tuple[str, ...], width: int
) -> None:
    console = Console(file=(sink := io.StringIO()), width=width)
    console.print(choose_table(tables(_compared(*names)), console))
    text = sink.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = ("fastserve", "INCONCLUSIVE", "GPU-h", "goodput", "512", *names)
    assert all(word in text for word in words), text


def test_a_name_longer_than_its_column_is_folded() -> None:
    console = Console(file=(sink := io.StringIO()), width=60)
    console.print(choose_table(tables(_compared("n" * 64)), console))
    assert sink.getvalue().count("n" * 5) >= 4
    assert sum(line.count("nn") * 2 for line in sink.getvalue().splitlines()) >= 120
    assert max(map(len, sink.getvalue().splitlines())) <= 60


def test_a_wide_terminal_gets_every_column() -> None:
    console = Console(file=(sink := io.StringIO()), width=250)
    console.print(choose_table(tables(_compared("interactive", "batch")), console))
    for name in ("policy", "budget", "replicas", "TTFT", "TBT", "recomputed", "swapped", "shed"):
        assert name in sink.getvalue()
