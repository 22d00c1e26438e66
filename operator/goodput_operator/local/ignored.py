"""What a manifest says and a service of processes on this machine cannot follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.spec.pod import PodSpec, ResourcesSpec
from goodput_core.spec.workloads import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_core.spec.llmservice import LLMService
    from goodput_core.spec.workloads import RouterSpec

__all__ = ["ignored_here"]

_WEIGHTS = "an emulated device has no weights"
_PODS = "it is for a cluster's pods"


def ignored_here(service: LLMService, *, device: str | None) -> list[str]:
    """One sentence for each field that was written and has no effect here, naming its path.

    Args:
        service: the manifest.
        device: the profile that replaces `model.source`; None: the manifest's own.
    """
    emulated = device is not None or service.spec.model.scheme == "emulated"
    notes = [f"{path} is ignored: {why}" for path, why in _ignored(service, emulated=emulated)]
    routers = service.spec.router.replicas
    if routers > 1:
        notes.append(f"spec.router.replicas is {routers}: one router runs locally")
    return notes


def _ignored(service: LLMService, *, emulated: bool) -> Iterator[tuple[str, str]]:
    spec = service.spec
    if emulated and spec.model.revision is not None:
        yield "spec.model.revision", _WEIGHTS
    weights = _WEIGHTS if emulated else _PODS
    if spec.model.cache is not None:
        yield "spec.model.cache", weights
    if spec.model.token_secret is not None:
        yield "spec.model.tokenSecret", weights
    if spec.model.offline:
        yield "spec.model.offline", weights
    if spec.engine.startup_deadline_seconds != EngineSpec().startup_deadline_seconds:
        yield "spec.engine.startupDeadlineSeconds", "--ready-timeout says how long to wait"
    yield from _of_pods("spec.engine", spec.engine)
    yield from _of_pods("spec.router", spec.router)
    if spec.suspend:
        yield "spec.suspend", "what is not to run is not started"
    if spec.control.prometheus is not None:
        yield "spec.control.prometheus", "no server scrapes these processes"


def _of_pods(path: str, part: EngineSpec | RouterSpec) -> Iterator[tuple[str, str]]:
    if part.image is not None:
        yield f"{path}.image", "processes are of this installation"
    if part.resources != ResourcesSpec():
        yield f"{path}.resources", "processes take what this machine has"
    if part.drain_seconds != type(part)().drain_seconds:
        yield f"{path}.drainSeconds", "--grace says how long to drain"
    if part.pod != PodSpec():
        yield f"{path}.pod", _PODS
