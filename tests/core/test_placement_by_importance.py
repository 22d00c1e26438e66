"""Placement of requests on saturated replicas, where they displace less important ones."""

from __future__ import annotations

import pytest

from goodput_core.placement import PLACEMENTS, Place, PlacementReason, PlacementState, ReplicaLoad
from goodput_core.slo.importance import Importance
from goodput_core.slo.targets import Targets

EACH = pytest.mark.parametrize("place", PLACEMENTS.values(), ids=PLACEMENTS.keys())
LOW, HIGH = Importance(0, 1, 500), Importance(1, 1, 500)


def full(name: str, displaceable: Importance | None, **fields: bool) -> ReplicaLoad:
    return ReplicaLoad(name=name, saturated=True, displaceable=displaceable, **fields)


@EACH
def test_a_saturated_replica_gets_a_request_that_is_more_important_than_a_waiting_one(
    place: Place,
) -> None:
    loads = [full("a", Importance(0, 2, 500)), full("b", LOW), full("c", None)]
    state, placement = place(PlacementState(), loads, (), 0, importance=HIGH)
    assert (placement.replica, placement.reason) == ("b", PlacementReason.DISPLACES)
    assert state.last == "b"


@EACH
@pytest.mark.parametrize(
    "importance",
    [
        pytest.param(LOW, id="equal"),
        pytest.param(Importance(-1, 9, 500), id="lower priority"),
        pytest.param(Importance(0, 1, 499), id="shorter target"),
        pytest.param(None, id="unknown"),
    ],
)
def test_other_requests_are_rejected(place: Place, importance: Importance | None) -> None:
    _, placement = place(PlacementState(), [full("a", LOW)], (), 0, importance=importance)
    assert (placement.replica, placement.reason) == (None, PlacementReason.ALL_SATURATED)


@EACH
def test_a_replica_that_is_not_saturated_is_preferred(place: Place) -> None:
    loads = [full("a", LOW), ReplicaLoad(name="b", in_flight=9)]
    _, placement = place(PlacementState(), loads, (), 0, importance=HIGH)
    assert placement.replica == "b"
    assert placement.reason is not PlacementReason.DISPLACES


@EACH
@pytest.mark.parametrize("state", [{"ready": False}, {"draining": True}], ids=str)
def test_a_replica_that_takes_no_requests_is_not_chosen(
    place: Place, state: dict[str, bool]
) -> None:
    _, placement = place(PlacementState(), [full("a", LOW, **state)], (), 0, importance=HIGH)
    assert (placement.replica, placement.reason) == (None, PlacementReason.NONE_READY)


def test_an_overdue_request_has_no_weight() -> None:
    targets = Targets(ttft_ns=100, e2e_ns=50)
    assert Importance.of(targets, priority=2, weight=7, waited_ns=50) == (2, 7, 50)
    assert Importance.of(targets, priority=2, weight=7, waited_ns=51) == (2, 0, 50)
    assert Importance.of(Targets(), priority=2, weight=7, waited_ns=10**15) > (2, 7, 10**15)
