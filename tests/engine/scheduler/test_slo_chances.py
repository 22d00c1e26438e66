"""The chances of end-to-end targets that cannot be ensured are corrected by outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.builders.slo_bench import SloBench

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

_OUTPUTS = 60  # 5 ms each, and predicted to be 20


def _serve(bench: SloBench, rid: int, slo_class: str, *, e2e_ms: int) -> ScheduledRequest:
    request = bench.add(rid, 40, outputs=_OUTPUTS, e2e_ms=e2e_ms, slo_class=slo_class)
    while bench.scheduler.has_work:
        bench.step()
    return request


def _chance(bench: SloBench, request: ScheduledRequest) -> float:
    return bench.policy._admission.chance(request, bench.policy._look())


@pytest.mark.parametrize(("e2e_ms", "chance"), [(250, 1 / 7), (299, 1 / 7), (400, 1.0)])
def test_a_class_whose_promises_are_missed_has_lower_chances(e2e_ms: int, chance: float) -> None:
    """250 and 299 ms are enough for the predicted 20 tokens, and not for 60; 400 ms are."""
    bench = SloBench()
    for rid in range(6):
        _serve(bench, rid, "long", e2e_ms=e2e_ms)
    missed = bench.add(10, 40, outputs=_OUTPUTS, e2e_ms=e2e_ms, slo_class="long")
    assert _chance(bench, missed) == pytest.approx(chance, abs=0.03)
    other = bench.add(11, 40, outputs=_OUTPUTS, e2e_ms=250, slo_class="other")
    assert _chance(bench, other) == 1.0


def test_a_request_that_is_lost_before_its_end_counts_once() -> None:
    bench = SloBench()
    request = bench.add(1, 40, outputs=_OUTPUTS, e2e_ms=250, slo_class="long")
    for _ in range(_OUTPUTS - 5):
        bench.step()
    _serve(bench, 3, "other", e2e_ms=1000)
    assert request.counted_late
    later = bench.add(2, 40, outputs=_OUTPUTS, e2e_ms=250, slo_class="long")
    assert _chance(bench, later) == pytest.approx(1 / 2, abs=0.01)


def test_no_memory_is_kept_for_more_than_64_classes() -> None:
    bench = SloBench()
    for rid in range(70):
        _serve(bench, rid, f"class-{rid}", e2e_ms=250)
    chances = [
        _chance(bench, bench.add(100 + rid, 40, outputs=_OUTPUTS, e2e_ms=250, slo_class=name))
        for rid, name in ((1, "class-0"), (2, "class-69"))
    ]
    assert chances == [pytest.approx(1 / 2, abs=0.01), 1.0]
