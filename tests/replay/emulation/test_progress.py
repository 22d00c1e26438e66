"""The progress of a run in virtual time: a bar on a terminal, else a line at an interval."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.builders.records import request_record

from goodput_core.units import NS_PER_S
from goodput_replay.emulation import virtual_time
from goodput_replay.plan import PlanStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_core.slo.record import RequestRecord


def _records(count: int) -> Iterator[RequestRecord]:
    for number in range(count):
        yield request_record(request_id=f"r{number}", end_ns=number * NS_PER_S)


@pytest.mark.parametrize("terminal", [False, True], ids=["piped", "terminal"])
def test_progress_shows_virtual_time_requests_and_rate(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual_time, "_LINE_EVERY_NS", 0)
    monkeypatch.setattr(virtual_time, "_BAR_EVERY_NS", 0)
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=terminal, width=120)
    with virtual_time.display(PlanStats(rows=1_000), console) as count:
        for record in _records(640):
            count(record)
    assert "10 min 39 s of virtual time, 640 of 1,000 requests, " in printed.getvalue()
    assert " requests/s" in printed.getvalue()


def test_a_short_run_prints_no_progress_without_a_terminal() -> None:
    printed = io.StringIO()
    with virtual_time.display(PlanStats(rows=300), Console(file=printed)) as count:
        for record in _records(300):
            count(record)
    assert printed.getvalue() == ""
