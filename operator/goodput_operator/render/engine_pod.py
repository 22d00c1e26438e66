"""The pod of one revision's engines.

It is rendered once, when the revision is made, and then kept: nothing of it may depend on what
can change without a new revision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import (
    ENV_CONTROL_TOKEN,
    ENV_LLMSERVICE,
    ENV_REPLICA,
    ENV_REVISION,
    PATH_READY,
    ROLE_ENGINE,
)
from goodput_core.spec.encode import encode
from goodput_operator.render.pods import (
    CONFIG_FOLDER,
    container,
    http_get,
    listen_options,
    pod_spec,
    with_claims,
)
from goodput_operator.render.secrets import TOKEN_KEY, secret_name
from goodput_operator.render.weights import weights_env, weights_volumes

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.render.installation import Installation
    from goodput_operator.render.metadata import Owner

__all__ = ["LIMITS_KEY", "engine_pod", "manifest_key"]

LIMITS_KEY: Final = "limits.json"
"""The key of the ConfigMap with the limits that engines begin with."""
_QUIET_S: Final = 3
_PROBE_S: Final = 2
_SHM: Final = "goodput-shm"
_SHM_PER_DEVICE_GIB: Final = 1


def manifest_key(revision: str) -> str:
    """The key of the ConfigMap with the manifest that the engines of a revision read."""
    return f"{revision}.json"


def engine_pod(
    owner: Owner, spec: LLMServiceSpec, installation: Installation, revision: str
) -> dict[str, Any]:
    """The pod template of a revision's engines.

    Args:
        owner: the service.
        spec: what it asks for; only `model` and `engine` are read.
        installation: what the platform adds.
        revision: the revision's name.
    """
    engine = spec.engine
    asked = encode(engine.pod)
    ready = {"periodSeconds": _PROBE_S, "timeoutSeconds": 5}
    one = container(
        name=ROLE_ENGINE,
        image=engine.image or installation.engine_image,
        pull_policy=installation.image_pull_policy,
        command=[
            "goodput",
            "engine",
            "-f",
            f"{CONFIG_FOLDER}/{manifest_key(revision)}",
            "--limits",
            f"{CONFIG_FOLDER}/{LIMITS_KEY}",
            *listen_options(engine.drain_seconds),
        ],
        env=_env(owner, spec, revision, asked.get("env", [])),
        resources=with_claims(encode(engine.resources), asked),
        startup=http_get(
            PATH_READY,
            failureThreshold=math.ceil(engine.startup_deadline_seconds / _PROBE_S),
            **ready,
        ),
        readiness=http_get(PATH_READY, failureThreshold=2, **ready),
        quiet_s=_QUIET_S,
        asked=asked,
    )
    pod = pod_spec(
        container=one,
        config=owner.names.config,
        quiet_s=_QUIET_S,
        drain_s=engine.drain_seconds,
        asked=asked,
    )
    pod["automountServiceAccountToken"] = False
    if installation.fs_group is not None:
        pod["securityContext"]["fsGroup"] = installation.fs_group
    volumes = weights_volumes(spec.model)
    if engine.tensor_parallel > 1:
        # Processes of one replica exchange tensors there; a pod has 64 MiB otherwise.
        size = f"{engine.tensor_parallel * _SHM_PER_DEVICE_GIB}Gi"
        shared = {"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        volumes.append((shared, {"mountPath": "/dev/shm"}))  # noqa: S108 - shared memory
    for volume, mount in volumes:
        pod["volumes"].append(volume)
        pod["containers"][0]["volumeMounts"].append({"name": volume["name"], **mount})
    return {"metadata": {"labels": owner.labels(ROLE_ENGINE, revision)}, "spec": pod}


def _env(
    owner: Owner, spec: LLMServiceSpec, revision: str, asked: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The environment; of what is no name of ours, what the service asks for wins."""
    token = {"secretKeyRef": {"name": secret_name(owner, revision), "key": TOKEN_KEY}}
    ours: list[dict[str, Any]] = [
        {"name": ENV_LLMSERVICE, "value": owner.name},
        {"name": ENV_REVISION, "value": revision},
        {"name": ENV_REPLICA, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": ENV_CONTROL_TOKEN, "valueFrom": token},
        # The root file system is read-only: what libraries write at home goes to /tmp.
        {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the pod's own
        *weights_env(spec.model),
    ]
    named = {one["name"] for one in asked}
    return [one for one in ours if one["name"] not in named] + asked
