"""Small fleets computed by hand: a step takes 1 ms and emits one token of each request in it."""

from __future__ import annotations

import pickle
from copy import copy
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import pytest
from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.scheduler.admission import Rejection
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest
    from goodput_replay.emulation.fleet import VirtualFleet
    from goodput_replay.emulation.replica import VirtualReplica


def test_a_request_alone_emits_one_token_a_step() -> None:
    run = run_fleet([plan("a", 5, prompt=100, output=4)], make_fleet())
    assert run.tokens_ms("a") == [6, 7, 8, 9]
    record = run["a"]
    assert record.outcome is Outcome.OK
    assert record.sent_ns == record.scheduled_ns == 5 * NS_PER_MS
    assert record.end_ns == record.last_token_ns
    assert (record.input_tokens, record.output_tokens) == (100, 4)
    assert record.replica == "chat-0"
    assert record.cached_tokens == 0


def test_a_long_prompt_takes_one_step_per_chunk() -> None:
    requests = [plan("decodes", 0, 10, 6), plan("prompt", 1, 250, 2)]
    run = run_fleet(requests, make_fleet(token_budget=101))
    assert run.tokens_ms("decodes") == [1, 2, 3, 4, 5, 6]
    # Three chunks of 100, 100 and 50 beside the decodes, from the step that starts at 1 ms.
    assert run.tokens_ms("prompt") == [4, 5]


def test_a_request_that_arrives_during_a_step_joins_the_next_one() -> None:
    run = run_fleet([plan("a", 0, 8, 3), plan("b", 0.5, 8, 1), plan("c", 1, 8, 1)], make_fleet())
    assert run.tokens_ms("a") == [1, 2, 3]
    assert run.tokens_ms("b") == [2]
    assert run.tokens_ms("c") == [2], "an arrival at the end of a step is planned with it"


def test_records_are_ordered_by_end_time() -> None:
    requests = [plan("long", 0, 8, 9), plan("short", 0, 8, 2), plan("late", 30, 8, 1)]
    run = run_fleet(requests, make_fleet(replicas=2))
    assert [r.request_id for r in run.records] == ["short", "long", "late"]
    assert run.outcome.end_ns == 31 * NS_PER_MS
    assert run.outcome.replica_ns == 2 * 31 * NS_PER_MS
    assert (run.outcome.requests, run.outcome.peak_in_flight) == (3, 2)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (RouterPolicy.ROUND_ROBIN, ["chat-0", "chat-1", "chat-0", "chat-1"]),
        (RouterPolicy.LEAST_LOADED, ["chat-0", "chat-1", "chat-1", "chat-1"]),
    ],
    ids=["round-robin", "least-loaded"],
)
def test_requests_are_placed_by_the_placement_policy(
    placement: RouterPolicy,
    expected: list[str],
) -> None:
    requests = [plan("long", 0, 8, 100)]
    requests += [plan(f"r{at}", at, 8, 2) for at in (10, 20, 30)]
    run = run_fleet(requests, make_fleet(replicas=2, placement=placement))
    names = [request.request_id for request in requests]
    assert [run[name].replica for name in names] == expected


def test_random_placement_depends_on_the_seed() -> None:
    requests = [plan(f"r{i}", i * 10, 8, 2) for i in range(30)]

    def served(seed: int) -> list[str]:
        settings = make_fleet(replicas=5, placement=RouterPolicy.POWER_OF_TWO, seed=seed)
        return [record.replica for record in run_fleet(requests, settings).records]

    assert served(1) == served(1)
    assert served(1) != served(2)


def test_prefix_affinity_places_a_prompt_on_the_replica_that_cached_its_prefix() -> None:
    requests = [
        plan(f"r{i}", i * 10, 200, 2, hashes=range(i % 3 * 100, i % 3 * 100 + 12))
        for i in range(12)
    ]
    affine = run_fleet(requests, make_fleet(replicas=3, placement=RouterPolicy.PREFIX_AFFINITY))
    for i in range(3, 12):
        assert affine[f"r{i}"].replica == affine[f"r{i % 3}"].replica
        assert affine[f"r{i}"].cached_tokens == 12 * 16
    assert affine.outcome.prefix_hit_tokens == 9 * 12 * 16


def test_an_oracle_schedules_the_shortest_request_first() -> None:
    requests = [plan("first", 0, 8, 9)]
    requests += [plan(f"r{output}", 1, 8, output) for output in (7, 3, 5)]
    run = run_fleet(requests, make_fleet(max_num_seqs=1, oracle=True))
    assert [r.request_id for r in run.records] == ["first", "r3", "r5", "r7"]


def test_a_policy_that_no_manifest_names_runs_on_every_replica() -> None:
    class ShortPrompts(SarathiPolicy):
        def reject(self, request: ScheduledRequest) -> Rejection | None:
            long = request.input_tokens > 16
            return Rejection(reason="long", detail="too long for us") if long else None

    settings = replace(make_fleet(replicas=2), build_policy=ShortPrompts)
    run = run_fleet([plan(f"r{n}", n, n * 8, 2) for n in (1, 2, 3, 4)], settings)
    refused = {
        name for name in ("r1", "r2", "r3", "r4") if run[name].detail == "HTTP 400: too long for us"
    }
    assert refused == {"r3", "r4"}
    assert {run[f"r{n}"].replica for n in (3, 4)} == {"chat-0", "chat-1"}


def test_a_cancelled_request_keeps_its_tokens_and_frees_its_slot() -> None:
    requests = [plan("a", 0, 8, 50, cancel_ms=3.5), plan("b", 1, 8, 2)]
    run = run_fleet(requests, make_fleet(max_num_seqs=1))
    record = run["a"]
    assert record.outcome is Outcome.CANCELLED
    assert record.end_ns == round(3.5 * NS_PER_MS)
    assert run.tokens_ms("a") == [1, 2, 3]
    assert run.tokens_ms("b") == [5, 6], "the step that runs at 3.5 ms ends at 4"


def test_a_request_that_completes_at_its_deadline_is_complete() -> None:
    run = run_fleet([plan("a", 0, 8, 4, cancel_ms=4)], make_fleet())
    assert run["a"].outcome is Outcome.OK


def test_a_request_that_exceeds_the_timeout_times_out() -> None:
    requests = [plan("a", 0, 8, 300), plan("b", 1, 8, 5), plan("c", 10, 8, 5)]
    run = run_fleet(requests, make_fleet(max_num_seqs=1, timeout_s=0.2))
    assert run["a"].outcome is Outcome.TIMEOUT
    assert run["a"].end_ns == 200 * NS_PER_MS
    assert run["a"].output_tokens == 200
    assert run["a"].detail == "nothing complete within 0.2 s"
    # The running step ends at 201 ms, when b times out, and c starts a step later.
    assert (run["b"].outcome, run["b"].output_tokens) == (Outcome.TIMEOUT, 0)
    assert run.tokens_ms("c") == [203, 204, 205, 206, 207]


def test_a_cancellation_after_the_timeout_has_no_effect() -> None:
    run = run_fleet([plan("a", 0, 8, 300, cancel_ms=250)], make_fleet(timeout_s=0.2))
    assert run["a"].outcome is Outcome.TIMEOUT


def test_a_request_is_shed_if_every_queue_is_full() -> None:
    requests = [plan(f"r{i}", i / 10, 8, 5) for i in range(8)]
    run = run_fleet(requests, make_fleet(replicas=2, max_num_seqs=1, max_waiting=2))
    shed = [r for r in run.records if r.outcome is Outcome.SHED]
    assert [r.request_id for r in shed] == ["r6", "r7"]
    assert {r.detail for r in shed} == {"HTTP 429: every replica is full; retry shortly"}
    assert all(r.end_ns == r.scheduled_ns and not r.output_tokens for r in shed)


def test_a_request_rejected_under_load_is_retried_once_on_another_replica() -> None:
    # Queues have length zero, and a long prompt fills the memory. The replica therefore rejects a
    # second request although its batch width allows one and it does not report saturation.
    settings = make_fleet(replicas=2, max_num_seqs=2, max_waiting=0, profile={"kv_blocks": 10})
    requests = [plan("big", 0, 150, 9), plan("r1", 1, 150, 9), plan("r2", 2, 150, 9)]
    run = run_fleet(requests, settings)
    assert run["big"].replica == "chat-0"
    assert run["r1"].replica == "chat-1"
    assert run["r2"].outcome is Outcome.SHED
    retried = run_fleet(
        [plan("big", 0, 150, 9), plan("small", 1, 8, 2), plan("r", 4, 150, 9)], settings
    )
    assert retried["small"].replica == "chat-1"
    assert retried["r"].replica == "chat-1", "chat-0 was next in order and rejected it"
    assert retried["r"].outcome is Outcome.OK


def test_a_request_larger_than_any_replica_is_an_error_without_a_retry() -> None:
    run = run_fleet([plan("a", 0, 70_000, 1)], make_fleet(replicas=2))
    assert run["a"].outcome is Outcome.ERROR
    assert "this model's context of 65536 must hold the prompt" in run["a"].detail


def test_a_request_of_an_unknown_class_is_an_error() -> None:
    run = run_fleet([plan("a", 0, 8, 1, slo_class="gold")], make_fleet())
    assert run["a"].outcome is Outcome.ERROR
    assert (
        run["a"].detail == "HTTP 400: X-SLO-Class: 'gold' is not an SLO class of this service; "
        "classes are fast, slow"
    )


def test_all_requests_are_shed_without_a_replica() -> None:
    run = run_fleet([plan("a", 0, 8, 1)], make_fleet(replicas=0))
    assert run["a"].outcome is Outcome.SHED
    assert run["a"].detail == "HTTP 503: no replica is ready; retry shortly"


def test_settings_and_outcomes_can_be_pickled() -> None:
    settings = make_fleet(device="llama-3-8b-h100")
    copied = pickle.loads(pickle.dumps(settings))
    assert copied == settings
    requests = [plan("a", 0, 100, 9)]
    outcome = run_fleet(requests, copied).outcome
    assert outcome == run_fleet(requests, settings).outcome
    assert pickle.loads(pickle.dumps(outcome)) == outcome


class Scaler:
    """An actor that starts a replica at one time and drains the first one at another."""

    def __init__(self, *, start_ms: int, drain_ms: int | None = None) -> None:
        self._due = [(start_ms * NS_PER_MS, False)]
        if drain_ms is not None:
            self._due.append((drain_ms * NS_PER_MS, True))
        self.seen: list[tuple[int, int]] = []

    def next_ns(self) -> int:
        return self._due[0][0] if self._due else 1 << 62

    def act(self, fleet: VirtualFleet, now_ns: int) -> None:
        _, drains = self._due.pop(0)
        if drains:
            fleet.drain_replica(fleet.replicas[0], now_ns)
        else:
            replica: VirtualReplica = fleet.start_replica(now_ns)
            self.seen.append((replica.created_ns, replica.ready_ns))


def test_a_replica_is_ready_after_its_start_up_time() -> None:
    scaler = Scaler(start_ms=2_000)
    requests = [plan(f"r{second}", second * 1000, 8, 2) for second in range(8)]
    run = run_fleet(requests, make_fleet(profile={"startup_seconds": 3.0}), [scaler])
    assert scaler.seen == [(2 * NS_PER_S, 5 * NS_PER_S)]
    served = [run[r.request_id].replica for r in requests]
    assert served == ["chat-0"] * 5 + ["chat-1", "chat-0", "chat-1"]
    end_ns = run.outcome.end_ns
    assert run.outcome.replica_ns == end_ns + (end_ns - 2 * NS_PER_S)


def test_a_drained_replica_completes_its_requests_and_is_removed() -> None:
    requests = [plan("long", 0, 8, 50), *(plan(f"r{i}", i * 10, 8, 2) for i in range(1, 8))]
    run = run_fleet(requests, make_fleet(), [Scaler(start_ms=11, drain_ms=12)])
    assert run["long"].outcome is Outcome.OK
    assert [run[f"r{i}"].replica for i in range(1, 4)] == ["chat-0", "chat-1", "chat-1"]
    end_ns = run.outcome.end_ns
    assert run.outcome.replica_ns == 50 * NS_PER_MS + end_ns - 11 * NS_PER_MS


def test_a_policy_sees_the_targets_and_the_priority_but_not_the_output_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[ScheduledRequest] = []
    real = Scheduler.add

    def add(self: Scheduler, request: ScheduledRequest, now_ns: int) -> Rejection | None:
        seen.append(copy(request))
        return real(self, request, now_ns)

    monkeypatch.setattr(Scheduler, "add", add)
    own = Targets(ttft_ns=7)
    run_fleet(
        [
            plan("a", 0, 8, 123, slo_class="slow", targets=own, priority=3),
            plan("b", 1, 8, 123, max_output_tokens=200),
        ],
        make_fleet(),
    )
    a, b = seen
    assert (a.slo_class, a.priority) == ("slow", 3)
    assert a.targets == Targets(ttft_ns=7, tpot_ns=50 * NS_PER_MS, e2e_ns=9 * NS_PER_S)
    assert (a.max_output_tokens, b.max_output_tokens) == (None, 200)
    assert b.targets.ttft_ns == 50 * NS_PER_MS
    assert b.priority == 0
    assert not [field for field in fields(a) if getattr(a, field.name) == 123]
