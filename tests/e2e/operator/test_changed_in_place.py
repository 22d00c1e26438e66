"""A budget beyond the bounds that engines started with, and a law: in force, and no pod new."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.operator.installed import Installed

NAME = "followed"


@pytest.mark.slow
def test_engines_that_run_follow_the_budget_and_the_mode_and_lose_no_answer(
    installed: Installed, serve: Callable[..., None], until: Callable[..., Any]
) -> None:
    control = {"mode": "Manual", "intervalSeconds": 2}
    serve(NAME, replicas=1, control=control)
    (engine,) = installed.pods(NAME, "engine")
    name = engine["metadata"]["name"]
    looks = itertools.count()

    def state() -> dict[str, Any]:
        # A kubelet looks after a pod's volumes once a minute, and when something of it changes.
        installed.kubectl("annotate", "pod", name, f"looks={next(looks)}", "--overwrite")
        return installed.state(name)

    def ask(**spec: Any) -> None:
        words = ("patch", "llmservice", NAME, "--type=merge", "-p", json.dumps({"spec": spec}))
        installed.kubectl(*words)

    before = state()
    assert (before["token_budget"], before["bounds"]["token_budget"]) == (2048, [256, 8192])
    answers = installed.answering(NAME, 2, 3000)

    ask(engine={"tokenBudget": {"max": 16_384, "initial": 12_000}})
    until(lambda: state()["token_budget"] == 12_000, "the budget is the manifest's")
    assert state()["bounds"]["token_budget"] == [256, 16_384]
    ask(control={"mode": "Auto"})
    until(lambda: state()["budget_law"] == "model", "a law sizes the steps")

    assert answers.ends() == ["done", "done"]
    (after,) = installed.pods(NAME, "engine")
    assert after["metadata"]["uid"] == engine["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    assert state()["epoch"] == before["epoch"]
    story = installed.kubectl("describe", "llmservice", NAME)
    assert "token budget 2048 → 12000: the spec has changed" in story
    assert "LimitsNotTaken" not in story
