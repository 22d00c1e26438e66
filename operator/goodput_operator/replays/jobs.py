"""The Jobs of a TraceReplay: an Indexed Job of the shards, and a Job that merges their records.

Pods comply with the restricted Pod Security Standard and have no token for the API server.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import (
    API_VERSION,
    ENV_CONTROL_TOKEN,
    FOLDER_CLAIMS,
    KIND_TRACEREPLAY,
    OBJECT_LABEL_ROLE,
    OBJECT_LABEL_TRACEREPLAY,
    PATH_READY,
    PORT_NAME_ADMIN,
    ROLE_REPLAY,
)
from goodput_core.slo.targets import format_objective
from goodput_core.spec.codec import encode
from goodput_operator.kube.objects import ADMIN_PORT, JOB, MANAGER
from goodput_operator.render.pods import POD_FIELDS
from goodput_operator.render.secrets import TOKEN_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_core.spec.llmservice import SLOSpec
    from goodput_core.spec.tracereplay import TraceReplaySpec
    from goodput_operator.kube.objects import Object
    from goodput_operator.render.pods import Installation

__all__ = ["ReplayRun", "claims_of", "merge_job", "shards_job", "token_secret"]

_CONFIG_FOLDER: Final = "/etc/goodput"
_SLO_KEY: Final = "slo.json"
_SLO_ANNOTATION: Final = "goodput.dev/slo"
_LOCAL_FOLDER: Final = "/tmp/goodput"  # noqa: S108 - the pod's own
_RESULT_FILE: Final = "/dev/termination-log"
_API_KEY: Final = "GOODPUT_TARGET_KEY"
_MERGE_DEADLINE_S: Final = 3600
_MERGE_RETRIES: Final = 2
_EXIT_S: Final = 30
_REQUESTS: Final = {"cpu": "500m", "memory": "512Mi"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRun:
    """Names, labels and places of one TraceReplay.

    Args:
        name, namespace, uid: metadata of the TraceReplay.
        records: `spec.records`.
        shards: `spec.shards`.
    """

    name: str
    namespace: str
    uid: str
    records: str
    shards: int

    @classmethod
    def of(cls, replay: Object, spec: TraceReplaySpec) -> ReplayRun:
        """Return the run of a TraceReplay."""
        metadata = replay["metadata"]
        return cls(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            records=spec.records,
            shards=spec.shards,
        )

    @property
    def shards_job(self) -> str:
        """Name of the Job of the shards."""
        return f"{self.name}-shards"

    @property
    def merge_job(self) -> str:
        """Name of the Job that merges."""
        return f"{self.name}-merge"

    @property
    def secret(self) -> str:
        """Name of the Secret with the token of the shards."""
        return f"{self.name}-{hashlib.sha256(self.uid.encode()).hexdigest()[:8]}"

    def place(self, part: str) -> str:
        """Return the place of a part of the records, such as `shard-0`."""
        # The query of a URI has the options of its store, such as `endpoint_override`.
        folder, mark, query = self.records.partition("?")
        # A later replay of the same name has another uid.
        return f"{folder.rstrip('/')}/{self.name}-{self.uid[:8]}/{part}{mark}{query}"

    @property
    def report(self) -> str:
        """Place of the run that is judged."""
        return self.place("merged" if self.shards > 1 else "shard-0")

    def labels(self) -> dict[str, str]:
        """Return the labels of every object."""
        return {
            "app.kubernetes.io/name": "goodput",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": MANAGER,
            "app.kubernetes.io/component": ROLE_REPLAY,
            OBJECT_LABEL_TRACEREPLAY: self.name,
            OBJECT_LABEL_ROLE: ROLE_REPLAY,
        }

    def metadata(self, name: str) -> dict[str, Any]:
        """Return the metadata of an object that the TraceReplay controls."""
        owner = {
            "apiVersion": API_VERSION,
            "kind": KIND_TRACEREPLAY,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
        }
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(),
            "ownerReferences": [owner],
        }


def claims_of(spec: TraceReplaySpec) -> tuple[str, ...]:
    """Return the names of the PersistentVolumeClaims of the trace and the records."""
    found = (_claim(place) for place in (spec.trace, spec.records))
    return tuple(dict.fromkeys(claim for claim in found if claim))


def token_secret(run: ReplayRun) -> dict[str, Any]:
    """Render the Secret of the shards without its token; the caller adds it to `stringData`."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": run.metadata(run.secret),
        "immutable": True,
    }


def shards_job(
    run: ReplayRun, spec: TraceReplaySpec, slo: SLOSpec, installation: Installation
) -> dict[str, Any]:
    """Render the Indexed Job whose pods each send one shard.

    A failed pod fails the Job and is never replaced: its requests must not be sent twice.
    """
    pod = _pod(spec, installation, _shard_command(run, spec))
    container = pod["containers"][0]
    container["env"] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {
            "name": ENV_CONTROL_TOKEN,
            "valueFrom": {"secretKeyRef": {"name": run.secret, "key": TOKEN_KEY}},
        },
        *_api_key(spec),
        *container["env"],
    ]
    container["ports"] = [{"name": PORT_NAME_ADMIN, "containerPort": ADMIN_PORT, "protocol": "TCP"}]
    # Ready means armed; the port is closed while requests are sent.
    container["readinessProbe"] = {
        "httpGet": {"path": PATH_READY, "port": PORT_NAME_ADMIN},
        "periodSeconds": 2,
        "timeoutSeconds": 5,
        "failureThreshold": 1,
    }
    item = {
        "path": _SLO_KEY,
        "fieldRef": {"fieldPath": f"metadata.annotations['{_SLO_ANNOTATION}']"},
    }
    pod["volumes"].append({"name": "goodput-config", "downwardAPI": {"items": [item]}})
    container["volumeMounts"].append(
        {"name": "goodput-config", "mountPath": _CONFIG_FOLDER, "readOnly": True}
    )
    annotations = {_SLO_ANNOTATION: json.dumps(encode(slo), sort_keys=True)}
    job = {
        "completionMode": "Indexed",
        "completions": spec.shards,
        "parallelism": spec.shards,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "activeDeadlineSeconds": spec.deadline_seconds,
    }
    return _job(run, run.shards_job, job, pod, annotations)


def merge_job(run: ReplayRun, spec: TraceReplaySpec, installation: Installation) -> dict[str, Any]:
    """Render the Job that merges the records of the shards and reports the verdict."""
    shards = [_path(run.place(f"shard-{index}")) for index in range(spec.shards)]
    command = ["replay", "merge", *shards, *_output(run.place("merged")), "--force"]
    pod = _pod(spec, installation, [*command, "--result-file", _RESULT_FILE])
    job = {"backoffLimit": _MERGE_RETRIES, "activeDeadlineSeconds": _MERGE_DEADLINE_S}
    return _job(run, run.merge_job, job, pod, {})


def _shard_command(run: ReplayRun, spec: TraceReplaySpec) -> list[str]:
    target = spec.target
    url = target.url or f"http://{target.service}.{run.namespace}.svc"
    command = ["replay", "--trace", _path(spec.trace), "--target", url, "--yes"]
    command += ["--slo", f"{_CONFIG_FOLDER}/{_SLO_KEY}"]
    if spec.window is not None:
        window = spec.window
        command += ["--window", f"{window.start_seconds}s..{window.end_seconds}s"]
    for option, percent in (("--speed", spec.speed_percent), ("--rate-scale", spec.rate_percent)):
        if percent != 100:
            command += [option, f"{percent}/100"]
    if target.model is not None:
        command += ["--model", target.model]
    if target.api_key_secret is not None:
        command += ["--api-key-env", _API_KEY]
    if spec.gate is not None and spec.gate.confidence is not None:
        command += ["--confidence", format_objective(spec.gate.confidence)]
    if spec.shards > 1:
        command += ["--shard", f"job/{spec.shards}"]
    # Equal in all shards and other than that of any earlier run, whose prompts may be cached.
    command += ["--salt", run.uid, "--arm", f"[$(POD_IP)]:{ADMIN_PORT}"]
    command += _output(run.place("shard-$(JOB_COMPLETION_INDEX)"))
    return [*command, "--result-file", _RESULT_FILE]


def _output(place: str) -> list[str]:
    """Return the options that write a run folder to a place."""
    if place.startswith("pvc://"):
        return ["--out", _path(place)]
    return ["--out", _LOCAL_FOLDER, "--upload", place]


def _claim(place: str) -> str:
    """Return the claim of `pvc://CLAIM/PATH`; empty for another place."""
    return place.removeprefix("pvc://").partition("/")[0] if place.startswith("pvc://") else ""


def _path(place: str) -> str:
    """Return the path in a pod of `pvc://CLAIM/PATH`, and any other place unchanged."""
    return f"{FOLDER_CLAIMS}/{place.removeprefix('pvc://')}" if _claim(place) else place


def _api_key(spec: TraceReplaySpec) -> list[dict[str, Any]]:
    secret = spec.target.api_key_secret
    if secret is None:
        return []
    reference = {"name": secret.name, "key": secret.key}
    return [{"name": _API_KEY, "valueFrom": {"secretKeyRef": reference}}]


def _job(
    run: ReplayRun,
    name: str,
    job: Mapping[str, Any],
    pod: Mapping[str, Any],
    annotations: Mapping[str, str],
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"labels": run.labels()}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {
        "apiVersion": JOB.api_version,
        "kind": JOB.name,
        "metadata": run.metadata(name),
        "spec": {**job, "template": {"metadata": metadata, "spec": pod}},
    }


def _pod(
    spec: TraceReplaySpec, installation: Installation, command: Sequence[str]
) -> dict[str, Any]:
    overrides = encode(spec.pod)
    pull_policy = installation.image_pull_policy
    claims = [{"name": claim["name"]} for claim in overrides.get("resourceClaims", ())]
    resources = encode(spec.resources) or {"requests": dict(_REQUESTS)}
    tmp = {"name": "goodput-tmp", "mountPath": "/tmp"}  # noqa: S108 - the pod's own
    volumes: list[dict[str, Any]] = [{"name": "goodput-tmp", "emptyDir": {}}]
    mounts: list[dict[str, Any]] = [tmp]
    for number, claim in enumerate(claims_of(spec)):
        read_only = {} if claim == _claim(spec.records) else {"readOnly": True}
        volume = f"goodput-claim-{number}"
        source = {"claimName": claim, **read_only}
        volumes.append({"name": volume, "persistentVolumeClaim": source})
        mounts.append({"name": volume, "mountPath": f"{FOLDER_CLAIMS}/{claim}", **read_only})
    names = {variable["name"] for variable in overrides.get("env", ())}
    home = {"name": "HOME", "value": "/tmp"}  # noqa: S108 - the root file system is read-only
    container: dict[str, Any] = {
        "name": ROLE_REPLAY,
        "image": spec.image or installation.replay_image,
        **({} if pull_policy is None else {"imagePullPolicy": pull_policy}),
        "command": ["goodput", *command],
        "env": [*([] if "HOME" in names else [home]), *overrides.get("env", ())],
        "resources": {**resources, "claims": claims} if claims else resources,
        "terminationMessagePath": _RESULT_FILE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [*mounts, *overrides.get("volumeMounts", ())],
    }
    security: dict[str, Any] = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if installation.fs_group is not None:
        security["fsGroup"] = installation.fs_group
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _EXIT_S,
        "securityContext": security,
        "containers": [container],
        "volumes": [*volumes, *overrides.get("volumes", ())],
        **{name: overrides[name] for name in POD_FIELDS if name in overrides},
    }
