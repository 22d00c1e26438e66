"""What pods of engines and routers have in common: hardening, probes, ports, configuration.

They pass the restricted Pod Security Standard and OpenShift's restricted-v2. No user is fixed:
OpenShift assigns one, and elsewhere the image's own numeric user holds, which must not be root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import PATH_LIVE, PORT_NAME_ADMIN, PORT_NAME_SERVING
from goodput_operator.kube.objects import ADMIN_PORT, SERVING_PORT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "CONFIG_FOLDER",
    "POD_FIELDS",
    "container",
    "http_get",
    "listen_options",
    "pod_spec",
    "with_claims",
]

CONFIG_FOLDER: Final = "/etc/goodput"
_LAST_WORDS_S: Final = 7
"""After the drain, for the last events and for the process to end."""
_VOLUME: Final = "goodput-"
"""Begins the names of our volumes, so that none is a user's."""

POD_FIELDS: Final = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "topologySpreadConstraints",
    "imagePullSecrets",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "resourceClaims",
)
"""Fields of a pod that a service may set and that pass through as they are."""


def listen_options(drain_s: int) -> list[str]:
    """The options of both commands that say where to listen and how long to drain."""
    return [
        "--host",
        "::",  # every address of the pod, IPv4 too
        "--port",
        str(SERVING_PORT),
        "--admin-port",
        str(ADMIN_PORT),
        "--grace",
        f"{drain_s}s",
    ]


def http_get(path: str, **timing: int) -> dict[str, Any]:
    """A probe of the serving port."""
    return {"httpGet": {"path": path, "port": PORT_NAME_SERVING}, **timing}


def container(
    *,
    name: str,
    image: str,
    pull_policy: str | None,
    command: Sequence[str],
    env: Sequence[Mapping[str, Any]],
    resources: Mapping[str, Any],
    startup: Mapping[str, Any],
    readiness: Mapping[str, Any],
    quiet_s: int,
    asked: Mapping[str, Any],
) -> dict[str, Any]:
    """The one container of a pod.

    Args:
        name: the role.
        image: the container image.
        pull_policy: None: Kubernetes' own choice.
        command: program and arguments.
        env: the environment.
        resources: requests and limits.
        startup: the probe before which no other counts.
        readiness: the probe that lets requests in.
        quiet_s: between the removal from Services and SIGTERM, for everybody to have heard of it.
        asked: what the service asks of the pod; of it the volume mounts are taken.
    """
    pulling = {} if pull_policy is None else {"imagePullPolicy": pull_policy}
    return {
        "name": name,
        "image": image,
        **pulling,
        "command": list(command),
        "env": [dict(one) for one in env],
        "ports": [
            {"name": PORT_NAME_SERVING, "containerPort": SERVING_PORT, "protocol": "TCP"},
            {"name": PORT_NAME_ADMIN, "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": dict(resources),
        "startupProbe": dict(startup),
        "livenessProbe": http_get(
            PATH_LIVE, periodSeconds=10, timeoutSeconds=10, failureThreshold=3
        ),
        "readinessProbe": dict(readiness),
        "lifecycle": {"preStop": {"sleep": {"seconds": quiet_s}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": f"{_VOLUME}config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": f"{_VOLUME}tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
            *asked.get("volumeMounts", ()),
        ],
    }


def with_claims(resources: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """A container's resources that uses every device claim of its pod."""
    claims = [{"name": claim["name"]} for claim in asked.get("resourceClaims", ())]
    return {**resources, "claims": claims} if claims else dict(resources)


def pod_spec(
    *,
    container: Mapping[str, Any],
    config: str,
    quiet_s: int,
    drain_s: int,
    asked: Mapping[str, Any],
) -> dict[str, Any]:
    """A pod around its container.

    Args:
        container: as `container` made it.
        config: the ConfigMap that it mounts.
        quiet_s: as of `container`.
        drain_s: how long its process lets running answers finish.
        asked: what the service asks of the pod; of it volumes and `POD_FIELDS` are taken.
    """
    return {
        "containers": [dict(container)],
        "volumes": [
            {"name": f"{_VOLUME}config", "configMap": {"name": config}},
            {"name": f"{_VOLUME}tmp", "emptyDir": {}},
            *asked.get("volumes", ()),
        ],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": quiet_s + drain_s + _LAST_WORDS_S,
        **{field: asked[field] for field in POD_FIELDS if field in asked},
    }
