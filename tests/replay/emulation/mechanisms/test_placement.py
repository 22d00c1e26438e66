"""Placement policies in a fleet: where each one helps, and where it hurts.

Sources: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 2001;
for prefixes, Mirrokni et al., "Consistent Hashing with Bounded Loads", SODA 2018, and Srivatsa et
al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", 2024.
"""

from __future__ import annotations

import random

from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.spec.choices import RouterPolicy


def test_power_of_two_avoids_the_queues_of_round_robin() -> None:
    # One output in ten is long; round robin places the next requests behind it.
    draw = random.Random(3)
    requests, at_ms = [], 0.0
    for i in range(600):
        at_ms += draw.expovariate(1 / 6.0)
        requests.append(plan(f"r{i}", at_ms, 16, 200 if draw.random() < 0.1 else 8))
    runs = {
        policy: run_fleet(requests, make_fleet(replicas=8, placement=policy, max_num_seqs=1))
        for policy in (RouterPolicy.ROUND_ROBIN, RouterPolicy.POWER_OF_TWO)
    }
    round_robin, power_of_two = runs[RouterPolicy.ROUND_ROBIN], runs[RouterPolicy.POWER_OF_TWO]
    assert power_of_two.ttft_ms(95) < 0.7 * round_robin.ttft_ms(95)


def test_power_of_two_is_worse_than_round_robin_for_equal_requests() -> None:
    # Evenly spaced requests of equal length: with round robin, each finds an idle replica.
    requests = [plan(f"r{i}", i * 2.1, 16, 16) for i in range(400)]
    runs = {
        policy: run_fleet(requests, make_fleet(replicas=8, placement=policy, max_num_seqs=1))
        for policy in (RouterPolicy.ROUND_ROBIN, RouterPolicy.POWER_OF_TWO)
    }
    assert runs[RouterPolicy.ROUND_ROBIN].ttft_ms(99) <= 2
    assert runs[RouterPolicy.POWER_OF_TWO].ttft_ms(99) > 5


def test_affinity_places_the_requests_of_a_session_on_one_replica() -> None:
    draw = random.Random(4)
    requests = []
    for i in range(300):
        session, turn = draw.randrange(30), i // 30
        prompt = 1_600 + 160 * turn
        hashes = range(session * 1000, session * 1000 + prompt // 16)
        requests.append(plan(f"r{i}", i * 25, prompt, 30, hashes=hashes))
    runs = {
        policy: run_fleet(
            requests, make_fleet(replicas=4, placement=policy, device="llama-3-8b-h100")
        )
        for policy in (RouterPolicy.LEAST_LOADED, RouterPolicy.PREFIX_AFFINITY)
    }
    spread, affine = runs[RouterPolicy.LEAST_LOADED], runs[RouterPolicy.PREFIX_AFFINITY]
    assert affine.outcome.prefix_hit_tokens > 1.2 * spread.outcome.prefix_hit_tokens
    assert affine.ttft_ms(50) < 0.8 * spread.ttft_ms(50)


def test_affinity_overloads_replicas_with_a_hot_prefix() -> None:
    # All prompts share 64 tokens, followed by 2,000 tokens that differ. A hit saves 2 ms, and
    # costs more in the queue of the replicas that have the prefix.
    requests = [plan(f"r{i}", i * 25, 2_064, 60, hashes=range(4)) for i in range(200)]
    runs = {
        policy: run_fleet(
            requests, make_fleet(replicas=4, placement=policy, device="llama-3-8b-h100")
        )
        for policy in (RouterPolicy.LEAST_LOADED, RouterPolicy.PREFIX_AFFINITY)
    }
    spread, affine = runs[RouterPolicy.LEAST_LOADED], runs[RouterPolicy.PREFIX_AFFINITY]
    assert affine.outcome.prefix_hit_tokens >= spread.outcome.prefix_hit_tokens
    assert affine.ttft_ms(90) > 1.2 * spread.ttft_ms(90)
