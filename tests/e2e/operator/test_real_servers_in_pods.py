"""Real servers of other projects in pods, of kind OpenAI, with SmolLM2 from a claim.

`transformers serve` runs after `make smollm2`, so in CI. llama_cpp.server is compiled from source
and runs after `make test-foreign` alone.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.builders.traces import steady_rows, write_rows
from tools.cluster.handle import wait_for
from tools.cluster.images import Image, python_image
from tools.e2e.claims import claim_to
from tools.foreign.servers import COMPLETE, folder, gguf_file, serving_packages
from tools.smollm2 import model_folder
from tools.torch_packages import is_installed, packages_folder

from goodput_replay.runs.record_rows import read_judged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tools.cluster.handle import OwnCluster
    from tools.e2e.installation import ChartRelease

KINDS: Final = ("transformers", "llama-cpp")
MOUNT: Final = "/var/lib/goodput/models"
PORT: Final = ["--host", "0.0.0.0", "--port", "8000"]
REQUESTS: Final = 5


def transformers_image() -> tuple[Image, Path, dict[str, Any]]:
    """Return the image, the folder of the model, and the runtime of `transformers serve`."""
    if not (is_installed() and model_folder().exists()):
        pytest.skip("NOT RUN: torch or SmolLM2 is missing; run `make smollm2`")
    if not (serving_packages() / COMPLETE).exists():
        pytest.skip("NOT RUN: the packages of transformers serve are missing; run `make smollm2`")
    python = python_image()
    packages = [str(serving_packages()), str(packages_folder())]
    image = Image(
        folders=[*python.folders, *packages],
        path=python.path,
        env={**python.env, "PYTHONPATH": ":".join(packages), "OMP_NUM_THREADS": "1"}
        # Without an existing folder, /v1/models responds with 500.
        | {"HF_HUB_CACHE": "/tmp"},
        entrypoint=["python", "-m", "transformers.cli.transformers"],
    )
    # By default it takes 60 % of the memory for blocks.
    blocks = ["--continuous-batching", "--cb-num-blocks", "64"]
    args = ["serve", "$(GOODPUT_MODEL)", *blocks, "--device", "cpu", "--dtype", "float32", *PORT]
    return image, model_folder(), {"args": args, "healthPath": "/health"}


def llama_cpp_image() -> tuple[Image, Path, dict[str, Any]]:
    """Return the image, the folder of the model, and the runtime of llama_cpp.server."""
    installed = folder() / "llama_cpp"
    if not (installed / COMPLETE).exists() or not gguf_file().exists():
        pytest.skip("NOT RUN: llama_cpp.server is missing; run `make test-foreign`")
    image = Image(
        folders=[sys.base_prefix, str(installed)],
        path=[str(installed / "bin")],
        env={"PYTHONDONTWRITEBYTECODE": "1"},
        entrypoint=["python", "-m", "llama_cpp.server"],
    )
    model = f"$(GOODPUT_MODEL)/{gguf_file().name}"
    context = ["--n_ctx", "1024", "--n_threads", "1", "--interrupt_requests", "false"]
    return image, gguf_file().parent, {"args": ["--model", model, *context, *PORT]}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_server_of_kind_openai_answers_a_tracereplay(
    installation: ChartRelease,
    own_cluster: OwnCluster,
    serve: Callable[..., None],
    kind: str,
    tmp_path: Path,
) -> None:
    image, weights, runtime = transformers_image() if kind == KINDS[0] else llama_cpp_image()
    name, tag = f"real-{kind}", f"goodput.test/{kind}:1"
    own_cluster.publish({tag: image})
    objective = {"name": "interactive", "ttftMs": 60_000, "tpotMs": 10_000, "objective": "50%"}
    tmp_path.chmod(0o777)
    write_rows(
        tmp_path / "prod.parquet", steady_rows(REQUESTS, per_s=1, input_tokens=16, output_tokens=6)
    )
    with (
        claim_to(weights.parent, installation, f"weights-{kind}", read_only=True) as claim,
        claim_to(tmp_path, installation, f"replays-{kind}") as replays,
    ):
        serve(
            name,
            model={"source": f"pvc://{claim}/{weights.name}"},
            engine={
                "runtime": {"kind": "OpenAI", "image": tag, **runtime},
                "drainSeconds": 2,
                "resources": {"limits": {"cpu": "1", "memory": "4Gi"}},
            },
            router={"replicas": 1},
            replicas=1,
            slo={"classes": [objective]},
        )
        reason, message = installation.condition(name, "RuntimeLimited")
        assert reason == "NoReadings", message
        assert "metricsPath is not set" in message
        (pod,) = installation.pods(name, "engine")
        variables = {v["name"]: v.get("value") for v in pod["spec"]["containers"][0]["env"]}
        model = variables["GOODPUT_MODEL"]
        if kind == "llama-cpp":
            model = f"{model}/{gguf_file().name}"
        question = "What is the capital of France? Answer in one sentence."
        ask = {"role": "user", "content": question}
        body = {"model": model, "messages": [ask], "temperature": 0, "max_tokens": 12}
        words = ("curl", "--silent", "--fail", "--max-time", "120", "--json", json.dumps(body))
        url = f"{installation.url(name)}/v1/chat/completions"
        answer = json.loads(installation.run_inside(*words, url, timeout_s=150))
        assert "Paris" in answer["choices"][0]["message"]["content"]

        # Both servers reject token ids.
        form = {"endpoint": "chat", "prompt": "text"}
        if kind == "transformers":
            form = {"tokenizer": f"pvc://{claim}/{weights.name}/tokenizer.json"}
        manifest = {
            "apiVersion": "goodput.dev/v1alpha1",
            "kind": "TraceReplay",
            "metadata": {"name": name, "namespace": installation.namespace},
            "spec": {
                "trace": f"pvc://{replays}/prod.parquet",
                "target": {"service": name, "model": model, **form},
                "allowProduction": True,
                "records": f"pvc://{replays}/runs",
                "resources": {"requests": {"cpu": "10m"}},
            },
        }
        installation.kubectl("create", "-f", "-", stdin=json.dumps(manifest))
        installation.wait("condition=Finished", f"tracereplay/{name}", timeout_s=240)
        status = installation.get("tracereplay", name)["status"]
        runs = list(tmp_path.glob("runs/*/shard-0"))
        assert runs, status
        records = [judged.record for judged in read_judged(runs[0])]
        assert {record.outcome for record in records} == {"ok"}, status
        assert len(records) == REQUESTS
        # The operator measures every ten seconds.
        (measured,) = wait_for(lambda: installation.status(name).get("classes", []), "goodput")
        assert measured["name"] == "interactive"
