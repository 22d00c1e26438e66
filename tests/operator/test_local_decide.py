"""Decisions about the local fleet: actions and the next wake-up for a snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.errors import ExitCode
from goodput_core.units import NS_PER_S
from goodput_operator.backoff import BackOff
from goodput_operator.local.decide import (
    Abort,
    Address,
    Announce,
    Desired,
    FleetSnapshot,
    Kill,
    ProcessPhase,
    ProcessView,
    Publish,
    Remove,
    Role,
    RoutedReplica,
    Start,
    Stop,
    Terminate,
    decide,
)

DESIRED = Desired(service="chat", replicas=2, ready_timeout_ns=60 * NS_PER_S)
NAMES = ("chat-0", "chat-1", "chat-router")
LATER = 10 * NS_PER_S


def address(name: str) -> Address:
    port = 9000 + NAMES.index(name) if name in NAMES else 9999
    return Address(url=f"http://127.0.0.1:{port}", admin_url=f"http://127.0.0.1:{port + 100}")


def process(name: str, phase: ProcessPhase = ProcessPhase.READY, **fields: Any) -> ProcessView:
    role = Role.ROUTER if name.endswith("router") else Role.REPLICA
    here = None if phase in {ProcessPhase.STARTING, ProcessPhase.EXITED} else address(name)
    defaults = {"started_ns": 0, "address": here, "ever_ready": phase is ProcessPhase.READY}
    return ProcessView(name=name, role=role, phase=phase, **{**defaults, **fields})


def exited(name: str, **fields: Any) -> ProcessView:
    defaults = {"exited_ns": LATER, "exit_code": 70, "failures": 1, "ever_ready": True}
    return process(name, ProcessPhase.EXITED, **{**defaults, **fields})


def upstream(name: str) -> RoutedReplica:
    return RoutedReplica(name=name, url=address(name).url, admin_url=address(name).admin_url)


BOTH = (upstream("chat-0"), upstream("chat-1"))
SERVING = FleetSnapshot(
    start_ns=0,
    processes=tuple(process(name) for name in NAMES),
    published=BOTH,
    announced=True,
)


def serving_with(*changed: ProcessView, **fields: Any) -> FleetSnapshot:
    by_name = {p.name: p for p in (*SERVING.processes, *changed)}
    return replace(SERVING, processes=tuple(by_name.values()), **fields)


def test_replicas_and_a_router_are_started() -> None:
    decision = decide(FleetSnapshot(start_ns=0), DESIRED, 0)
    assert decision.actions == (
        Start(name="chat-0", role=Role.REPLICA),
        Start(name="chat-1", role=Role.REPLICA),
        Start(name="chat-router", role=Role.ROUTER),
    )
    assert decision.wake_at_ns == 60 * NS_PER_S


@pytest.mark.parametrize("name", ["chat-1", "chat-router"])
def test_a_hanging_process_is_killed_after_the_liveness_timeout(name: str) -> None:
    silent = serving_with(process(name, unresponsive_ns=LATER))
    early = decide(silent, DESIRED, LATER)
    assert (early.actions, early.wake_at_ns) == ((), LATER + 30 * NS_PER_S)
    kill = Kill(name=name, reason="it failed its liveness checks for 30 s")
    assert decide(silent, DESIRED, LATER + 30 * NS_PER_S).actions == (kill,)
    killed = serving_with(process(name, unresponsive_ns=LATER, killed=True))
    assert decide(killed, DESIRED, LATER + 31 * NS_PER_S).actions == ()


def test_a_serving_fleet_needs_no_action() -> None:
    assert decide(SERVING, DESIRED, LATER).actions == ()
    assert decide(SERVING, DESIRED, LATER).wake_at_ns is None


def test_a_replica_is_published_as_soon_as_it_is_ready() -> None:
    snapshot = FleetSnapshot(
        start_ns=0,
        processes=(
            process("chat-0"),
            process("chat-1", ProcessPhase.STARTING),
            process("chat-router", ProcessPhase.LISTENING),
        ),
    )
    assert decide(snapshot, DESIRED, 1).actions == (Publish(upstreams=BOTH[:1]),)


@pytest.mark.parametrize("late", NAMES)
def test_the_fleet_is_announced_only_when_all_processes_are_ready(late: str) -> None:
    ready = serving_with(announced=False)
    assert decide(ready, DESIRED, 1).actions == (Announce(),)
    not_ready = serving_with(process(late, ProcessPhase.LISTENING), announced=False)
    assert Announce() not in decide(not_ready, DESIRED, 1).actions


def test_a_crashed_replica_is_unpublished_at_once_and_restarted_after_the_back_off() -> None:
    crashed = serving_with(exited("chat-1"))
    delay_ns = DESIRED.back_off.delay_ns("chat-1", 1)
    decision = decide(crashed, DESIRED, LATER)
    assert decision.actions == (Publish(upstreams=BOTH[:1]),)
    assert decision.wake_at_ns == LATER + delay_ns

    published = replace(crashed, published=BOTH[:1])
    assert decide(published, DESIRED, LATER + delay_ns - 1).actions == ()
    assert decide(published, DESIRED, LATER + delay_ns).actions == (
        Start(name="chat-1", role=Role.REPLICA),
    )


def test_a_replica_restarted_on_other_ports_is_published_with_them() -> None:
    moved = Address(url="http://127.0.0.1:1", admin_url="http://127.0.0.1:2")
    (publish,) = decide(serving_with(process("chat-0", address=moved)), DESIRED, LATER).actions
    assert isinstance(publish, Publish)
    assert [u.url for u in publish.upstreams] == ["http://127.0.0.1:1", BOTH[1].url]


def test_rejected_arguments_before_the_first_readiness_abort_the_start() -> None:
    rejected = exited("chat-1", exit_code=64, ever_ready=False, error="no such device")
    snapshot = serving_with(rejected, announced=False)
    assert decide(snapshot, DESIRED, LATER).actions == (
        Abort(sentence="no such device", exit_code=ExitCode.USAGE),
    )


@pytest.mark.parametrize(
    "fields",
    [{"exit_code": 70, "ever_ready": False}, {"exit_code": 64, "ever_ready": True}],
    ids=["crash-before-readiness", "rejection-after-readiness"],
)
def test_any_other_end_leads_to_a_restart(fields: dict[str, Any]) -> None:
    snapshot = serving_with(exited("chat-1", **fields), announced=False)
    actions = decide(snapshot, DESIRED, LATER + 31 * NS_PER_S).actions
    assert Start(name="chat-1", role=Role.REPLICA) in actions


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (
            process("chat-1", ProcessPhase.STARTING),
            "chat-1 was not ready within 60 s, and it logged",
        ),
        (
            process("chat-1", ProcessPhase.STARTING, last_line="loading"),
            "last log line was 'loading'",
        ),
        (exited("chat-1", ever_ready=False, error="on fire"), "code 70, its last log line was 'on"),
        (process("chat-router", ProcessPhase.LISTENING), "chat-router was not ready"),
    ],
    ids=["silent", "loading", "crashing", "router"],
)
def test_a_start_that_takes_too_long_names_the_process(late: ProcessView, words: str) -> None:
    snapshot = serving_with(late, announced=False)
    timeout_ns = DESIRED.ready_timeout_ns
    assert not any(isinstance(a, Abort) for a in decide(snapshot, DESIRED, timeout_ns - 1).actions)
    (abort,) = decide(snapshot, DESIRED, timeout_ns).actions
    assert isinstance(abort, Abort)
    assert abort.exit_code is ExitCode.INTERNAL
    assert words in abort.sentence
    assert "--ready-timeout" in abort.sentence


def test_a_restarted_process_that_does_not_listen_is_killed_after_the_ready_timeout() -> None:
    hanging = process("chat-1", ProcessPhase.STARTING, started_ns=LATER, ever_ready=True)
    snapshot = serving_with(hanging, published=BOTH[:1])
    due_ns = LATER + DESIRED.ready_timeout_ns
    assert decide(snapshot, DESIRED, due_ns - 1).wake_at_ns == due_ns
    (kill,) = decide(snapshot, DESIRED, due_ns).actions
    assert isinstance(kill, Kill)
    killed = serving_with(replace(hanging, killed=True), published=BOTH[:1])
    assert decide(killed, DESIRED, due_ns).actions == ()


def test_excess_replicas_are_unpublished_drained_and_removed() -> None:
    one = replace(DESIRED, replicas=1)
    assert decide(SERVING, one, LATER).actions == (
        Publish(upstreams=BOTH[:1]),
        Terminate(name="chat-1"),
    )
    draining = serving_with(process("chat-1", terminated_ns=LATER), published=BOTH[:1])
    assert decide(draining, one, LATER + 1).actions == ()
    ended = serving_with(exited("chat-1", exit_code=0, terminated_ns=LATER), published=BOTH[:1])
    assert decide(ended, one, LATER + 1).actions == (Remove(name="chat-1"),)


def test_a_stop_drains_the_router_first_and_then_the_replicas() -> None:
    stop = Stop(reason="SIGTERM")
    first = decide(replace(SERVING, stop=stop), DESIRED, LATER)
    assert first.actions == (Terminate(name="chat-router"),)
    assert not first.finished

    draining = serving_with(process("chat-router", terminated_ns=LATER), stop=stop)
    waiting = decide(draining, DESIRED, LATER + 1)
    assert waiting.actions == ()
    assert waiting.wake_at_ns is not None
    assert waiting.wake_at_ns > LATER + DESIRED.grace_ns
    late = decide(draining, DESIRED, waiting.wake_at_ns)
    assert [a.name for a in late.actions if isinstance(a, Kill)] == ["chat-router"]

    router_ended = serving_with(exited("chat-router", terminated_ns=LATER), stop=stop)
    second = decide(router_ended, DESIRED, LATER + NS_PER_S)
    assert second.actions == (Terminate(name="chat-0"), Terminate(name="chat-1"))


@pytest.mark.parametrize(
    ("router_took_s", "kill_after_s"),
    [(5, 32), (30, 32), (31, 33)],
    ids=["early", "at-the-end", "too-late"],
)
def test_a_stop_ends_within_one_grace_period(router_took_s: int, kill_after_s: int) -> None:
    """Replicas have the rest of the grace period after the router, and two seconds to exit."""
    sent_ns = LATER + router_took_s * NS_PER_S
    replicas = tuple(process(name, terminated_ns=sent_ns) for name in NAMES[:2])
    snapshot = serving_with(
        exited("chat-router", terminated_ns=LATER), *replicas, stop=Stop(reason="SIGTERM")
    )
    decision = decide(snapshot, DESIRED, sent_ns)
    assert decision.wake_at_ns == LATER + kill_after_s * NS_PER_S
    late = decide(snapshot, DESIRED, LATER + kill_after_s * NS_PER_S)
    assert [a.name for a in late.actions if isinstance(a, Kill)] == ["chat-0", "chat-1"]


def test_a_stop_without_a_router_ends_the_replicas_at_once() -> None:
    replicas = SERVING.processes[:2]
    snapshot = replace(SERVING, processes=replicas, stop=Stop(reason="SIGTERM"))
    decision = decide(snapshot, DESIRED, LATER)
    assert decision.actions == (Terminate(name="chat-0"), Terminate(name="chat-1"))


def test_a_stop_before_the_announcement_has_no_grace_period() -> None:
    starting = tuple(process(name, ProcessPhase.STARTING, terminated_ns=LATER) for name in NAMES)
    snapshot = FleetSnapshot(start_ns=0, processes=starting, stop=Stop(reason="SIGTERM"))
    assert decide(snapshot, DESIRED, LATER).wake_at_ns == LATER + 2 * NS_PER_S


def test_a_stop_at_once_kills_all_processes() -> None:
    snapshot = replace(SERVING, stop=Stop(reason="Ctrl-C", at_once=True))
    kills = decide(snapshot, DESIRED, LATER).actions
    assert [a.name for a in kills if isinstance(a, Kill)] == list(NAMES)


def test_a_stop_is_finished_when_no_process_runs_and_starts_none_again() -> None:
    ended = tuple(exited(name) for name in NAMES)
    snapshot = replace(SERVING, processes=ended, stop=Stop(reason="SIGTERM"))
    decision = decide(snapshot, DESIRED, LATER + 3600 * NS_PER_S)
    assert decision.finished
    assert decision.actions == ()


phases = st.sampled_from(ProcessPhase)
times_ns = st.integers(0, 100 * NS_PER_S)


@st.composite
def snapshots(draw: st.DrawFn) -> FleetSnapshot:
    processes = []
    for name in draw(st.lists(st.sampled_from([*NAMES, "chat-2"]), unique=True)):
        phase = draw(phases)
        make = exited if phase is ProcessPhase.EXITED else process
        fields: dict[str, Any] = {"started_ns": draw(times_ns), "killed": draw(st.booleans())}
        fields["terminated_ns"] = draw(st.none() | times_ns)
        if phase is ProcessPhase.EXITED:
            fields["exit_code"] = draw(st.sampled_from([0, 64, 70, -9, None]))
            fields["failures"] = draw(st.integers(1, 10_000))
        else:
            fields["phase"] = phase
        processes.append(make(name, **fields))
    stop = draw(st.none() | st.builds(Stop, reason=st.just("SIGTERM"), at_once=st.booleans()))
    return FleetSnapshot(
        start_ns=0,
        processes=tuple(processes),
        published=draw(st.sampled_from([(), BOTH, BOTH[:1]])),
        announced=draw(st.booleans()),
        stop=stop,
    )


@given(snapshots(), times_ns, st.integers(1, 3))
def test_every_decision_meets_the_invariants(
    snapshot: FleetSnapshot, now_ns: int, replicas: int
) -> None:
    desired = Desired(service="chat", replicas=replicas, back_off=BackOff(seed=1))
    decision = decide(snapshot, desired, now_ns)
    alive = {p.name for p in snapshot.processes if p.alive}
    for action in decision.actions:
        match action:
            case Start(name=name):
                assert name not in alive
                assert name in desired.processes
                assert snapshot.stop is None
            case Terminate(name=name) | Kill(name=name):
                assert name in alive
            case Remove(name=name):
                assert name not in alive
                assert name not in desired.processes
            case Publish(upstreams=upstreams):
                assert {u.name for u in upstreams} <= alive & set(desired.processes)
            case Abort() | Announce():
                assert not snapshot.announced
    assert decision.finished == (snapshot.stop is not None and not alive)
    if not decision.actions and decision.wake_at_ns is not None:
        assert decision.wake_at_ns > now_ns, "otherwise the loop would spin"


DRAINING = process("chat-1", terminated_ns=LATER)


def test_a_draining_replica_is_not_published_even_if_it_is_desired_again() -> None:
    published = (upstream("chat-0"), upstream("chat-1"))
    snapshot = FleetSnapshot(
        start_ns=0,
        processes=(process("chat-0"), DRAINING, process("chat-router")),
        published=published,
        announced=True,
    )
    decision = decide(snapshot, DESIRED, LATER)
    assert decision.actions == (Publish(upstreams=(upstream("chat-0"),)),)
    assert decision.wake_at_ns == LATER + DESIRED.grace_ns + 2 * NS_PER_S
    late = decide(replace(snapshot, published=(upstream("chat-0"),)), DESIRED, 10 * LATER)
    assert [action.name for action in late.actions if isinstance(action, Kill)] == ["chat-1"]


def test_a_drained_replica_that_is_desired_again_starts_at_once() -> None:
    ended = exited("chat-1", terminated_ns=0, exit_code=0)
    snapshot = FleetSnapshot(
        start_ns=0,
        processes=(process("chat-0"), ended, process("chat-router")),
        published=(upstream("chat-0"),),
        announced=True,
    )
    assert decide(snapshot, DESIRED, LATER).actions == (Start(name="chat-1", role=Role.REPLICA),)
