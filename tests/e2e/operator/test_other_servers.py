"""Services whose engines run another server: an emulated one with vLLM's command and metrics.

Four services run at the same time, because each waits minutes for the windows of the laws or for
its gate. Two are scaled by their targets, one of which has a metrics page that does not respond.
The two others have a gate.
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


@pytest.fixture(scope="module")
def services(
    installation: ChartRelease, image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChartRelease]:
    """The four services, two of which have begun to gate a change."""
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
        )
    gate = {
        "trace": "pvc://vllm-gates/trace.parquet",
        "window": {"startSeconds": 0, "endSeconds": WINDOW_S},
        "pairs": 2,
        "margin": "5%",
        "resources": {"requests": {"cpu": "10m"}},
    }
    gated = ("vllm-good", "vllm-bad")
    with claim_to(folder, installation, "vllm-gates"):
        for name in gated:
            installation.apply(
                name,
                model=model,
                engine=engine(),
                router={"replicas": 1},
                replicas=1,
                slo={"classes": [{**target, "tpotMs": 120, "objective": "80%"}]},
                rollout={"gate": gate},
            )
        for name in (*gated, *SCALED):
            installation.wait_settled(name)
        # More batched tokens are a new revision, because vLLM cannot change them at run time.
        # After the change, the metrics page is missing.
        changed = engine("missing", tokenBudget={"initial": 4096})
        installation.patch("vllm-good", engine=changed)
        installation.patch("vllm-bad", engine=engine("", "--enforce-eager"))
        yield installation
        for name in (*gated, *SCALED):
            installation.kubectl("delete", "llmservice", name)
        installation.wait_deleted(*gated, *SCALED)


def replicas(installation: ChartRelease, name: str) -> int:
    labels = f"goodput.dev/llmservice={name},app.kubernetes.io/component=engine"
    (deployment,) = installation.get("deployments", "-l", labels)["items"]
    count: int = deployment["spec"]["replicas"]
    return count


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_servers_are_scaled_up_and_down_by_their_targets(
    services: ChartRelease, tmp_path: Path
) -> None:
    reason, message = services.condition("vllm", "RuntimeLimited")
    assert reason == "NoLimits", message
    assert "no token budget" in message
    body = {"model": "vllm", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    url = f"{services.url('vllm')}/v1/chat/completions"
    answer = services.run_inside("curl", "--silent", "--json", json.dumps(body), url)
    assert json.loads(answer)["usage"]["completion_tokens"] == 3
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_good_change_of_another_server_serves_and_a_bad_one_does_not(
    services: ChartRelease,
) -> None:
    def phase(name: str) -> str:
        found: str = services.status(name).get("gate", {}).get("phase", "")
        return found

    gated, ends = ("vllm-good", "vllm-bad"), {"Passed", "Failed", "Paused"}
    wait_for(lambda: ends.issuperset(map(phase, gated)), "both gates have an outcome", 450)
    good, bad = services.status("vllm-good"), services.status("vllm-bad")
    assert good["gate"]["verdict"] == "PASS", good["gate"]
    assert bad["gate"]["verdict"] == "FAIL", bad["gate"]
    assert bad["failedRevision"] == bad["gate"]["revision"]
    assert bad["currentRevision"] != bad["failedRevision"]
    services.wait_settled("vllm-good")
    (pod,) = services.pods("vllm-good", "engine")
    assert "4096" in pod["spec"]["containers"][0]["command"]
    (pod,) = services.pods("vllm-bad", "engine")
    assert "--enforce-eager" not in pod["spec"]["containers"][0]["command"]
    wait_for(
        lambda: services.condition("vllm-good", "RuntimeLimited")[0] == "NoReadings",
        "the status says that the metrics page is missing",
        60,
    )
    assert services.condition("vllm-good", "Ready")[0] == "Serving"
