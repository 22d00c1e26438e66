"""The files that a reader opens to follow one thing from end to end are few."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import goodput_engine
from goodput_engine.kv.blocks import BlockPool
from goodput_engine.scheduler.plan import StepResult
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from types import FrameType

    from goodput_engine.scheduler.plan import StepPlan

_ROOT = Path(goodput_engine.__file__).parent
_PLACES = (_ROOT / "scheduler", _ROOT / "kv")


def _scheduler() -> Scheduler:
    return Scheduler(
        policy=SarathiPolicy(),
        kv=BlockPool(total_blocks=100, block_size=16),
        limits=SchedulerLimits(token_budget=32, max_num_seqs=8, max_waiting=8),
        max_model_tokens=1000,
    )


def _add(scheduler: Scheduler, rid: int, tokens: int) -> None:
    request = ScheduledRequest(
        rid=rid, arrival_ns=rid, input_tokens=tokens, block_hashes=range(rid, rid + tokens // 16)
    )
    assert scheduler.add(request, rid) is None


def _step(scheduler: Scheduler, now_ns: int) -> StepPlan:
    plan = scheduler.plan(now_ns)
    assert plan is not None
    result = StepResult(plan_id=plan.plan_id, at_ns=now_ns, step_ns=1000, stopped={})
    scheduler.commit(plan, result, now_ns)
    return plan


def test_a_step_of_sarathi_is_read_in_at_most_five_files() -> None:
    scheduler = _scheduler()
    for rid in (1, 2):
        _add(scheduler, rid, 8)
    _add(scheduler, 3, 40)
    for now_ns in (10, 20):
        _step(scheduler, now_ns)
    _add(scheduler, 4, 90)
    files: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if any(place in path.parents for place in _PLACES):
            files.add(path.relative_to(_ROOT).as_posix())

    before = sys.gettrace()
    sys.settrace(note)
    try:
        plan = _step(scheduler, 30)
    finally:
        sys.settrace(before)
    assert plan.num_decodes >= 2, "the step decodes"
    assert plan.chunks, "the step computes a chunk of a prompt"
    assert plan.admitted, "the step admits a request"
    assert "scheduler/policies/sarathi.py" in files
    assert len(files) <= 5, sorted(files)
