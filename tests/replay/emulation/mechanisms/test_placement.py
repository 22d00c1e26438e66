"""Placement laws in a fleet: each where it is meant to help, and where it does not.

Sources: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 2001;
for prefixes, Mirrokni et al., "Consistent Hashing with Bounded Loads", SODA 2018, and Srivatsa et
al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", 2024.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from goodput_core.spec.choices import RouterPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.replay.emulation.conftest import Run

    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest

    Planned = Callable[..., PlannedRequest]
    Settings = Callable[..., FleetSettings]
    RunFleet = Callable[..., Run]


def test_two_choices_avoid_the_queues_that_turns_build(
    planned: Planned, fleet: Settings, run_fleet: RunFleet
) -> None:
    # One answer in ten is long: turns put the next request behind it all the same.
    draw = random.Random(3)
    requests, at_ms = [], 0.0
    for i in range(600):
        at_ms += draw.expovariate(1 / 6.0)
        requests.append(planned(f"r{i}", at_ms, 16, 200 if draw.random() < 0.1 else 8))
    runs = {
        law: run_fleet(requests, fleet(replicas=8, placement=law, max_num_seqs=1))
        for law in (RouterPolicy.ROUND_ROBIN, RouterPolicy.POWER_OF_TWO)
    }
    turns, two = runs[RouterPolicy.ROUND_ROBIN], runs[RouterPolicy.POWER_OF_TWO]
    assert two.ttft_ms(95) < 0.7 * turns.ttft_ms(95)


def test_two_choices_lose_to_turns_where_everything_is_equal(
    planned: Planned, fleet: Settings, run_fleet: RunFleet
) -> None:
    # Evenly spaced and equally long: in turn, everybody finds an idle replica.
    requests = [planned(f"r{i}", i * 2.1, 16, 16) for i in range(400)]
    runs = {
        law: run_fleet(requests, fleet(replicas=8, placement=law, max_num_seqs=1))
        for law in (RouterPolicy.ROUND_ROBIN, RouterPolicy.POWER_OF_TWO)
    }
    assert runs[RouterPolicy.ROUND_ROBIN].ttft_ms(99) <= 2
    assert runs[RouterPolicy.POWER_OF_TWO].ttft_ms(99) > 5


def test_affinity_sends_sessions_to_where_they_are_known(
    planned: Planned, fleet: Settings, run_fleet: RunFleet
) -> None:
    draw = random.Random(4)
    requests = []
    for i in range(300):
        session, turn = draw.randrange(30), i // 30
        prompt = 1_600 + 160 * turn
        hashes = range(session * 1000, session * 1000 + prompt // 16)
        requests.append(planned(f"r{i}", i * 25, prompt, 30, hashes=hashes))
    runs = {
        law: run_fleet(requests, fleet(replicas=4, placement=law, device="llama-3-8b-h100"))
        for law in (RouterPolicy.LEAST_LOADED, RouterPolicy.PREFIX_AFFINITY)
    }
    spread, affine = runs[RouterPolicy.LEAST_LOADED], runs[RouterPolicy.PREFIX_AFFINITY]
    assert affine.outcome.prefix_hit_tokens > 1.2 * spread.outcome.prefix_hit_tokens
    assert affine.ttft_ms(50) < 0.8 * spread.ttft_ms(50)


def test_affinity_crowds_a_hot_prefix(
    planned: Planned, fleet: Settings, run_fleet: RunFleet
) -> None:
    # Everybody shares a greeting of 64 tokens before 2,000 of their own: a hit saves 2 ms, and
    # going where it is means waiting behind the others who went there.
    requests = [planned(f"r{i}", i * 25, 2_064, 60, hashes=range(4)) for i in range(200)]
    runs = {
        law: run_fleet(requests, fleet(replicas=4, placement=law, device="llama-3-8b-h100"))
        for law in (RouterPolicy.LEAST_LOADED, RouterPolicy.PREFIX_AFFINITY)
    }
    spread, affine = runs[RouterPolicy.LEAST_LOADED], runs[RouterPolicy.PREFIX_AFFINITY]
    assert affine.outcome.prefix_hit_tokens >= spread.outcome.prefix_hit_tokens
    assert affine.ttft_ms(90) > 1.2 * spread.ttft_ms(90)
