"""Separate prefill and decode pools. A step takes 1 ms, a transfer 1 ms for each token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.errors import SpecError
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import SLOClass
from goodput_replay.emulation.pools import DisaggregatedFleet
from goodput_replay.emulation.settings import DecodePool, apply_topology, read_topology
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest


GB = 1_000_000_000


def split(
    fleet: FleetSettings, *, decoders: int = 1, link: int = GB, **changes: int
) -> FleetSettings:
    """Make the replicas the prefill pool, and add a decode pool with `changes` to its engines."""
    configure = msgspec.structs.replace(fleet.configure, **changes)
    return replace(
        fleet,
        profile=replace(fleet.profile, link_bytes_per_s=link),
        decode=DecodePool(replicas=decoders, configure=configure),
    )


def two(kv_blocks: int = 100, **changes: int) -> FleetSettings:
    """Return a fleet of one prefill and one decode replica."""
    return split(
        make_fleet(profile={"kv_bytes_per_token": 1_000_000, "kv_blocks": kv_blocks}), **changes
    )


def test_the_prefill_replica_emits_the_first_token_and_the_decode_replica_the_others() -> None:
    run = run_fleet([plan("a", 0, 8, 4)], two())
    # Eight tokens are transferred from 1 to 9 ms.
    assert run.tokens_ms("a") == [1, 10, 11, 12]
    record = run["a"]
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 4)
    assert record.replica == "chat-decode-0"
    assert record.end_ns == record.last_token_ns


def test_a_request_with_one_output_token_is_not_transferred() -> None:
    run = run_fleet([plan("a", 0, 8, 1), plan("b", 1, 8, 9, max_output_tokens=1)], two())
    assert run.tokens_ms("a") == [1]
    assert run.tokens_ms("b") == [2]
    assert {record.replica for record in run.records} == {"chat-prefill-0"}


def test_a_link_transfers_one_request_at_a_time() -> None:
    run = run_fleet([plan("a", 0, 8, 3), plan("b", 0, 8, 3)], two())
    assert run.tokens_ms("a") == [1, 10, 11]
    assert run.tokens_ms("b") == [1, 18, 19]


def test_requests_stay_on_the_prefill_replica_while_the_decode_replica_is_full() -> None:
    # Two prompts fill the memory of the prefill replica; one request decodes at a time.
    requests = [plan(name, 0, 32, 3) for name in ("a", "b", "c")]
    run = run_fleet(requests, two(kv_blocks=4, max_num_seqs=1))
    assert run.tokens_ms("a") == [1, 34, 35]
    assert run.tokens_ms("b") == [1, 35 + 33, 35 + 34], "transferred after the end of a"
    # The prompt of c is computed once the blocks of a are free, at 33 ms.
    assert run.tokens_ms("c") == [34, 69 + 33, 69 + 34]


@pytest.mark.parametrize(
    ("cancel_ms", "tokens"),
    [(0.5, 0), (5, 1), (33.5, 1), (34.5, 2), (50, 1)],
    ids=["prefilling", "in transfer", "transferred", "decoding", "queued"],
)
def test_a_request_can_be_cancelled_at_every_stage_and_frees_its_blocks(
    cancel_ms: float, tokens: int
) -> None:
    queued = cancel_ms == 50
    requests = [
        plan("a", 0, 32, 40, cancel_ms=None if queued else cancel_ms),
        plan("b", 0.25, 32, 20, cancel_ms=cancel_ms if queued else None),
    ]
    records: dict[str, RequestRecord] = {}
    built = two(kv_blocks=8, max_num_seqs=1)
    assert built.decode is not None
    fleet = DisaggregatedFleet(built, built.decode, lambda _, r: records.update({r.request_id: r}))
    fleet.run(iter(requests), ())
    cancelled, other = ("b", "a") if queued else ("a", "b")
    assert records[cancelled].outcome is Outcome.CANCELLED
    assert records[cancelled].output_tokens == tokens
    assert records[other].outcome is Outcome.OK
    assert records[other].output_tokens == (40 if queued else 20)
    _assert_idle(fleet)


def _assert_idle(fleet: DisaggregatedFleet) -> None:
    for replica in fleet._all_replicas():
        replica.settle(1 << 60)
        scheduler = replica.core.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_work
        assert replica.in_flight == 0


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 60), st.integers(1, 30), st.integers(0, 400)),
        min_size=1,
        max_size=12,
    ),
    depth=st.integers(0, 2),
    blocks=st.integers(6, 14),
    width=st.integers(1, 4),
)
@settings(max_examples=examples(40), deadline=None)
def test_every_request_ends_and_frees_its_blocks_with_and_without_fast_forward(
    *,
    rows: list[tuple[int, int, int, int]],
    depth: int,
    blocks: int,
    width: int,
) -> None:
    requests, at_ms = [], 0
    for number, (wait_ms, prompt, output, cancel_ms) in enumerate(rows):
        at_ms += wait_ms
        requests.append(plan(f"r{number}", at_ms, prompt, output, cancel_ms=100 + cancel_ms))
    found: list[list[RequestRecord]] = []
    for fast_forward in (True, False):
        plain = make_fleet(
            replicas=2,
            depth=depth,
            token_budget=64,
            fast_forward=fast_forward,
            profile={"kv_blocks": blocks, "kv_bytes_per_token": 100_000},
        )
        built = split(plain, decoders=2, max_num_seqs=width)
        assert built.decode is not None
        records: list[RequestRecord] = []
        running = DisaggregatedFleet(built, built.decode, lambda _, r: records.append(r))  # noqa: B023
        running.run(iter(requests), ())
        _assert_idle(running)
        found.append(records)
    assert found[0] == found[1]
    assert {r.request_id for r in found[0]} == {r.request_id for r in requests}
    for record in found[0]:
        if record.outcome is Outcome.OK:
            assert record.output_tokens == record.pinned_output_tokens


# --- where two pools help and where they hurt -------------------------------------------------
TIGHT = SLOClasses(classes=(SLOClass(name="fast", ttft_ms=2_000, tpot_ms=9),), default="fast")


def constant_load(*, every_ms: float, prompt: int, output: int) -> list[PlannedRequest]:
    return [plan(f"r{i}", i * every_ms, prompt, output) for i in range(150)]


def test_long_prompts_with_tight_tpot_targets_benefit_from_two_pools() -> None:
    requests = constant_load(every_ms=55, prompt=4_000, output=60)
    common: dict[str, Any] = {
        "device": "llama-3-8b-h100",
        "policy": "vllm",
        "slo": TIGHT,
        "token_budget": 4096,
    }
    combined = run_fleet(requests, make_fleet(replicas=4, **common))
    apart = run_fleet(requests, split(make_fleet(replicas=3, **common), decoders=1, link=50 * GB))
    # A prompt in one chunk delays the decodes on its replica by 118 ms; two pools avoid this.
    assert combined.attained(TIGHT) < 0.1
    assert apart.attained(TIGHT) == 1.0


def test_short_prompts_with_long_outputs_are_slower_with_two_pools() -> None:
    requests = constant_load(every_ms=10, prompt=32, output=400)
    common: dict[str, Any] = {"device": "llama-3-8b-h100", "policy": "vllm", "slo": TIGHT}
    common |= {"max_num_seqs": 40}
    combined = run_fleet(requests, make_fleet(replicas=4, **common))
    apart = run_fleet(requests, split(make_fleet(replicas=2, **common), decoders=2, link=50 * GB))
    assert combined.attained(TIGHT) == 1.0
    # The prefill pool is almost idle, and the decode pool has half of the slots.
    assert apart.attained(TIGHT) < 0.7
    assert apart.outcome.end_ns > 1.4 * combined.outcome.end_ns


def test_a_topology_file_is_read_and_validated(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "prefill: {replicas: 3, tokenBudget: 9000}\n"
        "decode: {replicas: 2, maxNumSeqs: 7}\nlink: {gbPerSecond: 25}\n"
    )
    built = apply_topology(make_fleet(), read_topology(path))
    assert built.replicas == 3
    assert (built.configure.token_budget, built.configure.max_token_budget) == (9000, 9000)
    assert built.configure.max_num_seqs == 64
    assert built.decode is not None
    assert (built.decode.replicas, built.decode.configure.max_num_seqs) == (2, 7)
    assert built.decode.configure.token_budget == 1024
    assert built.profile.link_bytes_per_s == 25 * GB
    path.write_text("prefill: {replicas: 3}\ndecode: {replicas: 0}\n")
    with pytest.raises(SpecError, match=r"two.yaml: decode.replicas: must lie in 1 to 1000, not 0"):
        read_topology(path)
