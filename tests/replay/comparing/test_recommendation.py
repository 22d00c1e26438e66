"""Which candidate is recommended, and in which words."""

from __future__ import annotations

from dataclasses import replace

from goodput_core.spec.choices import Policy, Preemption
from goodput_core.verdict import VerdictKind
from goodput_replay.comparing.candidate import Candidate, ClassResult, Evaluation, grid
from goodput_replay.comparing.recommend import ranked, recommend


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
DEAR = _evaluation(Policy.SARATHI, passed=True, hours=2.0, goodput=9.0)
FAST = _evaluation(Policy.VLLM, passed=False, hours=0.5, goodput=20.0, good=50)


def test_the_cheapest_that_is_shown_to_keep_every_objective_is_chosen() -> None:
    found = recommend([FAST, DEAR, CHEAP])
    assert found.chosen is CHEAP
    assert found.sentence.startswith("slo, budget 2048, hybrid, 2 replicas is the cheapest of 2")
    assert "policy: slo\n" in found.lines
    assert "replicas: 2\n" in found.lines


def test_of_those_that_cost_the_same_the_one_with_the_most_goodput_is_chosen() -> None:
    better = replace(CHEAP, goodput_per_s=6.0, device_hours=1.001)
    assert recommend([CHEAP, better]).chosen is better


def test_costs_of_minutes_are_told_apart_too() -> None:
    one, two = replace(CHEAP, device_hours=0.0071), replace(CHEAP, device_hours=0.0141)
    two = replace(two, goodput_per_s=5.1)
    assert recommend([two, one]).chosen is one


def test_without_any_that_passes_the_most_goodput_is_chosen_and_said_to_be_too_little() -> None:
    found = recommend([FAST, replace(FAST, goodput_per_s=1.0)])
    assert found.chosen is FAST
    assert found.sentence.startswith("no candidate is shown to keep every objective")
    assert found.sentence.endswith("add replicas, or promise less")


def test_what_only_lacks_data_is_told_to_look_longer() -> None:
    seems = replace(CHEAP, verdict=VerdictKind.INCONCLUSIVE)
    assert recommend([seems]).sentence.endswith("a longer window would show more")


def test_a_topology_is_recommended_as_virtual_only() -> None:
    pools = _evaluation(Policy.SLO, passed=True, hours=0.1, goodput=5.0, topology="pools.yaml")
    found = recommend([CHEAP, pools])
    assert found.chosen is pools
    assert "virtual only" in found.sentence
    assert not found.lines


def test_the_ranking_puts_those_that_pass_first_and_the_cheaper_before_the_dearer() -> None:
    assert ranked([FAST, DEAR, CHEAP]) == [CHEAP, DEAR, FAST]


def test_every_combination_is_a_candidate() -> None:
    candidates = grid(
        [Policy.SLO, Policy.VLLM], [512, 2048], [1, 2], [Preemption.SWAP], ["pools.yaml"]
    )
    assert len(candidates) == len(set(candidates)) == 2 * 2 * 2 + 2 * 2
    assert sum(bool(c.topology) for c in candidates) == 4
