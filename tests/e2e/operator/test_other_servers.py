"""Services whose engines run another server: an emulated one with vLLM's command and metrics.

Three services run at the same time, because each waits minutes for the windows of the laws or for
its gate. Two are scaled by their targets: one has a metrics page that does not respond, and the
other one a gate, which rejects a change meanwhile. The gate of the third accepts a change.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml
from tests.builders.traces import trace_row, write_rows
from tools.cluster.handle import wait_for
from tools.cluster.images import EMULATED_VLLM, emulated_vllm_image
from tools.cluster.starting import ROOT
from tools.e2e.claims import claim_to
from tools.e2e.clients import replay_load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.cluster.handle import OwnCluster
    from tools.e2e.installation import ChartRelease

WINDOW_S: Final = 22
"""A PASS needs requests in twenty seconds."""
PER_S: Final = 5
SCALED: Final = {"vllm": "old", "vllm-slow": "slow"}
"""Scaled services and their metrics pages: of an older version, and without a response."""
EXAMPLE: Final = ROOT / "examples" / "runtimes" / "emulated-vllm.yaml"
"""The manifest with which docs/runtimes.md begins."""
HIGH: Final = 4
"""Requests per second; one replica completes about 2.6 of (64, 24) tokens, too slowly."""
LENGTHS: Final = (64, 24)
LOW: Final = 1


@pytest.fixture(scope="module")
def image(own_cluster: OwnCluster) -> str:
    """An image with the program `vllm`."""
    own_cluster.publish({EMULATED_VLLM: emulated_vllm_image(ROOT)})
    return EMULATED_VLLM


def engine(metrics: str = "", *args: str, **fields: Any) -> dict[str, Any]:
    example = example_spec()["engine"]
    runtime = example["runtime"]
    return {
        **example,
        "runtime": {**runtime, "args": [*runtime["args"], *args]},
        "maxNumSeqs": 8,
        "drainSeconds": 2,
        "pod": {"env": [{"name": "EMULATED_METRICS", "value": metrics}]},
        **fields,
    }


def example_spec() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["spec"]
    return spec


SLOWED: Final = engine(SCALED["vllm"], "--enforce-eager")
"""A change that makes each step three times as long."""


@pytest.fixture(scope="module")
def services(
    installation: ChartRelease, image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChartRelease]:
    """The three services, two of which have begun to gate a change."""
    assert image == EMULATED_VLLM
    folder = tmp_path_factory.mktemp("vllm-gates")
    folder.chmod(0o777)
    rows = (
        trace_row(number, at_s=number / PER_S, input_tokens=64, output_tokens=8)
        for number in range(PER_S * WINDOW_S)
    )
    write_rows(folder / "trace.parquet", rows)
    model = example_spec()["model"]
    target = {"name": "interactive", "ttftMs": 2000, "tpotMs": 60, "objective": "40%"}
    gate = {
        "trace": "pvc://vllm-gates/trace.parquet",
        "window": {"startSeconds": 0, "endSeconds": WINDOW_S},
        "pairs": 2,
        "margin": "5%",
        "resources": {"requests": {"cpu": "10m"}},
    }
    with claim_to(folder, installation, "vllm-gates"):
        for name, page in SCALED.items():
            installation.apply(
                name,
                model=model,
                engine=engine(page),
                router={"replicas": 1},
                replicas=None,
                maxReplicas=3,
                slo={"classes": [target]},
                control={"intervalSeconds": 1, "scaleDownStabilizationSeconds": 5},
                rollout={"gate": gate} if name == "vllm" else None,
            )
        installation.apply(
            "vllm-good",
            model=model,
            engine=engine(),
            router={"replicas": 1},
            replicas=1,
            slo={"classes": [{**target, "tpotMs": 120, "objective": "80%"}]},
            rollout={"gate": gate},
        )
        for name in ("vllm-good", *SCALED):
            installation.wait_settled(name)
        # More batched tokens are a new revision, because vLLM cannot change them at run time.
        # After the change, the metrics page is missing.
        changed = engine("missing", tokenBudget={"initial": 4096})
        installation.patch("vllm-good", engine=changed)
        installation.patch("vllm", engine=SLOWED)
        yield installation
        for name in ("vllm-good", *SCALED):
            installation.kubectl("delete", "llmservice", name)
        installation.wait_deleted("vllm-good", *SCALED)


def replicas(installation: ChartRelease, name: str) -> int:
    labels = f"goodput.dev/llmservice={name},app.kubernetes.io/component=engine"
    (deployment,) = installation.get("deployments", "-l", labels)["items"]
    count: int = deployment["spec"]["replicas"]
    return count


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_servers_are_scaled_by_their_targets_and_a_slower_change_is_rolled_back(
    services: ChartRelease, tmp_path: Path
) -> None:
    reason, message = services.condition("vllm", "RuntimeLimited")
    assert reason == "NoLimits", message
    assert "no token budget" in message
    assert complete(services) == 3
    wait_for(
        lambda: services.condition("vllm-slow", "RuntimeLimited")[0] == "NoReadings",
        "the status says that there are no readings",
        60,
    )

    def all_have(*counts: int) -> bool:
        return all(replicas(services, name) in counts for name in SCALED)

    for step in ("high", "low"):
        for name in SCALED:
            (tmp_path / step / name).mkdir(parents=True)
    high, low = tmp_path / "high", tmp_path / "low"
    with (
        replay_load(services, "vllm", high / "vllm", rate_per_s=HIGH, lengths=LENGTHS),
        replay_load(services, "vllm-slow", high / "vllm-slow", rate_per_s=HIGH, lengths=LENGTHS),
    ):
        wait_for(lambda: all_have(2, 3), "a replica is added", 180)
    with (
        replay_load(services, "vllm", low / "vllm", rate_per_s=LOW, lengths=LENGTHS),
        replay_load(services, "vllm-slow", low / "vllm-slow", rate_per_s=LOW, lengths=LENGTHS),
    ):
        wait_for(lambda: all_have(1), "one replica is left", 400)
    for name in SCALED:
        messages = [decision["message"] for decision in services.status(name)["decisions"]]
        assert all(message.startswith("replicas ") for message in messages), "no limit is changed"
        assert services.condition(name, "Ready")[0] == "Serving"
    check_rollback(services)


def ended(installation: ChartRelease, name: str, timeout_s: float) -> dict[str, Any]:
    """Return the status of a service once its gate has an outcome."""
    ends = {"Passed", "Failed", "Paused"}

    def status() -> dict[str, Any]:
        found = installation.status(name)
        return found if found.get("gate", {}).get("phase") in ends else {}

    return wait_for(status, f"the gate of {name} has an outcome", timeout_s)


def check_rollback(installation: ChartRelease) -> None:
    """Check that the slower change never served, is taken back, and is remembered as failed."""
    failed = ended(installation, "vllm", 300)
    assert (failed["gate"]["phase"], failed["gate"]["verdict"]) == ("Failed", "FAIL"), failed
    stable, revision = failed["currentRevision"], failed["gate"]["revision"]
    assert failed["failedRevision"] == revision != stable
    installation.patch("vllm", engine=engine(SCALED["vllm"]))
    installation.wait_settled("vllm")
    settled = installation.status("vllm")
    assert settled["currentRevision"] == settled["updateRevision"] == stable
    assert settled["failedRevision"] == revision
    assert "gate" not in settled
    (pod,) = installation.pods("vllm", "engine")
    assert pod["metadata"]["labels"]["goodput.dev/revision"] == stable
    assert "--enforce-eager" not in pod["spec"]["containers"][0]["command"]
    assert complete(installation) == 3, "the service responds"
    installation.patch("vllm", engine=SLOWED)
    assert ended(installation, "vllm", 60)["gate"] == failed["gate"], "without another replay"


def complete(installation: ChartRelease) -> int:
    """Send a chat, and return the number of its tokens."""
    body = {"model": "vllm", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    url = f"{installation.url('vllm')}/v1/chat/completions"
    answer = installation.run_inside("curl", "--silent", "--json", json.dumps(body), url)
    tokens: int = json.loads(answer)["usage"]["completion_tokens"]
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_good_change_of_another_server_serves(services: ChartRelease) -> None:
    gate = ended(services, "vllm-good", 450)["gate"]
    assert gate["verdict"] == "PASS", gate
    services.wait_settled("vllm-good")
    (pod,) = services.pods("vllm-good", "engine")
    assert "4096" in pod["spec"]["containers"][0]["command"]
    wait_for(
        lambda: services.condition("vllm-good", "RuntimeLimited")[0] == "NoReadings",
        "the status says that the metrics page is missing",
        60,
    )
    assert services.condition("vllm-good", "Ready")[0] == "Serving"
