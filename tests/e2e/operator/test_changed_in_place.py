"""Changes of the token budget and the control mode reach running engines without new pods."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from tools.cluster.handle import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.e2e.installation import ChartRelease

NAME = "followed"


@pytest.mark.slow
def test_running_engines_adopt_a_new_budget_and_mode_and_lose_no_request(
    installation: ChartRelease, serve: Callable[..., None]
) -> None:
    serve(NAME, replicas=1, control={"mode": "Manual", "intervalSeconds": 2})
    (engine,) = installation.pods(NAME, "engine")
    name = engine["metadata"]["name"]
    reads = itertools.count()

    def state() -> dict[str, Any]:
        # A kubelet updates a pod's volumes when the pod changes, and otherwise once a minute.
        installation.kubectl("annotate", "pod", name, f"reads={next(reads)}", "--overwrite")
        return installation.state(name)

    before = state()
    assert (before["token_budget"], before["bounds"]["token_budget"]) == (2048, [256, 8192])
    streams = installation.start_streams(NAME, 2, 3000)

    installation.patch(NAME, engine={"tokenBudget": {"max": 16_384, "initial": 12_000}})
    wait_for(lambda: state()["token_budget"] == 12_000, "the engine has the manifest's budget")
    assert state()["bounds"]["token_budget"] == [256, 16_384]
    installation.patch(NAME, control={"mode": "Auto"})
    wait_for(lambda: state()["budget_law"] == "model", "a law sets the step size")

    assert streams.outcomes() == ["done", "done"]
    (after,) = installation.pods(NAME, "engine")
    assert after["metadata"]["uid"] == engine["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    assert state()["epoch"] == before["epoch"]
    description = installation.kubectl("describe", "llmservice", NAME)
    assert "token budget 2048 → 12000: the spec has changed" in description
    assert "LimitsNotTaken" not in description
