"""Which pods of a service can be asked, and where: pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.contract import OBJECT_LABEL_ROLE, ROLE_ENGINE, ROLE_ROUTER
from goodput_operator.kube.objects import admin_url, has_ended, is_ready
from goodput_operator.measure.readings import Source

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_operator.kube.objects import Object

__all__ = ["engine_sources", "router_sources"]


def router_sources(pods: Iterable[Object]) -> tuple[Source, ...]:
    """The routers that have an address; those that are ready must answer."""
    return _sources(pods, ROLE_ROUTER)


def engine_sources(pods: Iterable[Object]) -> tuple[Source, ...]:
    """The engines that have an address."""
    return _sources(pods, ROLE_ENGINE)


def _sources(pods: Iterable[Object], role: str) -> tuple[Source, ...]:
    found = (
        _source(pod)
        for pod in pods
        if (pod["metadata"].get("labels") or {}).get(OBJECT_LABEL_ROLE) == role
    )
    return tuple(source for source in found if source is not None)


def _source(pod: Object) -> Source | None:
    metadata, url = pod["metadata"], admin_url(pod)
    if url is None or has_ended(pod):
        return None
    return Source(
        name=str(metadata["name"]), uid=str(metadata["uid"]), url=url, ready=is_ready(pod)
    )
