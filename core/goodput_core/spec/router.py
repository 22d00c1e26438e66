"""`spec.router`: how requests are spread over replicas, and the pods that spread them."""

from __future__ import annotations

from dataclasses import dataclass

from goodput_core.spec.choices import RouterPolicy
from goodput_core.spec.fields import spec_field
from goodput_core.spec.pod import PodSpec
from goodput_core.spec.resources import ResourcesSpec

__all__ = ["RouterSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How requests are spread over replicas."""

    policy: RouterPolicy = spec_field(
        "Placement of requests.", default=RouterPolicy.PREFIX_AFFINITY
    )
    replicas: int = spec_field(
        "Router pods; a local service runs one.", default=2, minimum=1, maximum=64
    )
    image: str | None = spec_field(
        "Container image; the operator's own release when absent. Ignored outside a cluster.",
        default=None,
        min_length=1,
        max_length=512,
    )
    resources: ResourcesSpec = spec_field(
        "Compute resources; ignored outside a cluster.", factory=ResourcesSpec
    )
    drain_seconds: int = spec_field(
        "How long a router that stops lets its open streams finish; no less than the engines' own. "
        "Ignored outside a cluster.",
        default=30,
        minimum=0,
        maximum=86_400,
    )
    pod: PodSpec = spec_field(
        "What is passed through to the routers' pods; ignored outside a cluster.", factory=PodSpec
    )
