"""The choice of source and destination of a migration."""

from __future__ import annotations

import pytest

from goodput_replay.emulation.migration import Occupancy, pair_up, shrinks_gap


def replica(name: str, free: int, requests: int, *, demanded: int = 0) -> Occupancy:
    return Occupancy(name=name, free_blocks=free, demanded_blocks=demanded, requests=requests)


def test_the_least_free_replica_is_paired_with_the_freest() -> None:
    replicas = [replica("a", 80, 2), replica("b", 2, 2), replica("c", 4, 2), replica("d", 60, 2)]
    pairs = pair_up(replicas, below_blocks=3)
    assert [(source.name, target.name) for source, target in pairs] == [("b", "a"), ("c", "d")]


@pytest.mark.parametrize(
    ("below_blocks", "pairs"), [(1, 0), (2, 1), (1_000, 1)], ids=["never", "below", "always"]
)
def test_a_replica_is_a_source_only_below_the_threshold(below_blocks: int, pairs: int) -> None:
    replicas = [replica("a", 3, 3), replica("b", 90, 3), replica("c", 30, 3)]
    assert len(pair_up(replicas, below_blocks=below_blocks)) == pairs


def test_a_replica_with_a_blocked_queue_is_a_source() -> None:
    blocked = replica("a", 90, 3, demanded=120)
    assert blocked.freeness == -10
    assert pair_up([blocked, replica("b", 9, 3)], below_blocks=3) == [(blocked, replica("b", 9, 3))]


@pytest.mark.parametrize(
    ("blocks", "shrinks"), [(10, True), (70, False)], ids=["small", "most of the blocks"]
)
def test_a_move_must_shrink_the_gap(blocks: int, shrinks: bool) -> None:
    assert shrinks_gap(replica("a", 20, 4), replica("b", 80, 4), blocks) is shrinks


def test_a_difference_of_one_request_causes_no_move() -> None:
    two, one = replica("a", 80, 2), replica("b", 90, 1)
    assert not shrinks_gap(two, one, 10)
