"""Reconciliations of a simulated cluster: they reach the spec and then write nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

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
        assert cluster.reconcile().actions == ()
    assert [e.reason for e in cluster.events] == ["Ready"]


def test_an_unchanged_cluster_renders_nothing(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.reconcile()
    monkeypatch.setattr("goodput_operator.reconcile.decide.desired_objects", None)
    assert running.reconcile().actions == ()
    running.edit("Service", "chat", edit_rendered_field)
    with pytest.raises(TypeError):
        running.reconcile()


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
    again = writes(running.reconcile())
    assert [type(a) for a in again] == [CreateToken], "the operator may not read Secrets"
    assert running.settle() <= 1


def test_an_upgraded_operator_replaces_no_pod(
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
    assert containers["containers"][0]["image"] == "engine:1", (
        "drift is repaired with the stored template"
    )


def edit_rendered_field(body: dict[str, Any]) -> None:
    """Change a rendered field of an object of any kind."""
    kind = body["kind"]
    if kind == "Deployment":
        body["spec"]["replicas"] += 3
    elif kind == "ConfigMap":
        body["data"]["limits.json"] = "{}"
    elif kind == "Service":
        body["spec"]["selector"]["app"] = "mine"  # it then selects no pod
    elif kind == "Role":
        body["rules"].append({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]})
    elif kind == "RoleBinding":
        body["subjects"] = []
    elif kind == "PodDisruptionBudget":
        body["spec"]["maxUnavailable"] = "50%"
    else:
        body["metadata"]["labels"].pop("goodput.dev/llmservice", None)


@pytest.mark.parametrize(("kind", "name"), CHILDREN, ids=[f"{k}-{n}" for k, n in CHILDREN])
@pytest.mark.parametrize("gone", [False, True], ids=["edited", "deleted"])
def test_an_edited_or_deleted_child_is_restored(
    running: Cluster, kind: str, name: str, gone: bool
) -> None:
    before = copy.deepcopy(running.objects[kind, name])
    if gone:
        running.remove(kind, name)
    else:
        running.edit(kind, name, edit_rendered_field)
    running.settle()
    after = running.objects[kind, name]
    for body in (before, after):
        body.pop("status", None)
        for stamp in ("uid", "resourceVersion", "generation"):
            body["metadata"].pop(stamp)
    assert after == before
    assert len(running.written) == len(set(CHILDREN)) + 3 + 1, "repaired once"


def test_fields_of_others_and_server_defaults_are_not_drift(running: Cluster) -> None:
    def add(body: dict[str, Any]) -> None:
        body["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "1"
        body["metadata"]["labels"]["team"] = "x"
        pod = body["spec"]["template"]["spec"]
        pod["containers"].append({"name": "sidecar", "image": "mesh"})
        pod["containers"][0]["env"].append({"name": "ADDED", "value": "1"})

    for name in (*running.deployments(), "chat-router"):
        running.edit("Deployment", name, add)
    assert [writes(running.reconcile()) for _ in range(3)] == [[]] * 3


def test_rewritten_quantities_are_not_drift(cluster: Cluster) -> None:
    limits = {"cpu": "0.5", "memory": "1024Mi"}
    cluster.update_spec(engine={"resources": {"limits": limits, "requests": {"cpu": "1000m"}}})
    cluster.settle()
    (name,) = cluster.deployments()
    template = cluster.objects["Deployment", name]["spec"]["template"]
    assert template["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "500m"


def test_a_change_that_the_server_ignores_is_applied_once(running: Cluster) -> None:
    def set_cluster_ip(body: dict[str, Any]) -> None:
        body["spec"]["clusterIP"] = "10.0.0.1"

    running.edit("Service", "chat-engines", set_cluster_ip)
    kept = copy.deepcopy(running.objects["Service", "chat-engines"])
    applies = 0
    for _ in range(10):
        applies += len(writes(running.reconcile()))
        running.objects["Service", "chat-engines"] = copy.deepcopy(kept)
    assert applies == 1


@pytest.mark.parametrize(
    ("field", "message", "condition"),
    [
        ("delayed", "busy", ("Reconciling", "Retrying")),
        ("failures", "the webhook is away", ("Stalled", "Refused")),
    ],
    ids=["unavailable", "rejected"],
)
def test_a_failed_repair_is_repeated(
    running: Cluster, field: str, message: str, condition: tuple[str, str]
) -> None:
    running.edit("Service", "chat", edit_rendered_field)
    edited = copy.deepcopy(running.objects["Service", "chat"])
    for _ in range(3):
        assert len(writes(running.decide())) == 1
        running.objects["Service", "chat"] = copy.deepcopy(edited)
        setattr(running, field, {("Service", "chat"): message})
    kind, reason = condition
    assert running.condition(kind) == ("True", reason)


FOREIGN = [*CHILDREN, ("Deployment", "REVISION"), ("ControllerRevision", "REVISION")]


@pytest.mark.parametrize(("kind", "name"), FOREIGN, ids=[f"{k}-{n}" for k, n in FOREIGN])
@pytest.mark.parametrize("owned", [False, True], ids=["no owner", "another owner"])
def test_a_foreign_object_is_reported_and_never_changed(
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
        decided = cluster.reconcile()
        assert cluster.objects[kind, name] == before
    assert decided.foreign == ((kind, name),)
    assert (kind, name) not in cluster.written
    assert cluster.condition("Stalled") == ("True", "NameConflict")
    assert f"{kind} {name}" in cluster.message("Stalled")
    assert [e.reason for e in cluster.events if e.warning] == ["NameConflict"]
    cluster.remove(kind, name)
    cluster.settle()
    assert cluster.reconcile().foreign == ()
    assert cluster.condition("Stalled") == ("False", "Unhindered")
    assert cluster.condition("Ready") == ("True", "Serving")


def test_a_deleted_service_leads_to_no_action(running: Cluster) -> None:
    snapshot = running.snapshot()
    deleted = copy.deepcopy(dict(snapshot.service))
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    running.remove("Service", "chat")
    decision = decide(replace(snapshot, service=deleted), running.installation)
    assert decision.actions == ()
    assert decision.wake_at_ns is None


def test_a_snapshot_is_not_changed_by_deciding(cluster: Cluster) -> None:
    for _ in range(4):
        snapshot = cluster.snapshot()
        before = copy.deepcopy(snapshot)
        first = decide(snapshot, cluster.installation)
        assert snapshot == before
        assert decide(snapshot, cluster.installation) == first
        cluster.reconcile()


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


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), steps=st.lists(STEPS, max_size=12))
def test_any_sequence_of_changes_converges_to_the_same_state(
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
                cluster.edit(kind, name, edit_rendered_field)
            elif step == "delete":
                cluster.remove(kind, name)
        elif step == "restart":
            cluster.restart_operator()
        elif step == "respec":
            policy = data.draw(st.sampled_from(["slo", "sarathi", "vllm"]))
            cluster.update_spec(engine={"policy": policy})
        elif step == "scale":
            cluster.update_spec(replicas=data.draw(st.integers(0, 5)))
        elif step in {"suspend", "resume"}:
            cluster.update_spec(suspend=step == "suspend")
        elif step == "break":
            cluster.broken = set(cluster.deployments())
        elif step == "heal":
            cluster.broken = set()
        elif step == "kill":
            for pod in list(cluster.engines())[:1]:
                del cluster.pods[pod["metadata"]["name"]]
        else:
            cluster.reconcile(ready=data.draw(st.integers(0, 3)))
    cluster.broken = set()
    cluster.settle()
    suspended = cluster.spec.get("suspend", False)
    desired = 0 if suspended else cluster.spec["replicas"]
    update = cluster.status["updateRevision"]
    assert {n: r for n, r in cluster.deployments().items() if r or n == update} == {update: desired}
    assert cluster.deployments("router") == {"chat-router": 0 if suspended else 2}
    assert set(CHILDREN) <= set(cluster.objects)
    assert cluster.condition("Stalled") == ("False", "Unhindered")
    assert cluster.condition("Reconciling") == ("False", "Settled")
    stored = cluster.objects["ConfigMap", "chat"]
    assert stored["data"] == foreign["data"]
    assert ("ConfigMap", "chat") not in cluster.written
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


def test_counts_are_written_once_a_minute(running: Cluster) -> None:
    running.reconcile(running.measured(5, 5))
    began_ns, written = running.now_ns, []
    for _ in range(40):
        decision = running.reconcile(running.measured(5, 5))
        if any(isinstance(a, WriteStatus) for a in decision.actions):
            written.append(running.now_ns)
    waits = [b - a for a, b in zip([began_ns, *written], written, strict=False)]
    assert all(wait >= 60 * NS_PER_S for wait in waits[2:])
    assert len(written) <= 5
