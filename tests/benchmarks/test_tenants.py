"""Tenants beside one that floods, in virtual time."""

from __future__ import annotations

from benchmarks.tenants import LOADS, serve

LOAD = LOADS["equal requests *"]


def test_two_tenants_keep_beside_a_flood_what_they_keep_alone() -> None:
    alone = serve(
        {name: load for name, load in LOAD.items() if not load.is_flood},
        shares=False,
        duration_s=20,
    )
    beside = serve(LOAD, shares=True, duration_s=20)
    for name, result in alone.items():
        assert beside[name].total == result.total
        # Within one percentage point.
        assert beside[name].good >= result.good - 0.01 * result.total
        assert not beside[name].rejected
    assert beside["flood"].rejected > 0.7 * beside["flood"].total
    # Work-conserving: the flood gets at least what the others leave of a third each.
    assert beside["flood"].tokens > sum(beside[name].tokens for name in alone) / 2


def test_without_shares_the_flood_takes_the_promises_of_all() -> None:
    unshared = serve(LOAD, shares=False, duration_s=8)
    assert unshared["a"].good < 0.3 * unshared["a"].total


def test_the_share_of_an_idle_tenant_is_used_by_the_others() -> None:
    busy = serve(LOADS["no flood"], shares=True, duration_s=20)
    assert all(result.good >= 0.99 * result.total for result in busy.values())
