"""Tenants beside one that floods, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.tenants import LOADS, serve


@pytest.mark.parametrize(
    "name",
    [
        "very long outputs",
        "pulses",
        "long requests beside pulses of other tenants",
        "chat and an agent with a cached prefix",
    ],
)
def test_a_tenant_keeps_beside_a_flood_what_it_keeps_alone(name: str) -> None:
    load = LOADS[name]
    alone, beside = serve(load, floods=False)["a"], serve(load)["a"]
    assert beside.total == alone.total
    assert beside.percent >= alone.percent - 2
    assert not beside.rejected


def test_without_shares_a_flood_takes_the_promises_of_others() -> None:
    assert serve(LOADS["very long outputs"], shares=False)["a"].percent < 30


@pytest.mark.parametrize(
    "name",
    [
        "mixed lengths without a flood",
        "a large tenant in free capacity",
        "bursts beside long outputs without a flood",
    ],
)
def test_nothing_is_rejected_while_the_capacity_suffices(name: str) -> None:
    results = serve(LOADS[name])
    assert not sum(result.rejected for result in results.values())
    assert all(result.percent > 99 for result in results.values())


def test_the_capacity_that_others_leave_is_used_by_the_flood() -> None:
    load = LOADS["a tenant with bursts"]
    small = replace(
        load, replicas=1, tenants={**load.tenants, "a": replace(load.tenants["a"], per_s=5)}
    )
    results = serve(small)
    # One replica sustains about 27 of these requests per second.
    assert results["flood"].good > 30 * 15
    assert results["a"].percent >= 98
