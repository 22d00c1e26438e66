"""The objects of a gate: the engines of candidate and baseline, and the Job that compares them.

The engines run the stored templates of their revisions. Their labels keep them out of the service's
Services, disruption budgets and measurements, and their limits stay equal, because nothing controls
them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import (
    OBJECT_LABEL_GATE,
    PORT_NAME_ADMIN,
    PORT_NAME_SERVING,
    ROLE_REPLAY,
)
from goodput_core.slo.targets import format_objective
from goodput_core.spec.choices import Baseline
from goodput_core.spec.requests import request_options
from goodput_operator.kube.objects import ADMIN_PORT, JOB, SERVING_PORT
from goodput_operator.render.config_map import gate_key
from goodput_operator.render.pods import LIMITS_KEY, manifest_key
from goodput_operator.render.replay_pod import (
    RESULT_FILE,
    SLO_FILE,
    mount_slo,
    output_options,
    path_in_pod,
    place_below,
    replay_pod,
)
from goodput_operator.render.runtimes import literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_core.spec.rollout import GateSpec
    from goodput_operator.render.metadata import Owner
    from goodput_operator.render.pods import Installation
    from goodput_operator.render.revisions import Revision

__all__ = ["gate_deployment", "gate_job", "job_name", "report_place", "serving_port"]

_RUN_OVERHEAD_S: Final = 600
"""Time of a run besides its window: its preparation, its drain and its report."""
_START_S: Final = 3600
_UNKNOWN_WINDOW_S: Final = 604_800
_PREFERRED: Final = {"kubernetes.io/hostname": 100, "node.kubernetes.io/instance-type": 50}
"""Topologies that the scheduler prefers to be those of the other engine, with their weights."""


def job_name(owner: Owner, key: str, attempt: int) -> str:
    """Return the name of the Job of an attempt."""
    return owner.names.gate(key, f"gate-{attempt}")


def report_place(gate: GateSpec, candidate: str, key: str, attempt: int) -> str | None:
    """Return the folder of the recorded runs of an attempt; None if they are not kept."""
    if gate.records is None:
        return None
    return place_below(gate.records, f"{candidate}-{key}-{attempt}")


def serving_port(template: Mapping[str, Any]) -> int:
    """Return the serving port of a pod template."""
    for container in template["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == PORT_NAME_SERVING:
                return int(port["containerPort"])
    return SERVING_PORT


def gate_deployment(
    owner: Owner, revision: Revision, *, role: str, key: str, progress_deadline_s: int
) -> dict[str, Any]:
    """Render the Deployment of the candidate or the baseline, with one engine.

    Args:
        owner: the service.
        revision: the revision, whose template is used.
        role: candidate or baseline.
        key: key of the gate.
        progress_deadline_s: time without progress after which Kubernetes reports a failure.
    """
    name, label = owner.names.gate(key, role), {OBJECT_LABEL_GATE: key}
    metadata = owner.metadata(name, role=role, revision=revision.name)
    metadata["labels"] |= label
    template = copy.deepcopy(dict(revision.template))
    pod = template["spec"]
    template["metadata"] = {
        **template["metadata"],
        "labels": owner.labels(role, revision.name) | label,
    }
    for volume in pod.get("volumes") or ():
        if (volume.get("configMap") or {}).get("name") == owner.names.config:
            items = [
                {"key": gate_key(path), "path": path}
                for path in (manifest_key(revision.name), LIMITS_KEY)
            ]
            volume["configMap"] = {**volume["configMap"], "items": items}
    _prefer_alike_nodes(pod, label)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "revisionHistoryLimit": 0,
            "progressDeadlineSeconds": progress_deadline_s,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": owner.selector(role, revision.name) | label},
            "template": template,
        },
    }


def _prefer_alike_nodes(pod: dict[str, Any], label: Mapping[str, str]) -> None:
    """Let the scheduler prefer the node of the other engine, or else another one of its type."""
    affinity = dict(pod.get("affinity") or {})
    together = dict(affinity.get("podAffinity") or {})
    selector = {"matchLabels": dict(label)}
    field = "preferredDuringSchedulingIgnoredDuringExecution"
    together[field] = [
        *together.get(field, ()),
        *(
            {
                "weight": weight,
                "podAffinityTerm": {"topologyKey": topology, "labelSelector": selector},
            }
            for topology, weight in _PREFERRED.items()
        ),
    ]
    pod["affinity"] = {**affinity, "podAffinity": together}


def gate_job(
    owner: Owner,
    spec: LLMServiceSpec,
    gate: GateSpec,
    installation: Installation,
    *,
    key: str,
    attempt: int,
    candidate: str,
    baseline: str,
    targets: Sequence[str],
    replicas: int,
    annotations: Mapping[str, str],
) -> dict[str, Any]:
    """Render the Job that compares the candidate with the baseline.

    A failed pod is not replaced: the next attempt is another Job.

    Args:
        owner: the service.
        spec: its spec.
        gate: its gate.
        installation: images and platform settings.
        key: key of the gate.
        attempt: number of the attempt.
        candidate: name of the candidate's revision.
        baseline: name of the stable revision.
        targets: URLs of baseline and candidate; that of the candidate alone if the baseline is
            recorded.
        replicas: replicas of the service; one engine gets the share of one of them.
        annotations: annotations of the Job.
    """
    looks = gate.max_pairs or gate.pairs
    command = ["replay", "ab", "--trace", path_in_pod(gate.trace), "--yes", "--slo", SLO_FILE]
    for target in targets:
        command += ["--target", target]
    command += request_options(gate, path_in_pod, literal)
    if gate.history is not None:
        is_recorded = gate.baseline is Baseline.RECORDED
        command += ["--recorded" if is_recorded else "--history", path_in_pod(gate.history)]
        command += ["--recorded-revision", baseline] if is_recorded else []
    command += ["--pairs", str(gate.pairs)]
    if gate.max_pairs is not None:
        command += ["--max-pairs", str(gate.max_pairs)]
    if gate.margin is not None:
        command += ["--margin", format_objective(gate.margin)]
    window_s = _UNKNOWN_WINDOW_S
    if gate.window is not None:
        start_s, end_s = gate.window.start_seconds, gate.window.end_seconds
        command += ["--window", f"{start_s}s..{end_s}s"]
        window_s = end_s - start_s
    if replicas > 1:
        command += ["--rate-scale", f"1/{replicas}"]
    command += output_options(report_place(gate, candidate, key, attempt))
    command += ["--result-file", RESULT_FILE, "--progress", f"[$(POD_IP)]:{ADMIN_PORT}"]
    reads = (gate.trace, gate.history, gate.tokenizer)
    pod = replay_pod(gate, installation, command, reads=reads)
    container = pod["containers"][0]
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    container["env"] = [{"name": "POD_IP", "valueFrom": address}, *container["env"]]
    container["ports"] = [{"name": PORT_NAME_ADMIN, "containerPort": ADMIN_PORT, "protocol": "TCP"}]
    label = {OBJECT_LABEL_GATE: key}
    metadata = owner.metadata(job_name(owner, key, attempt), role=ROLE_REPLAY)
    metadata["labels"] |= label
    metadata["annotations"] = dict(annotations)
    pod_metadata = owner.pod_metadata(ROLE_REPLAY)
    pod_metadata["labels"] |= label
    pod_metadata["annotations"] |= mount_slo(pod, spec.slo)
    deadline_s = _START_S + 2 * looks * (window_s + _RUN_OVERHEAD_S)
    return {
        "apiVersion": JOB.api_version,
        "kind": JOB.name,
        "metadata": metadata,
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": min(deadline_s, 2**31 - 1),
            "template": {"metadata": pod_metadata, "spec": pod},
        },
    }
