"""What a manifest says to the service's law, and nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec

__all__ = ["ServiceParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParams:
    """The bounds within which the law decides.

    Args:
        mode: whether it acts, advises or is silent.
        classes: the promises.
        replicas: set by a human or another autoscaler: the law only recommends; None: not set.
        min_replicas, max_replicas: floor and ceiling.
        min_tokens, max_tokens, initial_tokens: of the token budget.
        max_num_seqs: the batch width at the start, and its ceiling.
        stabilization_ns: for how long fewer replicas must suffice before one is taken away.
        default_startup_ns: how long a replica takes to start, before any start was measured.
    """

    mode: ControlMode
    classes: tuple[SLOClass, ...]
    replicas: int | None = None
    min_replicas: int = 1
    max_replicas: int = 8
    min_tokens: int = 256
    max_tokens: int = 8192
    initial_tokens: int = 2048
    max_num_seqs: int = 256
    stabilization_ns: int = 300 * NS_PER_S
    default_startup_ns: int = 120 * NS_PER_S

    @classmethod
    def of(cls, spec: LLMServiceSpec) -> ServiceParams:
        """What a manifest says."""
        budget = spec.engine.token_budget
        return cls(
            mode=spec.control.mode,
            classes=tuple(spec.slo.by_name().values()),
            replicas=spec.replicas,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            min_tokens=budget.min,
            max_tokens=budget.max,
            initial_tokens=budget.initial,
            max_num_seqs=spec.engine.max_num_seqs,
            stabilization_ns=spec.control.scale_down_stabilization_seconds * NS_PER_S,
        )

    @property
    def initial_replicas(self) -> int:
        """Replicas where the law does not act."""
        return self.min_replicas if self.replicas is None else self.replicas

    @property
    def tightest_tpot_ns(self) -> int:
        """The smallest time per token that was promised to anybody."""
        return min(c.tpot_ms for c in self.classes) * NS_PER_MS
