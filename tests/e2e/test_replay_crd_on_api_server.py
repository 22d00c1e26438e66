"""The API server rejects the TraceReplays that the decoder rejects, and accepts the examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.operator.crd.test_replay_crd import INVALID, SLO, VALID
from tools.cluster.handle import ClusterError

if TYPE_CHECKING:
    from tools.cluster.handle import ClusterHandle

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trace-replay"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


@pytest.fixture(scope="module")
def dry_run(cluster: ClusterHandle, crd: None) -> Any:
    """Return a function that sends a manifest to the API server, which stores nothing."""

    def send(manifest: dict[str, Any], *, verb: str = "create") -> None:
        words = (verb, "--dry-run=server", "--validate=strict", "-n", "default", "-f", "-")
        cluster.kubectl(*words, stdin=json.dumps(manifest))

    return send


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "goodput.dev/v1alpha1",
        "kind": "TraceReplay",
        "metadata": {"name": "night"},
        "spec": {**VALID, **spec},
    }


@pytest.mark.parametrize(("change", "error"), INVALID, ids=[error for _, error in INVALID])
def test_the_api_server_rejects_it_at_the_same_field(
    dry_run: Any, change: dict[str, Any], error: str
) -> None:
    with pytest.raises(ClusterError) as raised:
        dry_run(manifest(**change))
    assert error.partition(":")[0] in str(raised.value)
    assert "should match" not in str(raised.value), "the error is a regular expression"


@pytest.mark.parametrize(
    ("change", "path", "sentence"),
    [
        (
            {"records": "sample"},
            "spec.records",
            '"sample": must be pvc://CLAIM/PATH, s3://BUCKET/PATH or gs://BUCKET/PATH',
        ),
        (
            {"target": {"url": "llm:8000"}, "slo": SLO},
            "spec.target.url",
            '"llm:8000": must begin with http:// or https:// and name a server',
        ),
    ],
    ids=["records", "url"],
)
def test_the_error_of_a_text_is_a_sentence_with_the_remedy(
    dry_run: Any, change: dict[str, Any], path: str, sentence: str
) -> None:
    with pytest.raises(ClusterError) as raised:
        dry_run(manifest(**change))
    assert f"{path}: Invalid value: {sentence}" in str(raised.value)


def test_a_replay_is_accepted_and_cannot_be_changed(
    cluster: ClusterHandle, crd: None, namespace: str
) -> None:
    body = manifest(
        slo=SLO, gate={"confidence": "99%"}, window={"startSeconds": 0, "endSeconds": 9}
    )
    body["metadata"]["namespace"] = namespace
    cluster.apply(body)
    body["spec"]["shards"] = 2
    with pytest.raises(ClusterError, match="cannot be changed; create another TraceReplay"):
        cluster.apply(body)
    columns = cluster.kubectl("get", "trp", "-n", namespace).splitlines()[0].split()
    assert columns == ["NAME", "PHASE", "ARMED", "VERDICT", "REASON", "AGE"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.stem)
def test_the_examples_and_their_pods_are_accepted(
    dry_run: Any, cluster: ClusterHandle, namespace: str, path: Path
) -> None:
    cluster.kubectl("label", "ns", namespace, RESTRICTED)
    for document in yaml.safe_load_all(path.read_text("utf-8")):
        dry_run(document)
        for text in document.get("data", {}).values():
            dry_run(yaml.safe_load(text))
        if document["kind"] in {"CronJob", "Pod"}:
            pod = document["spec"]
            if document["kind"] == "CronJob":
                pod = pod["jobTemplate"]["spec"]["template"]["spec"]
            pod.pop("serviceAccountName", None)  # exists only once the example is applied
            metadata = {"name": "pod", "namespace": namespace}
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}
            cluster.apply(body, "--dry-run=server", "--validate=strict")
