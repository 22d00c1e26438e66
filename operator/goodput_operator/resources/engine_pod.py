"""The pod of one revision's engines.

It is rendered once, when the revision is made, and then kept: nothing of it may depend on what
can change without a new revision.
"""

from __future__ import annotations

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
from goodput_operator.resources.pods import (
    CONFIG_FOLDER,
    container,
    http_get,
    listen_options,
    pod_spec,
)

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import EngineSpec, LLMServiceSpec
    from goodput_operator.resources.installation import Installation
    from goodput_operator.resources.metadata import Owner

__all__ = ["LIMITS_KEY", "TOKEN_KEY", "engine_pod", "manifest_key"]

LIMITS_KEY: Final = "limits.json"
"""The key of the ConfigMap with the limits that engines begin with."""
TOKEN_KEY: Final = "token"  # noqa: S105 - a key's name
"""The key of the Secret with the token of the admin ports of one revision."""
_QUIET_S: Final = 3
_SHM_PER_DEVICE_MIB: Final = 1024
_SHM: Final = "goodput-shm"


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
        revision: the revision's name, also of the Secret with its token.
    """
    engine = spec.engine
    asked = encode(engine).get("pod", {})
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
            *listen_options(),
        ],
        env=[*_env(owner, revision), *asked.get("env", ())],
        resources=_resources(engine, asked),
        readiness=http_get(PATH_READY, periodSeconds=2, timeoutSeconds=5, failureThreshold=2),
        quiet_s=_QUIET_S,
    )
    one["volumeMounts"] += asked.get("volumeMounts", ())
    pod = pod_spec(container=one, config=owner.names.config, quiet_s=_QUIET_S, asked=asked)
    pod["volumes"] += asked.get("volumes", ())
    pod["automountServiceAccountToken"] = False
    if installation.fs_group is not None:
        pod["securityContext"]["fsGroup"] = installation.fs_group
    if engine.tensor_parallel > 1:
        _share_memory(pod, engine.tensor_parallel)
    return {"metadata": {"labels": owner.labels(ROLE_ENGINE, revision)}, "spec": pod}


def _env(owner: Owner, revision: str) -> list[dict[str, Any]]:
    token = {"secretKeyRef": {"name": revision, "key": TOKEN_KEY}}
    return [
        {"name": ENV_LLMSERVICE, "value": owner.name},
        {"name": ENV_REVISION, "value": revision},
        {"name": ENV_REPLICA, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": ENV_CONTROL_TOKEN, "valueFrom": token},
        # The root file system is read-only: what libraries write at home goes to /tmp.
        {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the pod's own
    ]


def _resources(engine: EngineSpec, asked: dict[str, Any]) -> dict[str, Any]:
    resources: dict[str, Any] = dict(encode(engine.resources))
    if claims := asked.get("resourceClaims"):
        resources["claims"] = [{"name": claim["name"]} for claim in claims]
    return resources


def _share_memory(pod: dict[str, Any], devices: int) -> None:
    """Processes of one replica exchange tensors through /dev/shm, of which a pod has 64 MiB."""
    size = f"{devices * _SHM_PER_DEVICE_MIB}Mi"
    pod["volumes"].append({"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    (one,) = pod["containers"]
    one["volumeMounts"].append({"name": _SHM, "mountPath": "/dev/shm"})  # noqa: S108 - shared memory
