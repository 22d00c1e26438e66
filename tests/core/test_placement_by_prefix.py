"""Placement by known prefixes within a bounded load."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.placement import (
    MAX_KEYS,
    PLACEMENTS,
    KnownPrefixes,
    PlacementReason,
    PlacementState,
    ReplicaLoad,
    most_in_flight,
)
from goodput_core.placement.blockhash import block_hashes
from goodput_core.spec.choices import RouterPolicy

PROMPTS = st.lists(st.integers(0, 2), max_size=12)


def keys_of(*tokens: int) -> tuple[int, ...]:
    return block_hashes(tokens, 1)


class Fleet:
    """Replicas whose requests end on demand."""

    def __init__(self, *names: str) -> None:
        self.in_flight = dict.fromkeys(names, 0)
        self.state = PlacementState()
        self.reasons: list[PlacementReason] = []

    def place(self, *tokens: int) -> str:
        return self.place_keys(keys_of(*tokens))

    def place_keys(self, keys: tuple[int, ...]) -> str:
        loads = [ReplicaLoad(name=name, in_flight=n) for name, n in self.in_flight.items()]
        self.state, placement = PLACEMENTS[RouterPolicy.PREFIX_AFFINITY](self.state, loads, keys, 0)
        assert placement.replica is not None
        self.reasons.append(placement.reason)
        self.in_flight[placement.replica] += 1
        return placement.replica

    def end(self, name: str) -> None:
        self.in_flight[name] -= 1

    def serve(self, *tokens: int) -> str:
        """Place a request that ends before the next one arrives."""
        name = self.place(*tokens)
        self.end(name)
        return name


def test_the_next_turn_of_a_conversation_is_placed_on_the_same_replica() -> None:
    fleet = Fleet("a", "b", "c")
    first = [fleet.serve(session, 1, 2) for session in range(6)]
    assert set(fleet.reasons) == {PlacementReason.LEAST_LOADED}
    assert first == ["a", "b", "c"] * 2
    assert [fleet.serve(session, 1, 2, 3, 4) for session in range(6)] == first
    assert set(fleet.reasons[6:]) == {PlacementReason.KNOWN_PREFIX}


def test_the_replica_with_the_longest_known_prefix_is_selected() -> None:
    fleet = Fleet("a", "b")
    assert fleet.serve(1, 2) == "a"
    fleet.in_flight["a"] = 9  # over the bound: the rest goes to b, which then knows more
    assert fleet.place(1, 2, 3, 4) == "b"
    assert fleet.reasons[-1] is PlacementReason.BOUNDED_LOAD
    fleet.in_flight = {"a": 0, "b": 0}
    assert fleet.serve(1, 2, 3, 9) == "b"
    assert fleet.serve(1, 2, 9) in {"a", "b"}, "two blocks were sent to both"


def test_of_replicas_with_equal_prefixes_the_emptier_is_selected() -> None:
    fleet = Fleet("a", "b")
    fleet.state.prefixes.add("a", keys_of(1, 2), ["a", "b"])
    fleet.state.prefixes.add("b", keys_of(1, 2), ["a", "b"])
    fleet.in_flight = {"a": 3, "b": 2}
    assert fleet.place(1, 2, 5) == "b"


@given(prompts=st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=30))
def test_unknown_prompts_are_spread_by_load(prompts: list[list[int]]) -> None:
    fleet, state = Fleet("a", "b", "c"), PlacementState()
    for index, prompt in enumerate(prompts):
        loads = [ReplicaLoad(name=name, in_flight=n) for name, n in fleet.in_flight.items()]
        state, placement = PLACEMENTS[RouterPolicy.LEAST_LOADED](state, loads, (), 0)
        assert fleet.place(1_000 + index, *prompt) == placement.replica


@given(
    replicas=st.integers(1, 9),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 99), PROMPTS), max_size=120),
)
def test_no_replica_exceeds_the_bound(
    replicas: int, steps: list[tuple[bool, int, list[int]]]
) -> None:
    fleet = Fleet(*(f"r{i}" for i in range(replicas)))
    for comes, index, prompt in steps:
        running = [name for name, count in fleet.in_flight.items() for _ in range(count)]
        if comes:
            most = most_in_flight(len(running), replicas)
            assert 4 * replicas * (most - 1) < 5 * (len(running) + 1) <= 4 * replicas * most
            assert fleet.in_flight[fleet.place(7, *prompt)] <= most
        elif running:
            fleet.end(running[index % len(running)])


@given(replicas=st.integers(1, 9), requests=st.integers(0, 150))
def test_a_hot_prefix_exceeds_the_bound_on_no_replica(replicas: int, requests: int) -> None:
    fleet = Fleet(*(f"r{i}" for i in range(replicas)))
    for placed in range(1, requests + 1):
        fleet.place(1, 2, 3)
        assert max(fleet.in_flight.values()) <= -(-5 * placed // (4 * replicas))


def test_a_hot_prefix_makes_loads_less_even_while_it_spreads() -> None:
    # The replica with the prefix has more requests than the others, up to the bound.
    fleet, even = Fleet("a", "b", "c", "d"), Fleet("a", "b", "c", "d")
    fleet.serve(1, 2, 3)
    for index in range(100):
        fleet.place(1, 2, 3, 10 + index)
        even.place(10 + index)
    assert set(even.in_flight.values()) == {25}
    assert max(fleet.in_flight.values()) >= max(even.in_flight.values())


def test_a_removed_replica_moves_only_its_own_prompts() -> None:
    fleet = Fleet("a", "b", "c", "d")
    before = {session: fleet.serve(session, 1) for session in range(40)}
    del fleet.in_flight["b"]
    after = {session: fleet.serve(session, 1, 2) for session in range(40)}
    moved = {session for session in before if after[session] != before[session]}
    assert moved == {session for session, name in before.items() if name == "b"}


def test_a_new_replica_gets_new_prompts_only() -> None:
    fleet = Fleet("a", "b")
    before = {session: fleet.serve(session, 1) for session in range(40)}
    fleet.in_flight["c"] = 0
    assert {session: fleet.serve(session, 1, 2) for session in range(40)} == before
    fresh = [fleet.serve(session, 1) for session in range(100, 130)]
    assert fresh.count("c") == 10


def test_only_the_first_keys_of_a_prompt_are_used() -> None:
    fleet = Fleet("a", "b")
    long = tuple(range(5 * MAX_KEYS))
    fleet.end(fleet.place_keys(long))
    assert len(fleet.state.prefixes) == MAX_KEYS
    assert fleet.place_keys((*long[:MAX_KEYS], -1)) == "a"


@given(
    prompts=st.lists(st.tuples(st.sampled_from("ab"), PROMPTS), max_size=40),
    looked_up=PROMPTS,
    most=st.integers(12, 30),
)
def test_the_known_keys_of_a_prompt_are_its_first_ones(
    prompts: list[tuple[str, list[int]]], looked_up: list[int], most: int
) -> None:
    known = KnownPrefixes(most_of_one=most)
    recent: dict[str, list[int]] = {"a": [], "b": []}
    for name, prompt in prompts:
        keys = keys_of(*prompt)
        known.add(name, keys, "ab")
        recent[name] = [k for k in recent[name] if k not in keys] + list(reversed(keys))
        del recent[name][:-most]
        assert len(known) == sum(map(len, recent.values()))
    keys = keys_of(*looked_up)
    for name, held in recent.items():
        length = known.length(name, keys)
        assert [key in held for key in keys] == [i < length for i in range(len(keys))]


def test_memory_is_bounded_while_replicas_change() -> None:
    random, known = Random(5), KnownPrefixes(most_of_one=2_000, most_of_all=4_000)
    for generation in range(20):
        names = [f"r{generation}-{i}" for i in range(6)]
        for index in range(50):
            keys = [random.getrandbits(64) for _ in range(100)]
            known.add(names[index % 6], keys, names)
        assert len(known) <= 2 * 4_000
    assert len(known) > 2_000


@pytest.mark.parametrize("keys", [(), (1,), (1, 2)], ids=len)
def test_an_unknown_replica_has_no_known_keys(keys: tuple[int, ...]) -> None:
    assert KnownPrefixes().length("a", keys) == 0
