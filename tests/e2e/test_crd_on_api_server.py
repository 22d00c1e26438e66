"""A real API server takes the CustomResourceDefinition, and judges manifests as we do locally.

Manifests are sent through `kubectl proxy`, which knows how to reach any cluster, and as dry runs:
nothing is left behind, the definition neither, unless it was there before.
"""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.invalid_manifests import BASE, CASES, changed
from tools.cluster.handle import ClusterError

from goodput_core.errors import SpecError
from goodput_core.spec.codec import decode, encode
from goodput_core.spec.declaration import declared_fields
from goodput_core.spec.llmservice import LLMService, LLMServiceSpec
from goodput_core.spec.status import LLMServiceStatus
from goodput_operator.render.crd import render_crd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import Cluster

ROOT = Path(__file__).parents[2]
VALID = [
    manifest
    for path in [ROOT / "tests" / "core" / "valid_manifests.yaml", *ROOT.glob("examples/*.yaml")]
    for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    if "kind" in manifest  # the examples have a device profile, too
]
NAMED = [case for case in CASES if "server" not in case]
DECODED = [case for case in CASES if case.get("server") == "words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the API server said to a manifest."""

    code: int
    body: dict[str, Any]

    @property
    def paths(self) -> set[str]:
        """The fields that it named."""
        causes = self.body.get("details", {}).get("causes", [])
        unknown = re.findall(r'unknown field "([^"]+)"', self.body.get("message", ""))
        return {cause["field"].lstrip(".") for cause in causes if "field" in cause} | set(unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The API server, through a proxy that authenticates, and a namespace where nothing is."""

    url: str
    namespace: str

    def judge(self, manifest: Any, *, fields: str = "Strict") -> Answer:
        """Create the object without keeping it; `fields` says what becomes of unknown ones."""
        request = Request(
            f"{self.url}/apis/goodput.dev/v1alpha1/namespaces/{self.namespace}/llmservices"
            f"?dryRun=All&fieldValidation={fields}",
            # A date is text in JSON, as it is when kubectl reads the YAML.
            data=json.dumps(manifest, allow_nan=False, default=str).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urlopen(request, timeout=60) as answer:
                return Answer(code=answer.status, body=json.load(answer))
        except HTTPError as refusal:
            with refusal:
                return Answer(code=refusal.code, body=json.load(refusal))


@pytest.fixture(scope="module")
def definition(cluster: Cluster) -> Iterator[str]:
    """The definition's name; it is removed again unless it stood there before."""
    crd = render_crd()
    name: str = crd["metadata"]["name"]
    there = cluster.kubectl("get", "crd", name, "--ignore-not-found", "-o", "name")
    if not there:
        cluster.apply(crd, "--server-side")
        cluster.wait("condition=Established", f"crd/{name}")
    yield name
    if not there:
        cluster.kubectl("delete", "crd", name)


@pytest.fixture(scope="module")
def server(cluster: Cluster, definition: str) -> Iterator[Server]:
    command = [str(cluster.binaries / "kubectl"), "proxy", "--port=0"]
    namespace = f"judged-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", namespace)
    with subprocess.Popen(
        command, env=cluster.environment, stdout=subprocess.PIPE, text=True
    ) as proxy:
        assert proxy.stdout is not None
        listening = re.search(r"127\.0\.0\.1:\d+", proxy.stdout.readline())
        assert listening is not None
        yield Server(url=f"http://{listening[0]}", namespace=namespace)
        proxy.terminate()
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def chat(cluster: Cluster, definition: str, namespace: str) -> str:
    """A stored service, by its namespace."""
    cluster.apply(BASE, "-n", namespace)
    return namespace


def test_sixty_cases_are_named_by_both_validators() -> None:
    assert len(NAMED) >= 60


@pytest.mark.parametrize("case", NAMED, ids=[case["name"] for case in NAMED])
def test_an_invalid_manifest_is_refused_at_the_field_that_we_name(
    server: Server, case: dict[str, Any]
) -> None:
    answer = server.judge(changed(case))
    assert answer.code in {400, 422}
    assert case["path"] in answer.paths, answer.body["message"]


@pytest.mark.parametrize("case", DECODED, ids=[case["name"] for case in DECODED])
def test_what_is_no_object_at_all_is_refused_in_words(server: Server, case: dict[str, Any]) -> None:
    assert server.judge(changed(case)).code in {400, 422}


@pytest.mark.parametrize("manifest", VALID, ids=[m["metadata"]["name"] for m in VALID])
def test_a_valid_manifest_is_taken_and_means_the_same(
    server: Server, manifest: dict[str, Any]
) -> None:
    answer = server.judge(manifest)
    assert answer.code == 201, answer.body["message"]
    ours = LLMService.from_dict(manifest).spec
    assert decode(LLMServiceSpec, answer.body["spec"], "spec") == ours


def test_a_stored_manifest_says_every_default(server: Server) -> None:
    stored = server.judge(BASE).body["spec"]
    assert list(unsaid(LLMServiceSpec, stored, "spec")) == []
    assert stored["engine"]["tokenBudget"]["initial"] == 2048


def unsaid(cls: type[Any], stored: dict[str, Any], path: str) -> Iterator[str]:
    """The defaults that a stored object lacks, inside objects that every manifest has."""
    for field in declared_fields(cls):
        at = f"{path}.{field.name}"
        if field.container is not None or (field.default is None and not field.required):
            continue
        if field.nested is not None:
            yield from unsaid(field.nested, stored.get(field.name, {}), at)
        elif not field.required and stored.get(field.name) != field.default:
            yield at


FIELDS = [
    "model",
    "model.revision",
    "engine",
    "engine.pod",
    "engine.pod.affinity",
    "engine.pod.env",
    "engine.tokenBudget",
    "engine.resources",
    "maxReplicas",
    "suspend",
    "slo",
    "slo.classes",
    "slo.default",
    "rollout.gate",
]
small = st.booleans() | st.integers(-3, 70_000) | st.text(max_size=4)
shapes = st.recursive(
    small,
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "value", "min", "max", "initial", "limits", "cpu", "default"])
            | st.text(max_size=2),
            v,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(field=st.sampled_from(FIELDS), value=shapes)
def test_both_validators_agree_on_anything(server: Server, field: str, value: Any) -> None:
    manifest = json.loads(json.dumps(BASE))
    parent = manifest["spec"]
    *way, last = field.split(".")
    for step in way:
        parent = parent.setdefault(step, {})
    parent[last] = value
    try:
        LLMService.from_dict(manifest)
    except SpecError:
        ours = False
    else:
        ours = True
    answer = server.judge(manifest)
    assert (answer.code == 201) is ours, answer.body.get("message")


@pytest.mark.parametrize("beside", [{}, {"emptyDir": {}}], ids=["alone", "beside-another"])
def test_a_path_of_the_node_never_gets_in_even_where_unknown_fields_are_dropped(
    server: Server, beside: dict[str, Any]
) -> None:
    manifest = json.loads(json.dumps(BASE))
    volume = {"name": "root", "hostPath": {"path": "/"}, **beside}
    manifest["spec"]["engine"] = {"pod": {"volumes": [volume]}}
    answer = server.judge(manifest, fields="Ignore")
    if beside:
        assert answer.body["spec"]["engine"]["pod"]["volumes"] == [{"name": "root", **beside}]
    else:
        assert answer.code == 422
        assert answer.paths == {"spec.engine.pod.volumes[0]"}


def test_replicas_are_scaled_by_kubectl(cluster: Cluster, chat: str) -> None:
    cluster.kubectl("scale", "llmservice/chat", "--replicas=3", "-n", chat)
    assert cluster.get("llmsvc", "chat", "-n", chat)["spec"]["replicas"] == 3
    with pytest.raises(ClusterError, match=r"spec\.replicas"):
        cluster.kubectl("scale", "llmsvc/chat", "--replicas=1001", "-n", chat)


STATUS = {
    "observedGeneration": 1,
    "replicas": 4,
    "readyReplicas": 3,
    "selector": "goodput.dev/llmservice=chat",
    "recommendedReplicas": 5,
    "tokenBudget": 2048,
    "classes": [
        {
            "name": "interactive",
            "good": 994,
            "total": 1000,
            "attainment": "99.4%",
            "objective": "99%",
        }
    ],
    "goodput": "12.4",
    "summary": {
        "replicas": "3/4",
        "attainment": "99.4%/99%",
        "goodput": "12.4",
        "budget": "2048",
        "phase": "Reconciling",
    },
    "currentRevision": "chat-1",
    "updateRevision": "chat-2",
    "failedRevision": "chat-0",
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "AllReady",
            "message": "Three of four are ready.",
            "lastTransitionTime": "2026-11-21T10:00:00Z",
            "observedGeneration": 1,
        }
    ],
    "decisions": [
        {
            "at": "2026-11-21T10:00:00Z",
            "knob": "TokenBudget",
            "reason": "TPOTMissed",
            "message": "Smaller steps.",
            "applied": True,
        }
    ],
}


@pytest.mark.usefixtures("unattended")
def test_a_status_is_kept_whole_and_printed_in_columns(cluster: Cluster, chat: str) -> None:
    assert encode(decode(LLMServiceStatus, STATUS, "status")) == STATUS
    assert set(STATUS) == set(render_status_fields())
    patch = json.dumps({"status": STATUS})
    cluster.kubectl(
        "patch", "llmsvc", "chat", "-n", chat, "--subresource=status", "--type=merge", "-p", patch
    )
    assert cluster.get("llmsvc", "chat", "-n", chat)["status"] == STATUS
    heads, row = cluster.kubectl("get", "llmsvc", "-n", chat).splitlines()
    assert heads.split() == ["NAME", "REPLICAS", "ATTAINMENT", "GOODPUT", "BUDGET", "PHASE", "AGE"]
    assert row.split()[:-1] == ["chat", "3/4", "99.4%/99%", "12.4", "2048", "Reconciling"]
    assert "llmservice.goodput.dev/chat" in cluster.kubectl("get", "all", "-n", chat, "-o", "name")


@pytest.mark.usefixtures("unattended")
def test_an_autoscaler_finds_the_pods_once_replicas_are_set(cluster: Cluster, chat: str) -> None:
    scale = ["get", "llmsvc", "chat", "-n", chat, "--subresource=scale", "-o", "json"]
    with pytest.raises(ClusterError, match=r"replicas field .* does not exist"):
        cluster.kubectl(*scale)
    cluster.kubectl("scale", "llmsvc/chat", "--replicas=3", "-n", chat)
    patch = json.dumps({"status": STATUS})
    cluster.kubectl(
        "patch", "llmsvc", "chat", "-n", chat, "--subresource=status", "--type=merge", "-p", patch
    )
    found = json.loads(cluster.kubectl(*scale))
    assert found["spec"] == {"replicas": 3}
    assert found["status"] == {"replicas": 4, "selector": "goodput.dev/llmservice=chat"}


def render_status_fields() -> list[str]:
    (version,) = render_crd()["spec"]["versions"]
    return list(version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"])


@pytest.mark.parametrize(
    ("path", "sentences"),
    [
        ("llmservice", ["A language model service and its SLOs."]),
        ("llmsvc.spec.engine.tokenBudget.min", ["Least tokens", "1 to 1048576", "Defaults to 256"]),
        ("llmsvc.spec.slo.classes", ["ttftMs", "-required-", "milliseconds"]),
        ("llmsvc.spec.engine.policy", ["sarathi", "Defaults to slo"]),
        ("llmsvc.status.conditions", ["lastTransitionTime", "Reason, in a sentence."]),
    ],
    ids=["service", "number", "list", "choice", "status"],
)
def test_kubectl_explains_a_field(
    cluster: Cluster, definition: str, path: str, sentences: list[str]
) -> None:
    # Lines are wrapped where kubectl sees fit.
    explained = " ".join(cluster.kubectl("explain", path).split())
    for sentence in sentences:
        assert sentence in explained
