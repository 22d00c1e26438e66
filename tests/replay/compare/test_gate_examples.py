"""The pipelines and manifests of examples/gate, checked as far as possible without their servers.

Commands are parsed with our own parsers. Files are validated with the published schemas of GitHub,
GitLab, Kubernetes, Argo Rollouts and Flagger. Argo's own code evaluates its conditions on the
results that `replay gate --serve` answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from tests.replay.compare.recorded import chat_run
from tools.cluster import binaries
from tools.cluster.host import GO_MODULE, lacks_for_building
from yarl import URL

from goodput_core.slo.verdict import VerdictKind
from goodput_replay.arguments import make_parser as replay_parser
from goodput_replay.compare import ab, gate_command
from goodput_replay.compare.gate import RunPair, judge_runs
from goodput_replay.compare.serving import make_app

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "gate"
FILES = sorted(path.name for path in EXAMPLES.iterdir())
PAGE = ROOT / "docs" / "gate.md"
ARGO_MODULE = ROOT / "tools" / "rollouts"
FLAGGER = "github.com/fluxcd/flagger@v1.36.1"
BIN = Path(sys.executable).parent


def documents(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / name).read_text("utf-8")))
    return found


def document(name: str, kind: str) -> dict[str, Any]:
    (found,) = (one for one in documents(name) if one["kind"] == kind)
    return found


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, dict | list):
            yield from mappings(one)


def scripts(name: str) -> Iterator[str]:
    """Return the shell scripts of a file; arguments of a container count as one."""
    for one in (m for document in documents(name) for m in mappings(document)):
        if isinstance(one.get("run"), str):
            yield one["run"]
        elif isinstance(one.get("script"), list):
            yield from one["script"]
        elif one.get("command") == ["sh", "-ec"]:
            yield from one["args"]
        elif "image" in one and "args" in one:
            yield shlex.join(one["args"])


def replays(name: str) -> list[list[str]]:
    """Return the arguments of each `replay` of a file's scripts."""
    found = []
    for script in scripts(name):
        for line in script.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "replay" in words:
                words = words[words.index("replay") + 1 :]
                found.append(words[: words.index("||")] if "||" in words else words)
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_commands_of_an_example_parse(name: str) -> None:
    commands = replays(name)
    assert commands
    for argv in commands:
        if argv[0] == "gate":
            gate_command.make_parser().parse_args(argv[1:])
        elif argv[0] == "ab":
            given, rest = ab.make_parser().parse_known_args(argv[1:])
            (old, new) = given.target or given.emulate
            option = "--target" if given.target else "--emulate"
            for build in (old, new):
                # The addresses of GitLab are variables.
                value = "http://127.0.0.1:8000" if build.startswith("$") else build
                replay_parser().parse_args([*rest, option, value])
        else:
            replay_parser().parse_args(argv)


def test_every_example_is_shown_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    assert [name for name in FILES if f"(../examples/gate/{name})" not in page] == []
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    texts = [textwrap.dedent(block) for block in blocks]
    assert texts
    lines = {name: (EXAMPLES / name).read_text("utf-8").splitlines() for name in FILES}
    for text in texts:
        assert any(is_excerpt(text.splitlines(), file) for file in lines.values()), text


def is_excerpt(part: list[str], whole: list[str]) -> bool:
    """Return True if the lines follow each other in the file, at any indentation."""
    starts = (whole[i : i + len(part)] for i in range(len(whole) - len(part) + 1))
    return any(textwrap.dedent("\n".join(found)).splitlines() == part for found in starts)


@pytest.mark.parametrize("name", FILES)
def test_pods_have_few_rights(name: str) -> None:
    pods = [m for one in documents(name) for m in mappings(one) if "containers" in m]
    assert pods or name in {"github-actions.yaml", "gitlab-ci.yaml"}
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]["memory"]
            assert container["resources"]["limits"]["memory"]
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ("vendor.github-workflows", "github-actions.yaml"),
        ("vendor.gitlab-ci", "gitlab-ci.yaml"),
    ],
)
def test_pipelines_follow_their_published_schemas(schema: str, name: str, tmp_path: Path) -> None:
    (good,) = documents(name)
    # YAML 1.1 reads the key `on` as a boolean.
    good = {"on" if str(key) == "True" else key: value for key, value in good.items()}
    bad = json.loads(json.dumps(good).replace('"image"', '"imag"').replace('"runs-on"', '"runs"'))
    bad |= {"gate": {"script": 1}}
    problems = check(tmp_path, {"good": good, "bad": bad}, "--builtin-schema", schema)
    assert problems.keys() == {"bad"}, problems


def check(folder: Path, documents: dict[str, Any], *schema: str) -> dict[str, str]:
    """Return the problem of each document that does not follow the schema, by its name."""
    paths = [folder / f"{name}.json" for name in documents]
    for path, one in zip(paths, documents.values(), strict=True):
        path.write_text(json.dumps(one), "utf-8")
    done = subprocess.run(
        [BIN / "check-jsonschema", *schema, "--output-format=json", *paths],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr
    errors = json.loads(done.stdout)["errors"]
    return {Path(e["filename"]).stem: f"{e['path']}: {e['message']}" for e in errors}


def go(*words: str, folder: Path = ARGO_MODULE) -> subprocess.CompletedProcess[str]:
    """Run Go with the caches of the test cluster, or skip the test if Go is missing or too old."""
    if lacks := lacks_for_building():
        pytest.skip(f"NOT RUN: {'; '.join(lacks)}")
    return subprocess.run(
        ["go", *words],
        cwd=folder,
        env=binaries.go_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def download(*modules: str, folder: Path = ARGO_MODULE) -> list[dict[str, Any]]:
    """Download modules, or all of a go.mod; skip the test only if the network is the reason.

    Any other failure is a fault of the go.mod, go.sum or examples, or an older Go.
    """
    done = go("mod", "download", "-json", *modules, folder=folder)
    if done.returncode:
        reason = (done.stderr + done.stdout)[-500:]
        if any(text in reason for text in NO_NETWORK):
            pytest.skip(f"NOT RUN: the network has no Go modules: {reason}")
        raise AssertionError(reason)
    found: list[dict[str, Any]] = json.loads(f"[{done.stdout.strip().replace(NEXT, CUT)}]")
    return found


NO_NETWORK = ("dial tcp", "no such host", "i/o timeout", "TLS handshake timeout", "EOF")
NEXT, CUT = "}\n{", "},{"
CRDS = {
    "AnalysisTemplate": ("github.com/argoproj/argo-rollouts", "manifests/crds/analysis-template"),
    "Rollout": ("github.com/argoproj/argo-rollouts", "manifests/crds/rollout"),
    "Canary": (FLAGGER, "artifacts/flagger/"),
}
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def resource_schema(kind: str, api_version: str) -> dict[str, Any]:
    """Return the published JSON Schema of a kind, without unknown fields."""
    group, _, version = api_version.rpartition("/")
    if kind not in CRDS:
        (kubernetes,) = download("k8s.io/kubernetes", folder=GO_MODULE)
        path = Path(kubernetes["Dir"]) / "api/openapi-spec/swagger.json"
        definitions = json.loads(path.read_text("utf-8"))["definitions"]
        name = f"io.k8s.api.{group or 'core'}.{version}.{kind}"
        return make_strict({"$ref": f"#/definitions/{name}", "definitions": definitions})
    module, prefix = CRDS[kind]
    (downloaded,) = download(module)
    (path,) = Path(downloaded["Dir"]).glob(f"{prefix}*crd.yaml")
    crds = list(yaml.safe_load_all(path.read_text("utf-8")))
    (crd,) = (one for one in crds if one["spec"]["names"]["kind"] == kind)
    (served,) = (one for one in crd["spec"]["versions"] if one["name"] == version)
    schema: dict[str, Any] = served["schema"]["openAPIV3Schema"]
    schema["properties"] |= {"metadata": ANYTHING}
    return make_strict(schema)


def make_strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Reject unknown fields, as `kubectl apply` does."""
    for one in list(mappings(schema)):
        closed = isinstance(one.get("properties"), dict) and one.get("type") == "object"
        if closed and not one.get("x-kubernetes-preserve-unknown-fields"):
            one.setdefault("additionalProperties", False)
    return schema


def resources() -> dict[tuple[str, str], dict[str, Any]]:
    """Return all resources by kind and version, and in these by name."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name in FILES:
        for one in documents(name):
            # Argo's CRD leaves the Job of a metric open.
            jobs = [
                {"apiVersion": "batch/v1", "kind": "Job"} | metric["job"]
                for metric in mappings(one)
                if "job" in metric and "image" not in metric
            ]
            for number, resource in enumerate([one, *jobs] if "kind" in one else []):
                kind = resource["kind"], resource["apiVersion"]
                found.setdefault(kind, {})[f"{name}-{number}"] = resource
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "by_name"), [pytest.param(*item, id=item[0][0]) for item in resources().items()]
)
def test_resources_follow_the_schemas_of_their_projects(
    kind: tuple[str, str], by_name: dict[str, Any], tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(resource_schema(*kind)), "utf-8")
    one = next(iter(by_name.values()))
    bad = one | {"spec": one["spec"] | {"unknownField": 1}}
    problems = check(tmp_path, by_name | {"bad": bad}, "--schemafile", str(schema))
    assert problems.keys() == {"bad"}, problems
    assert "unknownField" in problems["bad"]


@pytest.fixture(scope="module")
def argo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that measures a metric with the code of Argo Rollouts."""
    program = tmp_path_factory.mktemp("argo") / "measure"
    download()
    done = go("build", "-trimpath", "-mod=readonly", "-o", str(program), ".")
    assert done.returncode == 0, done.stderr
    return program


RELEASE = "6f7d9c"
RUNS: dict[VerdictKind, dict[str, Any]] = {
    VerdictKind.PASS: {"seconds": 120},
    VerdictKind.FAIL: {"seconds": 120, "missed": range(0, 1200, 5)},
    VerdictKind.INCONCLUSIVE: {"seconds": 10},
    VerdictKind.INVALID: {"seconds": 120, "lag_ms": 90},
}
"""Recorded runs with each verdict."""
BY_VERDICT = {
    VerdictKind.PASS: "Successful",
    VerdictKind.FAIL: "Failed",
    VerdictKind.INCONCLUSIVE: "Inconclusive",
    VerdictKind.INVALID: "Inconclusive",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", [RELEASE, "an earlier one"])
@pytest.mark.parametrize("verdict", list(VerdictKind))
async def test_argo_distinguishes_three_outcomes(
    verdict: VerdictKind, release: str, argo: Path, tmp_path: Path
) -> None:
    result = judge_runs([RunPair(candidate=chat_run(tmp_path / "run", **RUNS[verdict]))])
    assert result.verdict is verdict
    result = replace(result, candidates=(f"/runs/{release}/pair-1/candidate",))
    metrics = document("argo-rollouts.yaml", "AnalysisTemplate")["spec"]["metrics"]
    (metric,) = (one for one in metrics if "web" in one["provider"])
    async with TestServer(make_app(result)) as server:
        arguments = {"release": RELEASE, "namespace": "default"}
        given = {
            "metric": metric,
            "args": [{"name": name, "value": value} for name, value in arguments.items()],
            "url": str(server.make_url("/")),
        }
        measuring = await asyncio.create_subprocess_exec(
            argo, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, problem = await measuring.communicate(json.dumps(given).encode())
    expected = BY_VERDICT[verdict] if release == RELEASE else "Inconclusive"
    assert output.decode().strip() == expected, problem.decode()


FLAGGER_ACCEPTS = 202
"""Flagger's callWebhook takes any higher status for a failure."""


@pytest.mark.parametrize("verdict", list(VerdictKind))
async def test_flagger_accepts_only_a_pass(verdict: VerdictKind, tmp_path: Path) -> None:
    """The request is that of Flagger's documentation (usage/webhooks, "Webhook payload")."""
    canary, service = document("flagger.yaml", "Canary"), document("flagger.yaml", "Service")
    (hook,) = canary["spec"]["analysis"]["webhooks"]
    assert hook["type"] == "pre-rollout", "before clients reach the canary"
    url = URL(hook["url"])
    (port,) = service["spec"]["ports"]
    assert (url.host, url.port) == (f"{service['metadata']['name']}.default", port["port"])
    (serving,) = (argv for argv in replays("flagger.yaml") if argv[0] == "gate")
    given = gate_command.make_parser().parse_args(serving[1:])
    (container,) = document("flagger.yaml", "Job")["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": port["targetPort"], "containerPort": given.serve[1]}]
    result = judge_runs([RunPair(candidate=chat_run(tmp_path / "run", **RUNS[verdict]))])
    payload = {
        "name": canary["metadata"]["name"],
        "namespace": "default",
        "phase": "Progressing",
        "checksum": "85d557f47b",
        "metadata": {"test": "all", "token": "16688eb5e9f289f1991c"},
    }
    async with (
        TestServer(make_app(result)) as server,
        ClientSession() as client,
        client.post(server.make_url(url.path), json=payload) as response,
    ):
        assert (response.status <= FLAGGER_ACCEPTS) is (verdict is VerdictKind.PASS)
        assert (await response.json())["verdict"] == verdict.value, "Flagger shows the body"


def test_the_command_of_the_workflow_runs(tmp_path: Path) -> None:
    """The manifests of both branches are equal, so the verdict is not FAIL."""
    for folder in ("deploy", "base/deploy"):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(ROOT / "examples/chat.yaml", tmp_path / folder / "service.yaml")
    (tmp_path / "traces").mkdir()
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    made = "goodput trace synthesize -o traces/prod.parquet --duration 15m --rate 1 --seed 1"
    subprocess.run(shlex.split(made), cwd=tmp_path, env=environment, check=True, timeout=60)
    (script,) = (text for text in scripts("github-actions.yaml") if "replay ab" in text)
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode in {0, 2}, done.stderr
    assert "interactive" in (tmp_path / "gate.md").read_text("utf-8")
    assert (tmp_path / "gate.xml").is_file()
    assert (tmp_path / "runs/ab/ab.json").is_file()
