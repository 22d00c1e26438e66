"""The pods of the replay image: their storage, their SLO and their hardening.

A pod reports its result as its termination message. It needs no other object: its SLO is an
annotation, which a file of the pod shows.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import FOLDER_CLAIMS, ROLE_REPLAY
from goodput_core.spec.codec import encode
from goodput_operator.render.pods import POD_FIELDS, user_folders
from goodput_operator.render.runtimes import literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.spec.llmservice import SLOSpec
    from goodput_core.spec.rollout import GateSpec
    from goodput_core.spec.tracereplay import TraceReplaySpec
    from goodput_operator.render.pods import Installation

__all__ = [
    "RESULT_FILE",
    "SLO_FILE",
    "claims_of",
    "mount_slo",
    "output_options",
    "path_in_pod",
    "place_below",
    "replay_pod",
    "with_places",
]

_CONFIG_FOLDER: Final = "/etc/goodput"
_SLO_KEY: Final = "slo.json"
SLO_FILE: Final = f"{_CONFIG_FOLDER}/{_SLO_KEY}"
"""Path of the file that `mount_slo` adds."""
RESULT_FILE: Final = "/dev/termination-log"
_SLO_ANNOTATION: Final = "goodput.dev/slo"
_LOCAL_FOLDER: Final = "/tmp/goodput"  # noqa: S108 - the pod's own
_EXIT_S: Final = 30
_REQUESTS: Final = {"cpu": "500m", "memory": "512Mi"}


def claims_of(*places: str | None) -> tuple[str, ...]:
    """Return the names of the PersistentVolumeClaims of some places; None for one without."""
    found = (_claim(place or "") for place in places)
    return tuple(dict.fromkeys(claim for claim in found if claim))


def mount_slo(pod: dict[str, Any], slo: SLOSpec) -> dict[str, str]:
    """Mount the SLO of a pod as a file, and return the annotation that holds it."""
    item = {
        "path": _SLO_KEY,
        "fieldRef": {"fieldPath": f"metadata.annotations['{_SLO_ANNOTATION}']"},
    }
    pod["volumes"].append({"name": "goodput-config", "downwardAPI": {"items": [item]}})
    pod["containers"][0]["volumeMounts"].append(
        {"name": "goodput-config", "mountPath": _CONFIG_FOLDER, "readOnly": True}
    )
    return {_SLO_ANNOTATION: json.dumps(encode(slo), sort_keys=True)}


def output_options(place: str | None, *, variable: str = "") -> list[str]:
    """Return the options that write a run folder to a place; None if it is not kept.

    Args:
        place: the place.
        variable: the reference in it that Kubernetes replaces by a variable; empty without one.
    """
    if place is None:
        return ["--out", _LOCAL_FOLDER]
    path = path_in_pod(place)
    if variable:
        before, _, after = path.rpartition(literal(variable))
        path = f"{before}{variable}{after}"
    if place.startswith("pvc://"):
        return ["--out", path]
    return ["--out", _LOCAL_FOLDER, "--upload", path]


def path_in_pod(place: str) -> str:
    """Return `pvc://CLAIM/PATH` as a path in a pod, or another place, as a container's argument."""
    folder = f"{FOLDER_CLAIMS}/{place.removeprefix('pvc://')}" if _claim(place) else place
    return literal(folder)


def with_places(message: str) -> str:
    """Return the message of a pod with places of claims instead of their paths in the pod."""
    return message.replace(f"{FOLDER_CLAIMS}/", "pvc://")


def place_below(place: str, path: str) -> str:
    """Return a place below a folder; the query of a URI has the options of its store."""
    folder, mark, query = place.partition("?")
    return f"{folder.rstrip('/')}/{path}{mark}{query}"


def _claim(place: str) -> str:
    """Return the claim of `pvc://CLAIM/PATH`; empty for another place."""
    return place.removeprefix("pvc://").partition("/")[0] if place.startswith("pvc://") else ""


def replay_pod(
    spec: TraceReplaySpec | GateSpec,
    installation: Installation,
    command: Sequence[str],
    *,
    reads: Sequence[str | None],
) -> dict[str, Any]:
    """Render the spec of a pod that runs a command of the replay image to its end.

    Args:
        spec: image, resources and other fields of the pod, and the place of its records.
        installation: images and platform settings.
        command: words after `goodput`.
        reads: places that the command reads; None for one that it has not.
    """
    overrides = encode(spec.pod)
    pull_policy = installation.image_pull_policy
    claims = [{"name": claim["name"]} for claim in overrides.get("resourceClaims", ())]
    resources = encode(spec.resources) or {"requests": dict(_REQUESTS)}
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if "/tmp" not in user_folders(overrides):  # noqa: S108 - the pod's own
        volumes.append({"name": "goodput-tmp", "emptyDir": {}})
        mounts.append({"name": "goodput-tmp", "mountPath": "/tmp"})  # noqa: S108 - as above
    for number, claim in enumerate(claims_of(*reads, spec.records)):
        read_only = {} if claim == _claim(spec.records or "") else {"readOnly": True}
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
        "terminationMessagePath": RESULT_FILE,
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
