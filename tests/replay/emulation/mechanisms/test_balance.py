"""Who gives to whom, by numbers alone."""

from __future__ import annotations

import pytest

from goodput_replay.emulation.migration import Occupancy, pair_up, shrinks_gap


def replica(name: str, free: int, requests: int, *, demanded: int = 0) -> Occupancy:
    return Occupancy(name=name, free_blocks=free, demanded_blocks=demanded, requests=requests)


def test_the_least_free_is_paired_with_the_most_free() -> None:
    replicas = [replica("a", 80, 2), replica("b", 2, 2), replica("c", 4, 2), replica("d", 60, 2)]
    pairs = pair_up(replicas, below_blocks=3)
    assert [(source.name, target.name) for source, target in pairs] == [("b", "a"), ("c", "d")]


@pytest.mark.parametrize(
    ("below_blocks", "pairs"), [(1, 0), (2, 1), (1_000, 1)], ids=["never", "below", "always"]
)
def test_a_replica_gives_only_below_its_threshold(below_blocks: int, pairs: int) -> None:
    replicas = [replica("a", 3, 3), replica("b", 90, 3), replica("c", 30, 3)]
    assert len(pair_up(replicas, below_blocks=below_blocks)) == pairs


def test_who_waits_for_room_makes_its_replica_give() -> None:
    waits = replica("a", 90, 3, demanded=120)
    assert waits.freeness == -10
    assert pair_up([waits, replica("b", 9, 3)], below_blocks=3) == [(waits, replica("b", 9, 3))]


@pytest.mark.parametrize(
    ("blocks", "shrinks"), [(10, True), (70, False)], ids=["small", "most of what is there"]
)
def test_a_move_must_bring_the_two_closer(blocks: int, shrinks: bool) -> None:
    assert shrinks_gap(replica("a", 20, 4), replica("b", 80, 4), blocks) is shrinks


def test_one_more_or_less_is_not_moved_back_and_forth() -> None:
    two, one = replica("a", 80, 2), replica("b", 90, 1)
    assert not shrinks_gap(two, one, 10)
