"""Live migration in a fleet: its benefit, its cost, and the completeness of every output.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving", OSDI 2024:
moving requests while they decode removes fragmentation and queueing, and lowers preemptions.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.errors import SpecError
from goodput_core.slo.record import Outcome
from goodput_core.spec.choices import Policy, RouterPolicy
from goodput_replay.emulation.fleet import VirtualFleet
from goodput_replay.emulation.migration import Migration
from goodput_replay.emulation.settings import MigrationSpec, apply_topology, read_topology

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest


BLOCK_BYTES = 16 * 131_072


def with_migration(
    fleet: FleetSettings, *, below_blocks: int = 3, blocks_per_ms: float = 24
) -> FleetSettings:
    """Return the settings with live migration."""
    rate = round(blocks_per_ms * 1000 * BLOCK_BYTES)
    return replace(
        fleet,
        profile=replace(fleet.profile, link_bytes_per_s=rate),
        migration=MigrationSpec(below_blocks=below_blocks, poll_ms=50),
    )


def two(kv_blocks: int = 100, **changes: Any) -> FleetSettings:
    """Return a fleet of two replicas with round-robin placement."""
    return make_fleet(replicas=2, profile={"kv_blocks": kv_blocks}, **changes)


def test_migration_defragments_memory_for_a_long_prompt() -> None:
    # Six growing requests of 40 blocks on each replica leave 150 blocks free on each; the long
    # prompt needs 188 blocks on one.
    requests = [plan(f"r{i}", 0, 640, 900) for i in range(12)]
    requests.append(plan("long", 10, 3_000, 5))
    stay, move = run_fleet(requests, two(400)), run_fleet(requests, with_migration(two(400)))
    assert stay.ttft_ms(100, "long") > 800, "it waits for the end of another request"
    assert move.ttft_ms(100, "long") < 300, "a few polls later"
    assert move.outcome.migrations >= 1


def test_migration_reduces_preemptions_if_outputs_grow_unevenly() -> None:
    # Placement does not know output lengths: all long ones are on one of two replicas.
    requests = [plan(f"r{i}", 20 * i, 60, 600 if i % 2 == 0 else 20) for i in range(20)]
    stay, move = run_fleet(requests, two(200)), run_fleet(requests, with_migration(two(200)))
    assert stay.outcome.preemptions > 0
    assert move.outcome.preemptions < stay.outcome.preemptions / 2
    assert move.outcome.end_ns < stay.outcome.end_ns
    assert move.tbt_ms(100) < stay.tbt_ms(100)


def test_migration_between_replicas_with_enough_memory_only_adds_pauses() -> None:
    # With enough memory no request waits or is evicted. A threshold that is always exceeded then
    # only pauses requests while their last blocks are copied.
    draw = random.Random(6)
    requests, at_ms = [], 0.0
    for i in range(200):
        at_ms += draw.expovariate(1 / 20)
        requests.append(plan(f"r{i}", at_ms, draw.randint(50, 800), draw.randint(20, 400)))
    plain = make_fleet(
        replicas=4, placement=RouterPolicy.LEAST_LOADED, profile={"kv_blocks": 2_000}
    )
    stay = run_fleet(requests, plain)
    move = run_fleet(requests, with_migration(plain, below_blocks=10_000, blocks_per_ms=1))
    assert move.outcome.migrations > 10
    assert move.ttft_ms(99) == pytest.approx(stay.ttft_ms(99), rel=0.02)
    assert stay.tbt_ms(100) == 1
    assert move.tbt_ms(100) >= 10, "up to 16 blocks at a block a millisecond, in one pause"


def test_a_request_pauses_only_for_its_last_blocks() -> None:
    # 40 blocks at 1 block/ms are copied while decoding continues. In these 40 ms 3 blocks are
    # filled, and the request pauses only for these.
    requests = [plan("a", 0, 640, 400), plan("b", 0, 16, 2), plan("c", 0, 640, 400)]
    requests.append(plan("d", 1, 16, 2))
    run = run_fleet(requests, with_migration(two(), below_blocks=30, blocks_per_ms=1))
    assert run.outcome.migrations == 1
    assert {run["a"].replica, run["c"].replica} == {"chat-0", "chat-1"}
    moved = run["a"] if run["a"].replica == "chat-1" else run["c"]
    assert moved.output_tokens == 400
    assert max(moved.gaps_us) in range(3_000, 6_000)


def test_a_move_that_does_not_converge_is_aborted() -> None:
    # A block is copied in 24 ms and filled in 16, so each stage has more blocks to copy.
    requests = [plan("a", 0, 288, 4_000), plan("b", 0, 16, 2), plan("c", 0, 288, 4_000)]
    settings = two(1_000)
    stay = run_fleet(requests, settings)
    move = run_fleet(requests, with_migration(settings, below_blocks=10_000, blocks_per_ms=1 / 24))
    assert move.outcome.migrations == 0
    assert move.outcome.migrations_aborted >= 2, "one after three stages, one at the end"
    assert move.records == stay.records, "no effect on the requests"


@pytest.mark.parametrize("cancel_ms", [51.5, 70.5, 91.5, 93.5, 200.5])
def test_a_request_can_be_cancelled_at_every_stage_of_its_move(cancel_ms: float) -> None:
    requests = [
        plan("a", 0, 640, 400, cancel_ms=cancel_ms),
        plan("b", 0, 16, 2),
        plan("c", 0, 640, 400, cancel_ms=cancel_ms),
    ]
    records, _ = _run_and_check(requests, with_migration(two(), below_blocks=30, blocks_per_ms=1))
    cancelled = [r for r in records if r.outcome is Outcome.CANCELLED]
    assert {r.request_id for r in cancelled} == {"a", "c"}
    assert all(r.output_tokens > 40 for r in cancelled)


def _run_and_check(
    requests: Iterable[PlannedRequest], settings: FleetSettings
) -> tuple[list[RequestRecord], Migration]:
    """Run, and check that no block is in use afterwards."""
    assert settings.migration is not None
    records: list[RequestRecord] = []
    fleet = VirtualFleet(settings, lambda _, record: records.append(record))
    migration = Migration(settings.migration, settings.profile)
    fleet.run(iter(requests), [migration])
    migration.close()
    for replica in fleet.replicas:
        replica.run(1 << 62)
        replica.core.scheduler.check_integrity()
        assert not replica.core.scheduler.has_work
    return records, migration


def test_a_topology_file_sets_the_rules_of_migration(tmp_path: Path) -> None:
    path = tmp_path / "move.yaml"
    path.write_text("migration: {belowBlocks: 8}\nlink: {gbPerSecond: 25}\n")
    built = apply_topology(make_fleet(replicas=3), read_topology(path))
    assert built.replicas == 3, "the manifest's"
    assert built.decode is None
    assert built.migration == MigrationSpec(below_blocks=8, poll_ms=50)
    assert built.profile.link_bytes_per_s == 25_000_000_000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("link: {gbPerSecond: 25}\n", "prefill: is required"),
        ("prefill: {replicas: 1}\n", "decode: is required"),
        (
            "migration: {}\nprefill: {replicas: 1}\n",
            "prefill: is mutually exclusive with migration",
        ),
        ("migration: {pollMs: 0}\n", "migration.pollMs: must lie in 1 to 60000, not 0"),
    ],
    ids=["empty", "one pool", "both", "poll interval of zero"],
)
def test_a_topology_has_either_two_pools_or_migration(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "move.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=problem):
        read_topology(path)


WORK = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.integers(1, 700),
        st.integers(1, 300),
        st.none() | st.integers(1, 300),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=examples(40), deadline=None)
@given(
    work=WORK,
    depth=st.integers(0, 2),
    below_blocks=st.sampled_from([3, 1_000]),
    blocks_per_ms=st.sampled_from([0.05, 1, 24]),
    preemption=st.sampled_from(["recompute", "swap"]),
    policy=st.sampled_from(sorted(Policy)),
)
def test_every_request_is_complete_and_frees_its_blocks_with_and_without_fast_forward(
    work: list[tuple[int, int, int, int | None]],
    depth: int,
    below_blocks: int,
    blocks_per_ms: float,
    preemption: str,
    policy: str,
) -> None:
    requests = [
        plan(f"r{i}", at, prompt, output, cancel_ms=cancel)
        for i, (at, prompt, output, cancel) in enumerate(sorted(work, key=lambda w: w[0]))
    ]
    plain = make_fleet(
        replicas=3,
        profile={"kv_blocks": 70},
        depth=depth,
        max_num_seqs=6,
        preemption=preemption,
        policy=policy,
        swap_space_bytes=40 * BLOCK_BYTES,
    )
    both = [
        _run_and_check(
            requests,
            replace(
                with_migration(plain, below_blocks=below_blocks, blocks_per_ms=blocks_per_ms),
                fast_forward=fast_forward,
            ),
        )[0]
        for fast_forward in (True, False)
    ]
    assert both[0] == both[1]
    assert len(both[0]) == len(requests)
    for record in both[0]:
        if record.outcome is Outcome.OK:
            assert record.output_tokens == record.pinned_output_tokens
        assert all(gap_us >= 0 for gap_us in record.gaps_us)
