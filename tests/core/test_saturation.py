"""Saturation of a replica."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.placement import is_saturated


def saturated(
    *,
    running: int = 4,
    seats: int = 8,
    waiting: int = 0,
    queue: int = 10,
    used: int = 0,
    total: int = 100,
) -> bool:
    return is_saturated(
        running=running,
        max_num_seqs=seats,
        waiting=waiting,
        max_waiting=queue,
        kv_used_blocks=used,
        kv_total_blocks=total,
    )


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        pytest.param({}, False, id="idle"),
        pytest.param({"waiting": 9}, False, id="one place in the queue"),
        pytest.param({"waiting": 10}, True, id="full queue"),
        pytest.param({"queue": 0, "running": 7}, False, id="no queue, one may run"),
        pytest.param({"queue": 0, "running": 8}, True, id="no queue, none may run"),
        pytest.param({"used": 100}, False, id="full memory, empty queue"),
        pytest.param({"used": 100, "waiting": 4}, False, id="full memory, short queue"),
        pytest.param({"used": 95, "waiting": 5}, True, id="full memory, half a queue"),
        pytest.param({"used": 94, "waiting": 5}, False, id="half a queue, some memory"),
        pytest.param({"used": 0, "total": 0, "waiting": 9}, False, id="memory unknown"),
    ],
)
def test_saturation(load: dict[str, int], expected: bool) -> None:
    assert saturated(**load) is expected


@given(
    running=st.integers(0, 8),
    waiting=st.integers(0, 10),
    queue=st.integers(0, 10),
    used=st.integers(0, 100),
)
def test_more_load_never_ends_saturation(running: int, waiting: int, queue: int, used: int) -> None:
    if saturated(running=running, waiting=waiting, queue=queue, used=used):
        assert saturated(running=running + 1, waiting=waiting, queue=queue, used=used)
        assert saturated(running=running, waiting=waiting + 1, queue=queue, used=used)
        assert saturated(running=running, waiting=waiting, queue=queue, used=used + 1)
