"""A real chat model from a PersistentVolumeClaim: served, scaled, rolled and deleted.

The engines are pods that compute SmolLM2 with torch. `make smollm2` installs both.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import wait_for
from tools.e2e.claims import claim_to
from tools.e2e.clients import replay_load
from tools.smollm2 import model_folder
from tools.torch_packages import is_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tools.e2e.installation import ChartRelease

START_S = 150
"""Time in which an engine starts beside two others on a machine that is busy."""
NAME = "smollm2"
CLAIM = "weights"


@pytest.fixture
def claim(installation: ChartRelease) -> Iterator[str]:
    """A claim to a read-only volume that has the model's folder."""
    if not (is_installed() and model_folder().exists()):
        pytest.skip("NOT RUN: torch or SmolLM2 is missing; run `make smollm2`")
    with claim_to(model_folder().parent, installation, CLAIM, read_only=True):
        yield CLAIM


def ask(installation: ChartRelease, url: str, question: str) -> str:
    """Return the answer of the service to a question, with the most probable tokens."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 16,
    }
    words = ("curl", "--silent", "--fail", "--max-time", "30", "--json", json.dumps(body))
    answer = json.loads(installation.run_inside(*words, f"{url}/v1/chat/completions"))
    content: str = answer["choices"][0]["message"]["content"]
    return content


def engines(installation: ChartRelease) -> set[str]:
    """Return the uids of the engines' pods."""
    return {pod["metadata"]["uid"] for pod in installation.pods(NAME, "engine")}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("own_cluster")
def test_pods_serve_a_model_of_a_claim_while_they_are_scaled_and_rolled(
    installation: ChartRelease, claim: str, serve: Callable[..., None], tmp_path: Path
) -> None:
    serve(
        NAME,
        model={"source": f"pvc://{claim}/{model_folder().name}"},
        engine={
            "tokenBudget": {"min": 64, "max": 128, "initial": 128},
            "preemption": "recompute",
            "httpProcesses": 2,
            "realModel": {"kvBlocks": 256, "threads": 1},
            "resources": {"limits": {"cpu": "3", "memory": "4Gi"}},
        },
        router={"replicas": 1},
        replicas=1,
        slo={"classes": [{"name": "interactive", "ttftMs": 60_000, "tpotMs": 10_000}]},
    )
    url = installation.url(NAME)
    assert "Paris" in ask(installation, url, "What is the capital of France?")
    old = installation.status(NAME)["currentRevision"]

    with replay_load(installation, NAME, tmp_path, rate_per_s=1, lengths=(16, 4)):
        installation.patch(NAME, replicas=2)
        wait_for(
            lambda: installation.status(NAME).get("readyReplicas") == 2, "two engines", START_S
        )
        before = engines(installation)
        installation.patch(NAME, engine={"prefillChunkTokens": 64})
        # One additional engine may run, so the new engines start one after the other.
        wait_for(
            lambda: installation.status(NAME)["currentRevision"] != old,
            "both engines of the new revision serve",
            2 * START_S,
        )
        assert before.isdisjoint(engines(installation))
        installation.patch(NAME, replicas=1)
        wait_for(lambda: len(engines(installation)) == 1, "one engine", START_S)
        installation.wait_settled(NAME)
    (pod,) = installation.pods(NAME, "engine")
    answered = installation.state(pod["metadata"]["name"])["answered"]
    assert sum(row[0] for row in answered) > 0, "both HTTP processes are counted"
    assert "Paris" in ask(installation, url, "What is the capital of France?")
