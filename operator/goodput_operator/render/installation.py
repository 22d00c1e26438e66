"""What whoever installed the operator decided for all services."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Installation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Values of the chart that reach services.

    A change of the first four reaches new revisions only: the pods of those that exist keep their
    stored template.

    Args:
        engine_image: of services that name none in `spec.engine.image`.
        router_image: of routers of services that name none in `spec.router.image`.
        image_pull_policy: of both; None: Kubernetes' own choice.
        fs_group: group that owns the volumes of engine pods, so that a process without root can
            write to its cache; None where the platform sets one, as OpenShift does.
        prometheus_urls: of the servers that services may measure by. Whoever may edit a service
            could else make the operator ask any address that it reaches.
    """

    engine_image: str
    router_image: str
    image_pull_policy: str | None = None
    fs_group: int | None = None
    prometheus_urls: frozenset[str] = frozenset()
