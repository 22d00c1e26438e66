"""Pod templates of engines and routers.

A template is rendered once, when its revision is created, and stored in a ControllerRevision. It
must therefore depend only on fields that create a new revision. Pods comply with the restricted Pod
Security Standard and with OpenShift's restricted-v2. No user id is set: OpenShift assigns one, and
elsewhere the image's numeric user applies, which must not be root.
"""

from __future__ import annotations

import math
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import (
    ANNOTATION_METRICS,
    ANNOTATION_RUNTIME,
    ENV_CONTROL_TOKEN,
    ENV_LLMSERVICE,
    ENV_MODEL,
    ENV_REPLICA,
    ENV_REVISION,
    FOLDER_CLAIMS,
    FOLDER_WEIGHTS,
    PATH_LIVE,
    PATH_READY,
    PORT_NAME_ADMIN,
    PORT_NAME_SERVING,
    ROLE_ENGINE,
    ROLE_ROUTER,
)
from goodput_core.spec.codec import encode
from goodput_operator.kube.objects import ADMIN_PORT, SERVING_PORT
from goodput_operator.render.runtimes import model_of, server_command
from goodput_operator.render.secrets import (
    TENANTS_FILE,
    TOKEN_KEY,
    secret_name,
    tenants_volume,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_core.spec.llmservice import LLMServiceSpec, ModelSpec
    from goodput_core.spec.runtime import RuntimeSpec
    from goodput_core.spec.workloads import EngineSpec
    from goodput_operator.render.metadata import Owner

__all__ = [
    "LIMITS_KEY",
    "POD_FIELDS",
    "ROUTER_MANIFEST_KEY",
    "Installation",
    "engine_pod",
    "manifest_key",
    "router_pod",
    "user_folders",
]

LIMITS_KEY: Final = "limits.json"
"""ConfigMap key of the limits that engines start with."""
ROUTER_MANIFEST_KEY: Final = "router.json"
"""ConfigMap key of the manifest that routers read."""
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
"""Pod fields that a spec may set, and that are copied unchanged."""

_CONFIG_FOLDER: Final = "/etc/goodput"
_VOLUME: Final = "goodput-"
"""Prefix of the names of rendered volumes; the spec rejects it in users' volumes."""
_EXIT_S: Final = 7
"""Time after the drain for the last log lines and the exit of the process."""
_ENGINE_DEREGISTER_S: Final = 3
_ROUTER_DEREGISTER_S: Final = 5
"""Delay of SIGTERM by `preStop`, while the removal from EndpointSlices reaches every client."""
_ENGINE_PROBE_S: Final = 2
_ROUTER_START_S: Final = 300
"""Time within which a router must have listed its replicas; otherwise it is restarted."""
_ROUTER_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}
_LIVENESS: Final = {"periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 3}
_SHM_PER_DEVICE_GIB: Final = 1
_FOREIGN_SHM_GIB: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Settings of the operator's installation that apply to all services.

    Images, pull policy and group apply to new revisions only: pods of existing revisions keep their
    stored template.

    Args:
        engine_image: image of engines without `spec.engine.image`.
        router_image: image of routers without `spec.router.image`.
        image_pull_policy: pull policy of both images; None selects Kubernetes' default.
        fs_group: group that owns the volumes of engine pods, so that a process without root can
            write to its cache; None if the platform sets it, as OpenShift does.
        prometheus_urls: allowed values of `spec.control.prometheus.url`. Without this list, an
            author of an LLMService could make the operator send requests to any address that the
            operator reaches.
        replay_image: image of TraceReplays without `spec.image`; None to require that field.
        pinned_registries: registries whose tags a new engine revision replaces by digests.
    """

    engine_image: str
    router_image: str
    image_pull_policy: str | None = None
    fs_group: int | None = None
    prometheus_urls: frozenset[str] = frozenset()
    replay_image: str | None = None
    pinned_registries: frozenset[str] = frozenset()


def manifest_key(revision: str) -> str:
    """Return the ConfigMap key of the manifest that the engines of a revision read."""
    return f"{revision}.json"


def engine_pod(
    owner: Owner, spec: LLMServiceSpec, installation: Installation, revision: str
) -> dict[str, Any]:
    """Render the pod template of an engine revision.

    Args:
        owner: the service.
        spec: spec of the service; only `model` and `engine` are read.
        installation: images and platform settings.
        revision: name of the revision.
    """
    engine = spec.engine
    overrides = encode(engine.pod)
    metadata = owner.pod_metadata(ROLE_ENGINE, revision)
    env = _engine_env(owner, spec, revision, overrides.get("env", []))
    if engine.runtime.foreign:
        pod = _foreign_pod_spec(owner, spec, installation, env=env, overrides=overrides)
        metadata["annotations"] |= _runtime_annotations(engine.runtime)
    else:
        pod = _goodput_pod_spec(
            owner, spec, installation, revision=revision, env=env, overrides=overrides
        )
    pod["automountServiceAccountToken"] = False
    if installation.fs_group is not None:
        pod["securityContext"]["fsGroup"] = installation.fs_group
    volumes = _weights_volumes(spec.model)
    shares = engine.tensor_parallel > 1 or engine.runtime.foreign
    if shares and "/dev/shm" not in user_folders(overrides):  # noqa: S108 - shared memory
        # Tensor-parallel workers exchange tensors through /dev/shm, 64 MiB in a pod by default.
        # Other servers use it with one device, too; vLLM's documentation gives it 2 GiB.
        least_gib = _FOREIGN_SHM_GIB if engine.runtime.foreign else 0
        size = f"{max(least_gib, engine.tensor_parallel * _SHM_PER_DEVICE_GIB)}Gi"
        shared = {"name": f"{_VOLUME}shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        volumes.append((shared, {"mountPath": "/dev/shm"}))  # noqa: S108 - shared memory
    for volume, mount in volumes:
        pod["volumes"].append(volume)
        pod["containers"][0]["volumeMounts"].append({"name": volume["name"], **mount})
    return {"metadata": metadata, "spec": pod}


def _goodput_pod_spec(
    owner: Owner,
    spec: LLMServiceSpec,
    installation: Installation,
    *,
    revision: str,
    env: Sequence[Mapping[str, Any]],
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Render a pod of Goodput's engine, without the volumes of the weights."""
    engine = spec.engine
    manifest = f"{_CONFIG_FOLDER}/{manifest_key(revision)}"
    limits = f"{_CONFIG_FOLDER}/{LIMITS_KEY}"
    options = ("-f", manifest, "--limits", limits, *_model_options(spec))
    return _pod_spec(
        owner,
        role=ROLE_ENGINE,
        image=engine.image or installation.engine_image,
        pull_policy=installation.image_pull_policy,
        process=_goodput_process("engine", *options, drain_s=engine.drain_seconds),
        env=env,
        resources=encode(engine.resources),
        deregister_s=_ENGINE_DEREGISTER_S,
        drain_s=engine.drain_seconds,
        overrides=overrides,
        **_engine_probes(engine, ready=PATH_READY, live=PATH_LIVE),
    )


def _foreign_pod_spec(
    owner: Owner,
    spec: LLMServiceSpec,
    installation: Installation,
    *,
    env: Sequence[Mapping[str, Any]],
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Render a pod of another server, without the volumes of the weights.

    It has no admin port and reads no manifest. Its server may abort running responses at SIGTERM,
    so the signal is delayed until they had their time to finish.
    """
    engine, runtime = spec.engine, spec.engine.runtime
    assert runtime.image is not None
    port = {"name": PORT_NAME_SERVING, "containerPort": runtime.serving_port, "protocol": "TCP"}
    pod = _pod_spec(
        owner,
        role=ROLE_ENGINE,
        image=runtime.image,
        pull_policy=installation.image_pull_policy,
        process={**server_command(owner.name, spec), "ports": [port]},
        env=env,
        resources=encode(engine.resources),
        deregister_s=_ENGINE_DEREGISTER_S + engine.drain_seconds,
        drain_s=0,
        overrides=overrides,
        **_engine_probes(engine, ready=runtime.probed_path, live=runtime.probed_path),
    )
    config = f"{_VOLUME}config"
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != config]
    container = pod["containers"][0]
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] != config]
    if runtime.run_as_user is not None:
        pod["securityContext"] |= {"runAsUser": runtime.run_as_user, "runAsGroup": 0}
    return pod


def _runtime_annotations(runtime: RuntimeSpec) -> dict[str, str]:
    """Return the annotations by which the operator finds the metrics of another server."""
    annotations = {ANNOTATION_RUNTIME: runtime.kind.value}
    if runtime.scraped_path is not None:
        annotations[ANNOTATION_METRICS] = f":{runtime.serving_port}{runtime.scraped_path}"
    return annotations


def _engine_probes(engine: EngineSpec, *, ready: str, live: str) -> dict[str, dict[str, Any]]:
    probe = {"periodSeconds": _ENGINE_PROBE_S, "timeoutSeconds": 5}
    attempts = math.ceil(engine.startup_deadline_seconds / _ENGINE_PROBE_S)
    return {
        "startup": _http_get(ready, failureThreshold=attempts, **probe),
        "readiness": _http_get(ready, failureThreshold=2, **probe),
        "liveness": _http_get(live, **_LIVENESS),
    }


def router_pod(
    owner: Owner, spec: LLMServiceSpec, installation: Installation, revision: str
) -> dict[str, Any]:
    """Render the pod template of a router revision.

    A router listens once it has listed its replicas. It is ready even without a ready replica,
    because it must count the requests that no replica can serve.

    Args:
        owner: the service.
        spec: spec of the service; only `router` is read.
        installation: images and platform settings.
        revision: name of the revision.
    """
    router = spec.router
    overrides = encode(router.pod)
    secret = router.tenants_secret
    tenants = () if secret is None else ("--tenants", TENANTS_FILE)
    pod = _pod_spec(
        owner,
        role=ROLE_ROUTER,
        image=router.image or installation.router_image,
        pull_policy=installation.image_pull_policy,
        process=_goodput_process(
            "router",
            "-f",
            f"{_CONFIG_FOLDER}/{ROUTER_MANIFEST_KEY}",
            "--endpoints",
            f"{owner.namespace}/{owner.names.engines}",
            *tenants,
            drain_s=router.drain_seconds,
        ),
        env=[{"name": ENV_LLMSERVICE, "value": owner.name}, *overrides.get("env", ())],
        resources=encode(router.resources) or {"requests": dict(_ROUTER_REQUESTS)},
        startup=_http_get(
            PATH_LIVE, periodSeconds=1, timeoutSeconds=5, failureThreshold=_ROUTER_START_S
        ),
        readiness=_http_get(PATH_LIVE, periodSeconds=2, timeoutSeconds=5, failureThreshold=2),
        liveness=_http_get(PATH_LIVE, **_LIVENESS),
        deregister_s=_ROUTER_DEREGISTER_S,
        drain_s=router.drain_seconds,
        overrides=overrides,
    )
    pod["serviceAccountName"] = owner.names.router
    if secret is not None:
        volume, mount = tenants_volume(secret, f"{_VOLUME}tenants")
        pod["volumes"].append(volume)
        pod["containers"][0]["volumeMounts"].append(mount)
    if "topologySpreadConstraints" not in pod:
        pod["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": owner.selector(ROLE_ROUTER)},
            }
        ]
    return {"metadata": owner.pod_metadata(ROLE_ROUTER, revision), "spec": pod}


def _http_get(path: str, **timing: int) -> dict[str, Any]:
    """Return a probe of the serving port."""
    return {"httpGet": {"path": path, "port": PORT_NAME_SERVING}, **timing}


def _goodput_process(command: str, *options: str, drain_s: int) -> dict[str, Any]:
    """Return the command and the ports of a subcommand of `goodput`."""
    return {
        "command": [
            "goodput",
            command,
            *options,
            "--host",
            "::",  # all addresses of the pod, IPv4 included
            "--port",
            str(SERVING_PORT),
            "--admin-port",
            str(ADMIN_PORT),
            "--grace",
            f"{drain_s}s",
        ],
        "ports": [
            {"name": PORT_NAME_SERVING, "containerPort": SERVING_PORT, "protocol": "TCP"},
            {"name": PORT_NAME_ADMIN, "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
    }


def _pod_spec(
    owner: Owner,
    *,
    role: str,
    image: str,
    pull_policy: str | None,
    process: Mapping[str, Any],
    env: Sequence[Mapping[str, Any]],
    resources: Mapping[str, Any],
    startup: Mapping[str, Any],
    readiness: Mapping[str, Any],
    liveness: Mapping[str, Any],
    deregister_s: int,
    drain_s: int,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Render the parts that the pods of engines and routers have in common.

    Args:
        owner: the service.
        role: engine or router, the name of the container.
        image: image of the container.
        pull_policy: pull policy of the image; None selects Kubernetes' default.
        process: command, arguments and ports of the container.
        env: environment of the container.
        resources: resources of the container, without device claims.
        startup: startup probe.
        readiness: readiness probe.
        liveness: liveness probe.
        deregister_s: delay of SIGTERM.
        drain_s: time for running responses after SIGTERM.
        overrides: `pod` of the spec.
    """
    claims = [{"name": claim["name"]} for claim in overrides.get("resourceClaims", ())]
    tmp = [] if "/tmp" in user_folders(overrides) else [f"{_VOLUME}tmp"]  # noqa: S108 - the pod's
    container: dict[str, Any] = {
        "name": role,
        "image": image,
        **({} if pull_policy is None else {"imagePullPolicy": pull_policy}),
        **process,
        "env": list(env),
        "resources": {**resources, "claims": claims} if claims else resources,
        "startupProbe": startup,
        "livenessProbe": liveness,
        "readinessProbe": readiness,
        "lifecycle": {"preStop": {"sleep": {"seconds": deregister_s}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": f"{_VOLUME}config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
            *({"name": name, "mountPath": "/tmp"} for name in tmp),  # noqa: S108 - the pod's own
            *overrides.get("volumeMounts", ()),
        ],
    }
    return {
        "containers": [container],
        "volumes": [
            {"name": f"{_VOLUME}config", "configMap": {"name": owner.names.config}},
            *({"name": name, "emptyDir": {}} for name in tmp),
            *overrides.get("volumes", ()),
        ],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": deregister_s + drain_s + _EXIT_S,
        **{field: overrides[field] for field in POD_FIELDS if field in overrides},
    }


def user_folders(overrides: Mapping[str, Any]) -> set[str]:
    """Return the folders at which `pod` of a spec mounts volumes; a folder has one mount only."""
    paths = (mount["mountPath"].lstrip("/") for mount in overrides.get("volumeMounts", ()))
    return {posixpath.normpath(f"/{path}") for path in paths}


def _engine_env(
    owner: Owner, spec: LLMServiceSpec, revision: str, users: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the environment of engines; variables of the spec override ours of the same name.

    The spec rejects names that are reserved.
    """
    if spec.engine.runtime.foreign:
        # A variable of the arguments must precede the variables that refer to it.
        own: dict[str, Any] = {"name": ENV_MODEL, "value": model_of(spec.model)}
    else:
        token = {"secretKeyRef": {"name": secret_name(owner, revision), "key": TOKEN_KEY}}
        own = {"name": ENV_CONTROL_TOKEN, "valueFrom": token}
    ours: list[dict[str, Any]] = [
        {"name": ENV_LLMSERVICE, "value": owner.name},
        {"name": ENV_REVISION, "value": revision},
        {"name": ENV_REPLICA, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        own,
        # The root file system is read-only, so libraries write their caches to /tmp.
        {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the pod's own
        *_weights_env(spec.model),
    ]
    user_names = {variable["name"] for variable in users}
    return [variable for variable in ours if variable["name"] not in user_names] + users


def _weights_env(model: ModelSpec) -> list[dict[str, Any]]:
    """Return the variables of the libraries that load a model.

    These are the cache folder, the hub token and the offline switch of Hugging Face models. The
    operator never reads the token: pods refer to the Secret that contains it.
    """
    if model.scheme == "pvc":
        return [{"name": "HF_HUB_OFFLINE", "value": "1"}]
    if model.scheme != "hf":
        return []
    env: list[dict[str, Any]] = [{"name": "HF_HOME", "value": FOLDER_WEIGHTS}]
    if model.token_secret is not None:
        reference = {"name": model.token_secret.name, "key": model.token_secret.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    if model.offline:
        env.append({"name": "HF_HUB_OFFLINE", "value": "1"})
    return env


def _model_options(spec: LLMServiceSpec) -> list[str]:
    """Return the engine's options for a real model; none for an emulated device."""
    if spec.model.scheme == "emulated":
        return []
    options = []
    if spec.model.scheme == "pvc":
        options += ["--model-path", model_of(spec.model)]
    cpus = spec.engine.resources.cpus
    if cpus is not None and spec.engine.real_model.threads is None:
        # The HTTP processes need the rest: a computing thread beside one is slowed down many times.
        options += ["--threads", str(max(1, math.floor(cpus) - spec.engine.http_processes))]
    return options


def _weights_volumes(model: ModelSpec) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the volumes of the model's weights, each with its mount."""
    if model.scheme == "pvc":
        claim = model.name.partition("/")[0]
        source = {"claimName": claim, "readOnly": True}
        volume = {"name": f"{_VOLUME}weights", "persistentVolumeClaim": source}
        return [(volume, {"mountPath": f"{FOLDER_CLAIMS}/{claim}", "readOnly": True})]
    if model.scheme != "hf":
        return []
    cache, name = model.cache, f"{_VOLUME}cache"
    mount: dict[str, Any] = {"mountPath": FOLDER_WEIGHTS}
    if cache is None:
        return [({"name": name, "emptyDir": {}}, mount)]
    if cache.sub_path is not None:
        mount["subPath"] = cache.sub_path
    source = {"claimName": cache.claim_name}
    if cache.read_only:
        source = {**source, "readOnly": True}
        mount["readOnly"] = True
    return [({"name": name, "persistentVolumeClaim": source}, mount)]
