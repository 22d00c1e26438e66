"""A real API server accepts the CustomResourceDefinition and validates manifests as we do locally.

Manifests are sent as dry runs through `kubectl proxy`, which reaches any cluster.
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
from tests.builders.examples import examples
from tests.core.invalid_manifests import BASE, CASES, changed
from tools.cluster.handle import ClusterError

from goodput_core.declaration import declared_fields
from goodput_core.errors import SpecError
from goodput_core.spec.codec import decode, encode
from goodput_core.spec.llmservice import LLMService, LLMServiceSpec
from goodput_core.spec.status import LLMServiceStatus
from goodput_operator.render.crd import render_crd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import ClusterHandle

ROOT = Path(__file__).parents[2]
VALID = [
    manifest
    for path in [ROOT / "tests" / "core" / "valid_manifests.yaml", *ROOT.glob("examples/*.yaml")]
    for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    if "kind" in manifest  # the examples include a device profile
]
NAMED = [case for case in CASES if "server" not in case]
DECODED = [case for case in CASES if case.get("server") == "words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunResponse:
    """Response of the API server to a manifest."""

    code: int
    body: dict[str, Any]

    @property
    def paths(self) -> set[str]:
        """Return the rejected fields."""
        causes = self.body.get("details", {}).get("causes", [])
        unknown = re.findall(r'unknown field "([^"]+)"', self.body.get("message", ""))
        named = [cause["field"].lstrip(".") for cause in causes if "field" in cause]
        # The path of a rule has the key of a map in brackets.
        return {re.sub(r"\[(\D[^]]*)\]", r".\1", path) for path in named} | set(unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunServer:
    """The API server behind an authenticating proxy, and an empty namespace."""

    url: str
    namespace: str

    def validate(self, manifest: Any, *, fields: str = "Strict") -> DryRunResponse:
        """Create the object as a dry run.

        Args:
            manifest: the object.
            fields: treatment of unknown fields, `Strict` or `Ignore`.
        """
        request = Request(
            f"{self.url}/apis/goodput.dev/v1alpha1/namespaces/{self.namespace}/llmservices"
            f"?dryRun=All&fieldValidation={fields}",
            # Like kubectl, which reads a date in YAML as text.
            data=json.dumps(manifest, allow_nan=False, default=str).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urlopen(request, timeout=60) as response:
                return DryRunResponse(code=response.status, body=json.load(response))
        except HTTPError as error:
            with error:
                return DryRunResponse(code=error.code, body=json.load(error))


@pytest.fixture(scope="module")
def server(cluster: ClusterHandle, crd: None) -> Iterator[DryRunServer]:
    command = [str(cluster.binaries / "kubectl"), "proxy", "--port=0"]
    namespace = f"validated-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", namespace)
    with subprocess.Popen(
        command, env=cluster.environment, stdout=subprocess.PIPE, text=True
    ) as proxy:
        assert proxy.stdout is not None
        listening = re.search(r"127\.0\.0\.1:\d+", proxy.stdout.readline())
        assert listening is not None
        yield DryRunServer(url=f"http://{listening[0]}", namespace=namespace)
        proxy.terminate()
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def chat(cluster: ClusterHandle, crd: None, namespace: str) -> str:
    """The namespace of a stored service."""
    cluster.apply(BASE, "-n", namespace)
    return namespace


def test_both_validators_name_the_field_in_at_least_sixty_cases() -> None:
    assert len(NAMED) >= 60


@pytest.mark.parametrize("case", NAMED, ids=[case["name"] for case in NAMED])
def test_an_invalid_manifest_is_rejected_at_the_field_that_we_name(
    server: DryRunServer, case: dict[str, Any]
) -> None:
    response = server.validate(changed(case))
    assert response.code in {400, 422}
    assert case["path"] in response.paths, response.body["message"]
    assert "should match" not in response.body["message"], "the error is a regular expression"


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("metadata.name", "4chat", "must start with a letter, end with a letter or digit"),
        ("spec.model.source", "s3://a/b", "must begin with hf://, pvc://, file:// or emulated://"),
        ("spec.slo.classes[0].objective", "fifty", "must be a percentage such as '99%'"),
        ("spec.slo.classes[0].objective", "0%", "must lie above 0% and below 100%"),
        (
            "spec.rollout",
            {"gate": {"trace": "sample", "records": "/runs"}},
            "must be pvc://CLAIM/PATH, s3://BUCKET/PATH or gs://BUCKET/PATH",
        ),
        (
            "spec.rollout",
            {"gate": {"trace": "prod.parquet"}},
            "must be pvc://CLAIM/PATH, file://PATH, s3://BUCKET/PATH, gs://BUCKET/PATH or sample",
        ),
        (
            "spec.engine",
            {"resources": {"limits": {"memory": "16GB"}}},
            "must be a quantity such as 1, '500m' or '16Gi'",
        ),
        (
            "spec.engine",
            {"pod": {"env": [{"name": "a-b", "value": "c"}]}},
            "must hold letters, digits and '_' only, and begin with no digit",
        ),
        (
            "spec.router",
            {"sessionAffinity": {"header": "X Y"}},
            "must be the name of an HTTP header",
        ),
    ],
)
def test_the_error_of_a_text_is_one_sentence_with_the_remedy(
    server: DryRunServer, path: str, value: Any, sentence: str
) -> None:
    response = server.validate(changed({"set": {path: value}}))
    (cause,) = response.body["details"]["causes"]
    assert cause["field"].lstrip(".").startswith(path)
    assert sentence in cause["message"]


@pytest.mark.parametrize("case", DECODED, ids=[case["name"] for case in DECODED])
def test_a_value_that_is_not_an_object_is_rejected(
    server: DryRunServer, case: dict[str, Any]
) -> None:
    assert server.validate(changed(case)).code in {400, 422}


@pytest.mark.parametrize("manifest", VALID, ids=[m["metadata"]["name"] for m in VALID])
def test_a_valid_manifest_is_accepted_and_decoded_to_the_same_spec(
    server: DryRunServer, manifest: dict[str, Any]
) -> None:
    response = server.validate(manifest)
    assert response.code == 201, response.body["message"]
    ours = LLMService.from_dict(manifest).spec
    assert decode(LLMServiceSpec, response.body["spec"], "spec") == ours


def test_a_stored_manifest_contains_every_default(server: DryRunServer) -> None:
    stored = server.validate(BASE).body["spec"]
    assert list(missing_defaults(LLMServiceSpec, stored, "spec")) == []
    assert stored["engine"]["tokenBudget"]["initial"] == 2048


def missing_defaults(cls: type[Any], stored: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the defaults that a stored object lacks, inside objects that every manifest has."""
    for field in declared_fields(cls):
        at = f"{path}.{field.name}"
        if field.container is not None or (field.default is None and not field.required):
            continue
        if field.nested is not None:
            yield from missing_defaults(field.nested, stored.get(field.name, {}), at)
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
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(field=st.sampled_from(FIELDS), value=shapes)
def test_both_validators_agree_on_arbitrary_values(
    server: DryRunServer, field: str, value: Any
) -> None:
    manifest = json.loads(json.dumps(BASE))
    parent = manifest["spec"]
    *sections, last = field.split(".")
    for step in sections:
        parent = parent.setdefault(step, {})
    parent[last] = value
    try:
        LLMService.from_dict(manifest)
    except SpecError:
        ours = False
    else:
        ours = True
    response = server.validate(manifest)
    assert (response.code == 201) is ours, response.body.get("message")


@pytest.mark.parametrize("source", [{}, {"emptyDir": {}}], ids=["alone", "with-another-source"])
def test_a_host_path_is_never_stored_even_if_unknown_fields_are_dropped(
    server: DryRunServer, source: dict[str, Any]
) -> None:
    manifest = json.loads(json.dumps(BASE))
    volume = {"name": "root", "hostPath": {"path": "/"}, **source}
    manifest["spec"]["engine"] = {"pod": {"volumes": [volume]}}
    response = server.validate(manifest, fields="Ignore")
    if source:
        assert response.body["spec"]["engine"]["pod"]["volumes"] == [{"name": "root", **source}]
    else:
        assert response.code == 422
        assert response.paths == {"spec.engine.pod.volumes[0]"}


def test_kubectl_scales_the_replicas(cluster: ClusterHandle, chat: str) -> None:
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
        "gate": "Replaying 3/4 PASS",
    },
    "currentRevision": "chat-1",
    "updateRevision": "chat-2",
    "failedRevision": "chat-0",
    "gate": {
        "revision": "chat-2",
        "baseline": "chat-1",
        "phase": "Replaying",
        "pairs": "3/4",
        "attempt": 2,
        "verdict": "PASS",
        "reason": "ObjectiveMet",
        "message": "3 of 4 pairs of runs are recorded; so far PASS.",
        "interval": "interactive: +0.10 (-0.20 to +0.40)",
        "report": "pvc://runs/gates/chat-2",
        "startedAt": "2026-11-21T10:00:00Z",
    },
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
    "learnt": {
        "provenPermille": 950,
        "provenTime": "2026-11-21T10:00:00Z",
        "failedPermille": 1200,
        "failedTime": "2026-11-21T10:05:00Z",
        "burstinessPercent": 140,
        "burstMilliRequestsPerSecond": 7250,
        "burstTime": "2026-11-21T10:06:00Z",
        "startupSeconds": [41, 39],
    },
}


def patch_status(cluster: ClusterHandle, namespace: str) -> None:
    patch = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": STATUS}))
    cluster.kubectl("patch", "llmsvc", "chat", "-n", namespace, *patch)


@pytest.mark.usefixtures("no_other_operator")
def test_a_complete_status_is_stored_and_printed_in_columns(
    cluster: ClusterHandle, chat: str
) -> None:
    assert encode(decode(LLMServiceStatus, STATUS, "status")) == STATUS
    assert set(STATUS) == set(status_fields())
    patch_status(cluster, chat)
    assert cluster.get("llmsvc", "chat", "-n", chat)["status"] == STATUS
    head, row = cluster.kubectl("get", "llmsvc", "-n", chat).splitlines()
    columns = ["NAME", "REPLICAS", "ATTAINMENT", "GOODPUT", "BUDGET", "PHASE", "GATE", "AGE"]
    assert head.split() == columns
    cells = ["chat", "3/4", "99.4%/99%", "12.4", "2048", "Reconciling", "Replaying", "3/4", "PASS"]
    assert row.split()[:-1] == cells
    assert "llmservice.goodput.dev/chat" in cluster.kubectl("get", "all", "-n", chat, "-o", "name")


@pytest.mark.usefixtures("no_other_operator")
def test_the_scale_subresource_has_replicas_and_selector_once_replicas_are_set(
    cluster: ClusterHandle, chat: str
) -> None:
    scale = ["get", "llmsvc", "chat", "-n", chat, "--subresource=scale", "-o", "json"]
    with pytest.raises(ClusterError, match=r"replicas field .* does not exist"):
        cluster.kubectl(*scale)
    cluster.kubectl("scale", "llmsvc/chat", "--replicas=3", "-n", chat)
    patch_status(cluster, chat)
    found = json.loads(cluster.kubectl(*scale))
    assert found["spec"] == {"replicas": 3}
    assert found["status"] == {"replicas": 4, "selector": "goodput.dev/llmservice=chat"}


def status_fields() -> list[str]:
    (version,) = render_crd()["spec"]["versions"]
    return list(version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"])


@pytest.mark.parametrize(
    ("path", "sentences"),
    [
        ("llmservice", ["A language model service and its SLOs."]),
        (
            "llmsvc.spec.engine.tokenBudget.min",
            ["Minimum tokens", "1 to 1048576", "Defaults to 64"],
        ),
        ("llmsvc.spec.slo.classes", ["ttftMs", "-required-", "milliseconds"]),
        ("llmsvc.spec.engine.policy", ["sarathi", "Defaults to slo"]),
        ("llmsvc.status.conditions", ["lastTransitionTime", "Reason, in a sentence."]),
    ],
    ids=["service", "number", "list", "choice", "status"],
)
def test_kubectl_explains_a_field(
    cluster: ClusterHandle, crd: None, path: str, sentences: list[str]
) -> None:
    # kubectl wraps lines.
    explained = " ".join(cluster.kubectl("explain", path).split())
    for sentence in sentences:
        assert sentence in explained
