"""A reader follows a scheduling step from end to end in at most five files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.builders.schedulers import add_request, make_scheduler, take_step

import goodput_engine
from goodput_engine.scheduler.plan import StepResult

if TYPE_CHECKING:
    from types import FrameType

_ROOT = Path(goodput_engine.__file__).parent
_PLACES = (_ROOT / "scheduler", _ROOT / "kv")


def test_a_step_of_sarathi_is_read_in_at_most_five_files() -> None:
    scheduler = make_scheduler("sarathi", budget=32, waiting=8)
    for rid, tokens in ((1, 8), (2, 8), (3, 40)):
        add_request(scheduler, rid, tokens, None, hashes=range(rid, rid + tokens // 16))
    for now_ns in (10, 20):
        take_step(scheduler, at_ns=now_ns, step_ns=1000)
    add_request(scheduler, 4, 90, None, hashes=range(4, 9))
    files: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if any(place in path.parents for place in _PLACES):
            files.add(path.relative_to(_ROOT).as_posix())

    before = sys.gettrace()
    sys.settrace(note)
    try:
        plan = scheduler.plan(30)
        assert plan is not None
        result = StepResult(plan_id=plan.plan_id, at_ns=30, step_ns=1000, stopped={})
        scheduler.commit(plan, result, 30)
    finally:
        sys.settrace(before)
    assert plan.num_decodes >= 2, "the step decodes"
    assert plan.chunks, "the step computes a chunk of a prompt"
    assert plan.admitted, "the step admits a request"
    assert "scheduler/policies/sarathi.py" in files
    assert len(files) <= 5, sorted(files)
