"""`examples/smollm2.yaml` with a PersistentVolumeClaim: served, scaled, rolled and deleted.

The engines are pods that compute SmolLM2 with torch. `make smollm2` installs both.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from tests.builders.documented import documented_command
from tools.cluster.handle import wait_for
from tools.e2e.claims import claim_to
from tools.e2e.clients import replay_load
from tools.e2e.installation import conditions_of
from tools.smollm2 import model_folder
from tools.torch_packages import is_installed

from goodput_core.contract import HEADER_REPLICA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.e2e.installation import ChartRelease

ROOT = Path(__file__).resolve().parents[3]
START_S = 150
"""Time in which an engine starts beside two others on a machine that is busy."""
NAME = "smollm2"
SESSION = "X-Session"
CLAIM = "weights"


@pytest.fixture
def claim(installation: ChartRelease) -> Iterator[str]:
    """A claim to a read-only volume that has the model's folder."""
    if not (is_installed() and model_folder().exists()):
        pytest.skip("NOT RUN: torch or SmolLM2 is missing; run `make smollm2`")
    with claim_to(model_folder().parent, installation, CLAIM, read_only=True):
        yield CLAIM


def ask(
    installation: ChartRelease, url: str, question: str, *, session: str = "", tokens: int = 16
) -> tuple[str, str]:
    """Return the answer to a question, with the most probable tokens, and the replica's name."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": tokens,
    }
    header = ("--header", f"{SESSION}: {session}") if session else ()
    words = ("curl", "--silent", "--fail", "--include", "--max-time", "30", *header)
    path = f"{url}/v1/chat/completions"
    answer = installation.run_inside(*words, "--json", json.dumps(body), path)
    head, _, text = answer.replace("\r\n", "\n").partition("\n\n")
    (replica,) = re.findall(rf"(?im)^{HEADER_REPLICA}: (\S+)$", head)
    content: str = json.loads(text)["choices"][0]["message"]["content"]
    return content, replica


def check_session(installation: ChartRelease, url: str) -> None:
    """Check that the turns of a session reach one of two pods, which has cached their prefix.

    Without other requests, because a session leaves a pod that has more than its share of them.
    """
    (router,) = installation.pods(NAME, "router")

    def routed() -> bool:
        replicas = installation.state(router["metadata"]["name"])["replicas"]
        return [one["ready"] for one in replicas] == [True, True]

    wait_for(routed, "the router knows both engines")

    def hits() -> int:
        tokens: int = installation.state(replica)["prefix_hit_tokens"]
        return tokens

    opening = "Read this list and remember it: " + " ".join(map(str, range(40))) + "."
    _, replica = ask(installation, url, opening, session="user-1", tokens=1)
    for question in ("Which number is first?", "Which one is last?"):
        before = hits()
        turn = f"{opening} {question}"
        assert ask(installation, url, turn, session="user-1", tokens=1)[1] == replica
        assert hits() >= before + 64


def engines(installation: ChartRelease) -> set[str]:
    """Return the uids of the engines' pods."""
    return {pod["metadata"]["uid"] for pod in installation.pods(NAME, "engine")}


def ready_engines(installation: ChartRelease) -> int:
    """Return the number of ready engines."""
    pods = installation.pods(NAME, "engine")
    return sum(conditions_of(pod).get("Ready") == "True" for pod in pods)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("own_cluster")
def test_pods_serve_a_model_of_a_claim_while_they_are_scaled_and_rolled(
    installation: ChartRelease, claim: str, serve: Callable[..., None], tmp_path: Path
) -> None:
    command = documented_command("engine.md", "sed 's#file")
    text = subprocess.run(command[: command.index("|")], cwd=ROOT, capture_output=True, check=True)
    example = yaml.safe_load(text.stdout)["spec"]
    assert example["model"] == {"source": f"pvc://{claim}/{model_folder().name}"}
    # Up to three engines share this machine, so they are small and keep no targets of one alone.
    (slo_class,) = example["slo"]["classes"]
    changes = {
        "engine": {
            **example["engine"],
            "httpProcesses": 2,
            "realModel": {"kvBlocks": 256, "threads": 1},
            "resources": {"limits": {"cpu": "3", "memory": "4Gi"}},
        },
        "router": {"replicas": 1, "sessionAffinity": {"header": SESSION}},
        "replicas": 2,
        "slo": {**example["slo"], "classes": [{**slo_class, "ttftMs": 60_000, "tpotMs": 10_000}]},
    }
    serve(NAME, **{**example, **changes})
    url = installation.url(NAME)
    assert "Paris" in ask(installation, url, "What is the capital of France?")[0]
    check_session(installation, url)
    old = installation.status(NAME)["currentRevision"]

    with replay_load(installation, NAME, tmp_path, rate_per_s=1, lengths=(16, 4)):
        installation.patch(NAME, replicas=1)
        wait_for(lambda: len(engines(installation)) == 1, "one engine", START_S)
        installation.patch(NAME, replicas=2)
        wait_for(lambda: ready_engines(installation) == 2, "two engines", START_S)
        before = engines(installation)
        installation.patch(NAME, engine={"prefillChunkTokens": 64})
        # One additional engine may run, so the new engines start one after the other.
        wait_for(
            lambda: installation.status(NAME)["currentRevision"] != old,
            "both engines of the new revision serve",
            2 * START_S,
        )
        assert before.isdisjoint(engines(installation))
        installation.wait_settled(NAME)
    names = [pod["metadata"]["name"] for pod in installation.pods(NAME, "engine")]
    answered = [row[0] for name in names for row in installation.state(name)["answered"]]
    assert sum(answered) > 0, "both HTTP processes are counted"
    assert "Paris" in ask(installation, url, "What is the capital of France?")[0]
