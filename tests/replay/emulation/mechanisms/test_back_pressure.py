"""Full replicas are kept away from, and refuse: what that is worth, and what it costs.

Source: Qin et al., "Mooncake", FAST 2025 (early rejection under overload: work on
requests that will be late is taken from those that could be in time); Welsh and Culler, "Adaptive
Overload Control for Busy Internet Servers", USITS 2003.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import RouterPolicy
from goodput_replay.emulation import replica
from goodput_replay.run.slo import SLOClasses

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from tests.replay.emulation.conftest import Run

    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest

    Planned = Callable[..., PlannedRequest]
    Settings = Callable[..., FleetSettings]
    RunFleet = Callable[..., Run]

UNBOUNDED = 10**6
PATIENT = SLOClasses(classes=(SLOClass(name="fast", ttft_ms=500, tpot_ms=5),), default="fast")


def _shed(run: Run) -> int:
    return sum(record.outcome is Outcome.SHED for record in run.records)


def test_under_overload_refusing_keeps_the_promises_made_to_those_let_in(
    planned: Planned, fleet: Settings, run_fleet: RunFleet
) -> None:
    # Answers of 50 ms on eight places: 160 a second are served, and 240 a second come for 4 s.
    draw = random.Random(11)
    requests: list[PlannedRequest] = []
    at_ms = 0.0
    while (at_ms := at_ms + draw.expovariate(0.24)) < 4_000:
        requests.append(planned(f"r{len(requests)}", at_ms, 16, 50))
    both: dict[str, Any] = {
        "replicas": 2,
        "max_num_seqs": 4,
        "placement": RouterPolicy.LEAST_LOADED,
    }
    bounded = run_fleet(requests, fleet(max_waiting=2, **both))
    endless = run_fleet(requests, fleet(max_waiting=UNBOUNDED, **both))
    assert _shed(endless) == 0
    assert _shed(bounded) > 0.2 * len(requests)
    assert endless.attained() < 0.1, "everybody is let in, and nearly all wait for too long"
    assert bounded.attained() > 0.6, "as many as can be served"


def test_a_burst_that_could_have_waited_is_refused(
    planned: Planned, fleet: Settings, run_fleet: RunFleet
) -> None:
    # Forty at once, and nothing after them: the last would have started after 200 ms.
    requests = [planned(f"r{i}", i / 100, 16, 50) for i in range(40)]
    both: dict[str, Any] = {"replicas": 2, "max_num_seqs": 4, "slo": PATIENT}
    bounded = run_fleet(requests, fleet(max_waiting=2, **both))
    endless = run_fleet(requests, fleet(max_waiting=UNBOUNDED, **both))
    assert endless.attained(PATIENT) == 1.0
    assert bounded.attained(PATIENT) < 0.4
    assert _shed(bounded) > 20


def test_those_who_come_while_one_replica_is_full_go_to_the_other_at_once(
    planned: Planned, fleet: Settings, run_fleet: RunFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long answers hold every second place in turn, so one replica fills up. Where nobody says
    # that it is full, every second request is refused there and costs one of the few retries.
    requests = [planned(f"long{i}", 2 * i, 16, 900 if i % 2 == 0 else 1) for i in range(12)]
    requests += [planned(f"r{i}", 40 + 4 * i, 16, 8) for i in range(100)]
    settings = fleet(replicas=2, max_num_seqs=4, max_waiting=2)
    told = run_fleet(requests, settings)
    monkeypatch.setattr(replica, "is_saturated", lambda **_: False)
    untold = run_fleet(requests, settings)
    assert _shed(told) == 0
    assert _shed(untold) > 20
