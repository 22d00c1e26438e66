"""The pod of the routers.

Like an engine's it is rendered once for a revision of its own, made of what a router reads when
it starts, and then kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ENV_LLMSERVICE, PATH_LIVE, ROLE_ROUTER
from goodput_core.spec.encode import encode
from goodput_operator.render.pods import (
    CONFIG_FOLDER,
    container,
    http_get,
    listen_options,
    pod_spec,
    with_claims,
)

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.render.installation import Installation
    from goodput_operator.render.metadata import Owner

__all__ = ["ROUTER_MANIFEST_KEY", "router_pod"]

ROUTER_MANIFEST_KEY: Final = "router.json"
"""The key of the ConfigMap with the manifest that routers read."""
_QUIET_S: Final = 5
_STARTS_S: Final = 300
"""So long may it wait for the API server to tell of replicas, before it is started anew."""
_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}


def router_pod(
    owner: Owner, spec: LLMServiceSpec, installation: Installation, revision: str
) -> dict[str, Any]:
    """The pod template of the routers.

    A router opens its ports once it knows its replicas and then takes requests, whether replicas
    are ready or not: it is what counts the requests that find none.

    Args:
        owner: the service.
        spec: what it asks for; only `router` is read.
        installation: what the platform adds.
        revision: the revision's name.
    """
    router = spec.router
    asked = encode(router.pod)
    resources = encode(router.resources) or {"requests": dict(_REQUESTS)}
    one = container(
        name=ROLE_ROUTER,
        image=router.image or installation.router_image,
        pull_policy=installation.image_pull_policy,
        command=[
            "goodput",
            "router",
            "-f",
            f"{CONFIG_FOLDER}/{ROUTER_MANIFEST_KEY}",
            "--endpoints",
            f"{owner.namespace}/{owner.names.engines}",
            *listen_options(router.drain_seconds),
        ],
        env=[{"name": ENV_LLMSERVICE, "value": owner.name}, *asked.get("env", ())],
        resources=with_claims(resources, asked),
        startup=http_get(PATH_LIVE, periodSeconds=1, timeoutSeconds=5, failureThreshold=_STARTS_S),
        readiness=http_get(PATH_LIVE, periodSeconds=2, timeoutSeconds=5, failureThreshold=2),
        quiet_s=_QUIET_S,
        asked=asked,
    )
    pod = pod_spec(
        container=one,
        config=owner.names.config,
        quiet_s=_QUIET_S,
        drain_s=router.drain_seconds,
        asked=asked,
    )
    pod["serviceAccountName"] = owner.names.router
    if "topologySpreadConstraints" not in pod:
        pod["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": owner.selector(ROLE_ROUTER)},
            }
        ]
    return {"metadata": {"labels": owner.labels(ROLE_ROUTER, revision)}, "spec": pod}
