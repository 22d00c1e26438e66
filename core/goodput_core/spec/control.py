"""`spec.control`: how the control laws are used, and what they measure with."""

from __future__ import annotations

from dataclasses import dataclass

from goodput_core.spec.choices import ControlMode
from goodput_core.spec.fields import spec_field

__all__ = ["ControlSpec", "PrometheusSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSpec:
    """A Prometheus server that scrapes the service's routers."""

    url: str = spec_field(
        "The server's base URL, to which /api/v1/query is added.",
        max_length=512,
        pattern=r"^https?://[^\x00-\x20\x7f]+$",
        pattern_hint="begin with http:// or https:// and name a server",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpec:
    """How the control laws are used."""

    mode: ControlMode = spec_field(
        "Auto applies decisions, Recommend records them, Manual computes none.",
        default=ControlMode.AUTO,
    )
    interval_seconds: int = spec_field(
        "Seconds between decisions of the outer loop.", default=10, minimum=1, maximum=3600
    )
    scale_down_stabilization_seconds: int = spec_field(
        "Seconds for which fewer replicas must suffice before one is taken away.",
        default=300,
        minimum=0,
        maximum=86_400,
    )
    prometheus: PrometheusSpec | None = spec_field(
        "Read the routers' counters from this Prometheus server; absent, the routers are asked "
        "directly, as engines always are. Ignored outside a cluster.",
        default=None,
    )
