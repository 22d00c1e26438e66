"""Servers that reject token ids are measured and gated with the fields of a manifest alone."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from tests.builders.manifests import llmservice
from tests.builders.tokenizers import KINDS
from tests.replay.sending.stand_ins import running
from tests.replay.sending.test_text_prompts import FINISHED, ROWS, Tokenizing

from goodput_core.contract import FOLDER_CLAIMS
from goodput_core.spec.codec import decode
from goodput_core.spec.tracereplay import TraceReplaySpec
from goodput_operator.render.gate import gate_job
from goodput_operator.render.metadata import Owner
from goodput_operator.render.pods import Installation
from goodput_operator.render.replay_pod import RESULT_FILE, SLO_FILE
from goodput_operator.replays.jobs import ReplayRun, shards_job
from goodput_replay.compare.recording import read_recording
from goodput_replay.runs.prompt_kind import PromptKind
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.replay.sending.builders import WriteTrace

INSTALLATION = Installation(engine_image="e:1", router_image="r:1", replay_image="replay:1")
TARGET = {"name": "default", "ttftMs": 60_000, "tpotMs": 10_000, "objective": "50%"}
RUNTIME = {"kind": "OpenAI", "image": "llama-cpp:1", "args": ["--port", "8000"]}
EXACT = {"tokenizer": "pvc://weights/tokenizer.json"}


class UnlistedModels(Tokenizing):
    """A server as `transformers serve`: it lists no models, so the requests must name one."""

    async def list_models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []})


@pytest.fixture(scope="module")
def server() -> UnlistedModels:
    tokenizer = KINDS["byte-level BPE with a prefix space and a start token"][0]()
    return UnlistedModels(tokenizer=tokenizer, ids_status=500)


@pytest.fixture
def claims(trace_of: WriteTrace, server: Tokenizing, tmp_path: Path) -> Path:
    """A folder with the content of the claims."""
    for name in ("traces", "weights"):
        (tmp_path / "claims" / name).mkdir(parents=True)
    trace_of(ROWS).rename(tmp_path / "claims/traces/prod.parquet")
    server.tokenizer.save(str(tmp_path / "claims/weights/tokenizer.json"))
    return tmp_path / "claims"


async def run_pod(
    server: Tokenizing, claims: Path, render: Callable[[str], dict[str, Any]], *without: str
) -> tuple[int, str]:
    """Run the command of a Job's pod here, with its claims and its SLO.

    Args:
        server: the target.
        claims: folder of the claims.
        render: returns the Job for the URL of the target.
        without: options to leave out, each with its value.
    """
    async with running(server) as url:
        template = render(url)["spec"]["template"]
        [container] = template["spec"]["containers"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        (claims / "slo.json").write_text(template["metadata"]["annotations"]["goodput.dev/slo"])
        words = []
        for given in container["command"][1:]:
            if FOLDER_CLAIMS in given:
                assert any(given.startswith(f"{folder}/") for folder in mounted)
            word = given.replace(FOLDER_CLAIMS, str(claims))
            words.append(word.replace("$(JOB_COMPLETION_INDEX)", "0"))
        for option in without:
            at = words.index(option)
            del words[at : at + 2]
        place = {SLO_FILE: str(claims / "slo.json"), RESULT_FILE: str(claims / "result.json")}
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "goodput_core", *(place.get(word, word) for word in words),
            stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, (out + err).decode()


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (EXACT, PromptKind.TOKENIZER_WORDS),
        ({"endpoint": "chat", "prompt": "text"}, PromptKind.INVENTED_WORDS),
    ],
    ids=["exact completions", "approximate chat"],
)
async def test_a_tracereplay_measures_a_server_that_rejects_token_ids(
    server: Tokenizing, claims: Path, form: dict[str, str], kind: PromptKind
) -> None:
    def render(url: str) -> dict[str, Any]:
        target = {"url": url, "model": "m", **form}
        slo = {"classes": [TARGET]}
        fields = {"trace": "pvc://traces/prod.parquet", "target": target, "slo": slo}
        spec = decode(TraceReplaySpec, {**fields, "records": "pvc://runs"}, "spec")
        assert spec.slo is not None
        metadata = {"name": "july", "namespace": "team", "uid": "0123456789abcdef"}
        run = ReplayRun.of({"metadata": metadata}, spec)
        return shards_job(run, spec, spec.slo, INSTALLATION, {})

    code, output = await run_pod(server, claims, render, "--arm")
    assert code in FINISHED, output
    summary = read_summary(claims / "runs/july-01234567/shard-0")
    assert summary.target.prompt is kind
    assert summary.overall.total == len(ROWS)
    assert json.loads((claims / "result.json").read_text())["total"] == len(ROWS)


async def test_a_gate_compares_servers_that_reject_token_ids(
    server: Tokenizing, claims: Path
) -> None:
    def render(url: str) -> dict[str, Any]:
        form = {"model": "m", "endpoint": "chat", "prompt": "text", **EXACT}
        fields = {"trace": "pvc://traces/prod.parquet", "pairs": 1, "records": "pvc://runs"}
        service = llmservice(
            model={"source": "pvc://weights"},
            engine={"runtime": RUNTIME},
            slo={"classes": [TARGET]},
            rollout={"gate": {**fields, **form}},
        )
        assert service.spec.rollout.gate is not None
        return gate_job(
            Owner(name="chat", namespace="team", uid="u"),
            service.spec,
            service.spec.rollout.gate,
            INSTALLATION,
            key="k",
            attempt=1,
            candidate="chat-new",
            baseline="chat-old",
            targets=[url, url],
            replicas=1,
            annotations={},
        )

    code, output = await run_pod(server, claims, render, "--progress")
    # One pair of runs decides nothing.
    assert code in {2, *FINISHED}, output
    folder = claims / "runs/chat-new-k-1"
    [pair] = read_recording(folder).pairs
    for side in (pair.baseline, pair.candidate):
        summary = read_summary(folder / side)
        assert summary.target.prompt is PromptKind.TOKENIZER_WORDS
        assert summary.overall.total == len(ROWS)
