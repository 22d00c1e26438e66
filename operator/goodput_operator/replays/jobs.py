"""The Jobs of a TraceReplay: an Indexed Job of the shards, and a Job that judges their records.

The second Job merges the records of several shards, and compares the run with a baseline if the
gate has one. A replay of one shard without a baseline has no second Job.

Pods comply with the restricted Pod Security Standard and have no token for the API server.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import (
    API_VERSION,
    ENV_CONTROL_TOKEN,
    KIND_TRACEREPLAY,
    OBJECT_LABEL_ROLE,
    OBJECT_LABEL_TRACEREPLAY,
    PATH_READY,
    PORT_NAME_ADMIN,
    ROLE_REPLAY,
)
from goodput_core.errors import ExitCode
from goodput_core.slo.targets import format_objective
from goodput_core.spec.requests import request_options
from goodput_operator.kube.objects import ADMIN_PORT, JOB, MANAGER
from goodput_operator.render.replay_pod import (
    RESULT_FILE,
    SLO_FILE,
    claims_of,
    mount_slo,
    output_options,
    path_in_pod,
    place_below,
    replay_pod,
)
from goodput_operator.render.runtimes import literal
from goodput_operator.render.secrets import TOKEN_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_core.spec.llmservice import SLOSpec
    from goodput_core.spec.tracereplay import ReplayGateSpec, TraceReplaySpec
    from goodput_operator.kube.objects import Object
    from goodput_operator.render.pods import Installation

__all__ = ["SHARED_MODES", "ReplayRun", "merge_job", "shards_job", "token_secret"]

SHARED_MODES: Final = frozenset({"ReadWriteMany", "ReadOnlyMany"})
"""Access modes of claims that the pods of several nodes can read."""

_API_KEY: Final = "GOODPUT_TARGET_KEY"
_MERGE_CONTAINER: Final = "merge"
_MERGE_DEADLINE_S: Final = 3600
_MERGE_RETRIES: Final = 2


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
        # A later replay of the same name has another uid.
        return place_below(self.records, f"{self.name}-{self.uid[:8]}/{part}")

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
    run: ReplayRun,
    spec: TraceReplaySpec,
    slo: SLOSpec,
    installation: Installation,
    claims: Mapping[str, Sequence[str] | None],
) -> dict[str, Any]:
    """Render the Indexed Job whose pods each send one shard.

    A failed pod fails the Job and is never replaced: its requests must not be sent twice.

    Args:
        run: names and places.
        spec: the TraceReplay.
        slo: the objectives.
        installation: images and platform settings.
        claims: access modes of the PersistentVolumeClaims by name.
    """
    checks = _checks(spec, claims)
    command = _shard_command(run, spec, checks)
    reads = (spec.trace, spec.target.tokenizer, *checks.values())
    pod = replay_pod(spec, installation, command, reads=reads)
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
    annotations = mount_slo(pod, slo)
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
    """Render the Job that merges the records of several shards, or compares the run, or both."""
    gate = spec.gate
    reads = () if gate is None else (gate.baseline, gate.history)
    commands = [_merge_command(run)] if run.shards > 1 else []
    if gate is not None and gate.compares:
        commands.append(_gate_command(run, gate))
    pod = replay_pod(spec, installation, commands[-1], reads=reads)
    if len(commands) > 1:
        merge = {"name": _MERGE_CONTAINER, "command": ["goodput", *commands[0]]}
        pod["initContainers"] = [pod["containers"][0] | merge]
    # A verdict other than PASS is the result of the Job, and a retry would not change it.
    verdicts = [ExitCode.FAIL, ExitCode.INCONCLUSIVE, ExitCode.INVALID]
    ends = {"operator": "In", "values": [int(code) for code in verdicts]}
    job = {
        "backoffLimit": _MERGE_RETRIES,
        "activeDeadlineSeconds": _MERGE_DEADLINE_S,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": ends}]},
    }
    return _job(run, run.merge_job, job, pod, {})


def _merge_command(run: ReplayRun) -> list[str]:
    shards = [path_in_pod(run.place(f"shard-{index}")) for index in range(run.shards)]
    command = ["replay", "merge", *shards, *output_options(run.place("merged")), "--force"]
    return [*command, "--result-file", RESULT_FILE]


def _gate_command(run: ReplayRun, gate: ReplayGateSpec) -> list[str]:
    command = ["replay", "gate", path_in_pod(run.report)]
    for option, place in (("--baseline", gate.baseline), ("--recorded", gate.history)):
        if place is not None:
            command += [option, path_in_pod(place)]
    for option, share in (("--margin", gate.margin), ("--confidence", gate.confidence)):
        if share is not None:
            command += [option, format_objective(share)]
    return [*command, "--result-file", RESULT_FILE]


def _checks(spec: TraceReplaySpec, claims: Mapping[str, Sequence[str] | None]) -> dict[str, str]:
    """Return the places of the runs with which a shard compares its plan, by option.

    Shards on several nodes cannot all mount a claim of one node. A baseline or a history there is
    read only after the run.
    """
    gate = spec.gate
    if gate is None:
        return {}
    places = {"--check-baseline": gate.baseline, "--check-recorded": gate.history}
    found = {option: place for option, place in places.items() if place is not None}
    shared = all(SHARED_MODES.intersection(claims.get(n) or ()) for n in claims_of(*found.values()))
    return found if spec.shards == 1 or shared else {}


def _shard_command(run: ReplayRun, spec: TraceReplaySpec, checks: Mapping[str, str]) -> list[str]:
    target = spec.target
    url = target.url or f"http://{target.service}.{run.namespace}.svc"
    command = ["replay", "--trace", path_in_pod(spec.trace)]
    command += ["--target", literal(url), "--yes"]
    command += ["--slo", SLO_FILE]
    if spec.window is not None:
        window = spec.window
        command += ["--window", f"{window.start_seconds}s..{window.end_seconds}s"]
    for option, percent in (("--speed", spec.speed_percent), ("--rate-scale", spec.rate_percent)):
        if percent != 100:
            command += [option, f"{percent}/100"]
    command += request_options(target, path_in_pod, literal)
    if target.api_key_secret is not None:
        command += ["--api-key-env", _API_KEY]
    if spec.gate is not None and spec.gate.confidence is not None:
        command += ["--confidence", format_objective(spec.gate.confidence)]
    if spec.shards > 1:
        command += ["--shard", f"job/{spec.shards}"]
    for option, place in checks.items():
        command += [option, path_in_pod(place)]
    # Equal in all shards and other than that of any earlier run, whose prompts may be cached.
    command += ["--salt", run.uid, "--arm", f"[$(POD_IP)]:{ADMIN_PORT}"]
    index = "$(JOB_COMPLETION_INDEX)"
    command += output_options(run.place(f"shard-{index}"), variable=index)
    return [*command, "--result-file", RESULT_FILE]


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
