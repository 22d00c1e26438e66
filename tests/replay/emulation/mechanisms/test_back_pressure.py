"""Back-pressure and rejection of requests by full replicas: benefit and cost.

Source: Qin et al., "Mooncake", FAST 2025 (early rejection under overload, as work on requests that
will be late delays requests that could be on time); Welsh and Culler, "Adaptive Overload Control
for Busy Internet Servers", USITS 2003.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import RouterPolicy
from goodput_replay.emulation import replica
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    import pytest
    from tests.builders.fleets import FleetRun

    from goodput_replay.plan import PlannedRequest


UNBOUNDED = 10**6
PATIENT = SLOClasses(classes=(SLOClass(name="fast", ttft_ms=500, tpot_ms=5),), default="fast")


def _shed(run: FleetRun) -> int:
    return sum(record.outcome is Outcome.SHED for record in run.records)


def test_under_overload_rejection_lets_admitted_requests_meet_their_targets() -> None:
    # Outputs of 50 ms on eight slots serve 160 requests/s; 240 requests/s arrive for 4 s.
    draw = random.Random(11)
    requests: list[PlannedRequest] = []
    at_ms = 0.0
    while (at_ms := at_ms + draw.expovariate(0.24)) < 4_000:
        requests.append(plan(f"r{len(requests)}", at_ms, 16, 50))
    both: dict[str, Any] = {
        "replicas": 2,
        "max_num_seqs": 4,
        "placement": RouterPolicy.LEAST_LOADED,
    }
    limited = run_fleet(requests, make_fleet(max_waiting=2, **both))
    unlimited = run_fleet(requests, make_fleet(max_waiting=UNBOUNDED, **both))
    assert _shed(unlimited) == 0
    assert _shed(limited) > 0.2 * len(requests)
    assert unlimited.attained() < 0.1, "all are admitted, and nearly all are late"
    assert limited.attained() > 0.6, "the requests that fit"


def test_a_burst_that_could_have_waited_is_rejected() -> None:
    # A burst of forty requests; without a limit, the last one starts after 200 ms.
    requests = [plan(f"r{i}", i / 100, 16, 50) for i in range(40)]
    both: dict[str, Any] = {"replicas": 2, "max_num_seqs": 4, "slo": PATIENT}
    limited = run_fleet(requests, make_fleet(max_waiting=2, **both))
    unlimited = run_fleet(requests, make_fleet(max_waiting=UNBOUNDED, **both))
    assert unlimited.attained(PATIENT) == 1.0
    assert limited.attained(PATIENT) < 0.4
    assert _shed(limited) > 20


def test_requests_avoid_a_replica_that_reports_saturation(monkeypatch: pytest.MonkeyPatch) -> None:
    # One replica receives all long outputs and fills up. If it does not report saturation, it
    # rejects every second request, each of which then needs one of the few retries.
    requests = [plan(f"long{i}", 2 * i, 16, 900 if i % 2 == 0 else 1) for i in range(12)]
    requests += [plan(f"r{i}", 40 + 4 * i, 16, 8) for i in range(100)]
    settings = make_fleet(replicas=2, max_num_seqs=4, max_waiting=2)
    reported = run_fleet(requests, settings)
    monkeypatch.setattr(replica, "is_saturated", lambda **_: False)
    unreported = run_fleet(requests, settings)
    assert _shed(reported) == 0
    assert _shed(unreported) > 20
