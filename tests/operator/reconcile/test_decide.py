"""Reconciliations over a cluster of dictionaries: all lead to the spec and stay there."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goodput_core.units import NS_PER_S
from goodput_operator.reconcile.actions import Apply, CreateToken, Delete, WriteStatus
from goodput_operator.reconcile.decide import decide
from goodput_operator.render.metadata import Owner

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster

    from goodput_operator.render.pods import Installation

CHILDREN = [
    ("ServiceAccount", "chat-router"),
    ("Role", "chat-router"),
    ("RoleBinding", "chat-router"),
    ("Service", "chat"),
    ("Service", "chat-engines"),
    ("PodDisruptionBudget", "chat-router"),
    ("PodDisruptionBudget", "chat-engines"),
    ("ConfigMap", "chat-config"),
    ("Deployment", "chat-router"),
]


def writes(decision: Any) -> list[Any]:
    return [a for a in decision.actions if isinstance(a, Apply | Delete | CreateToken)]


def test_a_new_service_becomes_ready_and_then_nothing_is_written(cluster: Cluster) -> None:
    cluster.settle()
    assert set(CHILDREN) <= set(cluster.objects)
    assert cluster.condition("Ready") == ("True", "Serving")
    assert cluster.condition("Reconciling") == ("False", "Settled")
    assert cluster.condition("Stalled") == ("False", "Unhindered")
    assert list(cluster.deployments().values()) == [2]
    assert cluster.deployments("router") == {"chat-router": 2}
    (revision,) = cluster.deployments()
    assert cluster.status["currentRevision"] == revision == cluster.status["updateRevision"]
    assert cluster.secrets == cluster.secrets_read()
    assert cluster.status["summary"]["replicas"] == "2/2"
    for _ in range(20):
        assert cluster.round().actions == ()
    assert [e.reason for e in cluster.events] == ["Ready"]


def test_an_unchanged_cluster_renders_nothing(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.round()
    monkeypatch.setattr("goodput_operator.reconcile.decide.desired_objects", None)
    assert running.round().actions == ()
    running.edit("Service", "chat", meddled)
    with pytest.raises(TypeError):
        running.round()


def test_engines_start_only_when_their_token_can_be_read(cluster: Cluster) -> None:
    first = cluster.decide()
    assert not cluster.deployments()
    assert not [a for a in first.actions if isinstance(a, CreateToken)]
    second = cluster.decide()
    kinds = [type(a).__name__ for a in second.actions]
    assert kinds.index("CreateToken") < kinds.index("Apply")
    assert len(cluster.deployments()) == 1


def test_a_restarted_operator_writes_no_child(running: Cluster) -> None:
    running.restart_operator()
    again = writes(running.round())
    assert [type(a) for a in again] == [CreateToken], "the operator may not read it"
    assert running.settle() <= 1


def test_an_upgraded_operator_leaves_all_pods_alone(
    running: Cluster, other_installation: Installation
) -> None:
    pods = set(running.pods)
    templates = {
        key: copy.deepcopy(body["spec"]["template"])
        for key, body in running.objects.items()
        if key[0] == "Deployment"
    }
    running.installation = other_installation
    running.restart_operator()
    running.settle()
    assert set(running.pods) == pods
    for key, template in templates.items():
        assert running.objects[key]["spec"]["template"] == template
    running.edit("Deployment", "chat-router", lambda d: d["spec"]["template"].pop("spec"))
    running.settle()
    containers = running.objects["Deployment", "chat-router"]["spec"]["template"]["spec"]
    assert containers["containers"][0]["image"] == "engine:1", "drift is repaired as it was made"


def meddled(body: dict[str, Any]) -> None:
    """Change something that we set, whatever kind it is."""
    kind = body["kind"]
    if kind == "Deployment":
        body["spec"]["replicas"] += 3
    elif kind == "ConfigMap":
        body["data"]["limits.json"] = "{}"
    elif kind == "Service":
        body["spec"]["selector"]["app"] = "mine"  # it then selects nothing
    elif kind == "Role":
        body["rules"].append({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]})
    elif kind == "RoleBinding":
        body["subjects"] = []
    elif kind == "PodDisruptionBudget":
        body["spec"]["maxUnavailable"] = "50%"
    else:
        body["metadata"]["labels"].pop("goodput.dev/llmservice")


@pytest.mark.parametrize(("kind", "name"), CHILDREN, ids=[f"{k}-{n}" for k, n in CHILDREN])
@pytest.mark.parametrize("gone", [False, True], ids=["edited", "deleted"])
def test_a_child_that_is_edited_or_deleted_comes_back(
    running: Cluster, kind: str, name: str, gone: bool
) -> None:
    before = copy.deepcopy(running.objects[kind, name])
    if gone:
        running.remove(kind, name)
    else:
        running.edit(kind, name, meddled)
    running.settle()
    after = running.objects[kind, name]
    for body in (before, after):
        body.pop("status", None)
        for stamp in ("uid", "resourceVersion", "generation"):
            body["metadata"].pop(stamp)
    assert after == before
    assert len(running.touched) == len(set(CHILDREN)) + 3 + 1, "repaired once"


def test_what_others_add_and_the_server_rewrites_is_no_drift(running: Cluster) -> None:
    def add(body: dict[str, Any]) -> None:
        body["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "1"
        body["metadata"]["labels"]["team"] = "x"
        pod = body["spec"]["template"]["spec"]
        pod["containers"].append({"name": "sidecar", "image": "mesh"})
        pod["containers"][0]["env"].append({"name": "ADDED", "value": "1"})

    for name in (*running.deployments(), "chat-router"):
        running.edit("Deployment", name, add)
    assert [writes(running.round()) for _ in range(3)] == [[]] * 3


def test_quantities_that_the_server_rewrites_are_no_drift(cluster: Cluster) -> None:
    limits = {"cpu": "0.5", "memory": "1024Mi"}
    cluster.ask(engine={"resources": {"limits": limits, "requests": {"cpu": "1000m"}}})
    cluster.settle()
    (name,) = cluster.deployments()
    template = cluster.objects["Deployment", name]["spec"]["template"]
    assert template["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "500m"


def test_a_change_that_the_server_will_not_make_is_tried_once(running: Cluster) -> None:
    def put_back(body: dict[str, Any]) -> None:
        body["spec"]["clusterIP"] = "10.0.0.1"

    running.edit("Service", "chat-engines", put_back)
    kept = copy.deepcopy(running.objects["Service", "chat-engines"])
    tried = 0
    for _ in range(10):
        tried += len(writes(running.round()))
        running.objects["Service", "chat-engines"] = copy.deepcopy(kept)
    assert tried == 1


@pytest.mark.parametrize(
    ("answers", "words", "condition"),
    [
        ("delayed", "busy", ("Reconciling", "Retrying")),
        ("failures", "the webhook is away", ("Stalled", "Refused")),
    ],
    ids=["it could not", "it refused"],
)
def test_a_repair_that_the_server_did_not_make_is_tried_again(
    running: Cluster, answers: str, words: str, condition: tuple[str, str]
) -> None:
    running.edit("Service", "chat", meddled)
    edited = copy.deepcopy(running.objects["Service", "chat"])
    for _ in range(3):
        assert len(writes(running.decide())) == 1
        running.objects["Service", "chat"] = copy.deepcopy(edited)
        setattr(running, answers, {("Service", "chat"): words})
    kind, reason = condition
    assert running.condition(kind) == ("True", reason)


FOREIGN = [*CHILDREN, ("Deployment", "REVISION"), ("ControllerRevision", "REVISION")]


@pytest.mark.parametrize(("kind", "name"), FOREIGN, ids=[f"{k}-{n}" for k, n in FOREIGN])
@pytest.mark.parametrize("owned", [False, True], ids=["nobody's", "another's"])
def test_a_foreign_object_is_never_touched_and_named(
    new_cluster: type[Cluster], kind: str, name: str, owned: bool
) -> None:
    twin = new_cluster()
    twin.settle()
    (revision,) = twin.deployments()
    cluster = new_cluster()
    name = revision if name == "REVISION" else name
    owner = Owner(name="other", namespace="models", uid="other").reference()
    body = {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "labels": {"goodput.dev/llmservice": "chat"},
            "ownerReferences": [owner] if owned else [],
        },
        "spec": {"replicas": 1},
    }
    cluster.put(body)
    before = copy.deepcopy(cluster.objects[kind, name])
    for _ in range(10):
        decided = cluster.round()
        assert cluster.objects[kind, name] == before
    assert decided.foreign == ((kind, name),)
    assert (kind, name) not in cluster.touched
    assert cluster.condition("Stalled") == ("True", "NameConflict")
    assert f"{kind} {name}" in cluster.message("Stalled")
    assert [e.reason for e in cluster.events if e.warning] == ["NameConflict"]
    cluster.remove(kind, name)
    cluster.settle()
    assert cluster.round().foreign == ()
    assert cluster.condition("Stalled") == ("False", "Unhindered")
    assert cluster.condition("Ready") == ("True", "Serving")


def test_a_service_that_is_deleted_is_left_alone(running: Cluster) -> None:
    snapshot = running.snapshot()
    leaving = copy.deepcopy(dict(snapshot.service))
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    running.remove("Service", "chat")
    decision = decide(replace(snapshot, service=leaving), running.installation)
    assert decision.actions == ()
    assert decision.wake_at_ns is None


def test_a_snapshot_is_not_changed_by_deciding(cluster: Cluster) -> None:
    for _ in range(4):
        snapshot = cluster.snapshot()
        before = copy.deepcopy(snapshot)
        first = decide(snapshot, cluster.installation)
        assert snapshot == before
        assert decide(snapshot, cluster.installation) == first
        cluster.round()


STEPS = st.sampled_from(
    [
        "edit",
        "delete",
        "restart",
        "respec",
        "scale",
        "suspend",
        "resume",
        "break",
        "heal",
        "round",
        "kill",
    ]
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), steps=st.lists(STEPS, max_size=12))
def test_whatever_happens_the_same_end_is_reached_and_kept(
    new_cluster: type[Cluster], data: st.DataObject, steps: list[str]
) -> None:
    cluster = new_cluster()
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "chat", "labels": {"goodput.dev/llmservice": "chat"}},
        "data": {"a": "b"},
    }
    cluster.put(copy.deepcopy(foreign))
    for step in steps:
        ours = sorted(key for key in cluster.objects if key != ("ConfigMap", "chat"))
        if step in {"edit", "delete"} and ours:
            kind, name = data.draw(st.sampled_from(ours))
            if step == "edit" and kind != "ControllerRevision":
                cluster.edit(kind, name, meddled)
            elif step == "delete":
                cluster.remove(kind, name)
        elif step == "restart":
            cluster.restart_operator()
        elif step == "respec":
            policy = data.draw(st.sampled_from(["slo", "sarathi", "vllm"]))
            cluster.ask(engine={"policy": policy})
        elif step == "scale":
            cluster.ask(replicas=data.draw(st.integers(0, 5)))
        elif step in {"suspend", "resume"}:
            cluster.ask(suspend=step == "suspend")
        elif step == "break":
            cluster.broken = set(cluster.deployments())
        elif step == "heal":
            cluster.broken = set()
        elif step == "kill":
            for pod in list(cluster.engines())[:1]:
                del cluster.pods[pod["metadata"]["name"]]
        else:
            cluster.round(ready=data.draw(st.integers(0, 3)))
    cluster.broken = set()
    cluster.settle()
    suspended = cluster.spec.get("suspend", False)
    wanted = 0 if suspended else cluster.spec["replicas"]
    update = cluster.status["updateRevision"]
    assert {n: r for n, r in cluster.deployments().items() if r or n == update} == {update: wanted}
    assert cluster.deployments("router") == {"chat-router": 0 if suspended else 2}
    assert set(CHILDREN) <= set(cluster.objects)
    assert cluster.condition("Stalled") == ("False", "Unhindered")
    assert cluster.condition("Reconciling") == ("False", "Settled")
    stored = cluster.objects["ConfigMap", "chat"]
    assert stored["data"] == foreign["data"]
    assert ("ConfigMap", "chat") not in cluster.touched
    fresh = new_cluster(spec=cluster.spec)
    fresh.settle()
    for key in CHILDREN:
        assert plain(cluster.objects[key], key) == plain(fresh.objects[key], key)


def plain(body: dict[str, Any], key: tuple[str, str]) -> dict[str, Any]:
    """Return the fields that follow from the spec alone."""
    kept = copy.deepcopy({k: v for k, v in body.items() if k not in {"metadata", "status"}})
    if key[0] == "Service":
        kept["spec"]["selector"].pop("app", None)
    if key[0] == "ConfigMap":
        kept["data"] = {k: v for k, v in kept["data"].items() if k == "router.json"}
    return kept


def test_what_changes_with_every_request_is_written_once_a_minute(running: Cluster) -> None:
    running.round(running.measured(5, 5))
    began_ns, written = running.now_ns, []
    for _ in range(40):
        decision = running.round(running.measured(5, 5))
        if any(isinstance(a, WriteStatus) for a in decision.actions):
            written.append(running.now_ns)
    waits = [b - a for a, b in zip([began_ns, *written], written, strict=False)]
    assert all(wait >= 60 * NS_PER_S for wait in waits[2:])
    assert len(written) <= 5
