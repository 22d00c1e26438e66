"""What can be chosen, and what came of one choice."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from goodput_core.spec.choices import Policy, Preemption
from goodput_core.verdict import VerdictKind

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Candidate", "ClassResult", "Evaluation", "grid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A manifest with some of its fields set anew.

    Args:
        policy: `spec.engine.policy`.
        token_budget: `spec.engine.tokenBudget.initial`.
        replicas: `spec.replicas`.
        preemption: `spec.engine.preemption`.
        topology: a topology file in place of the replicas; empty: none.
    """

    policy: Policy
    token_budget: int
    replicas: int
    preemption: Preemption
    topology: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """What became of one class.

    Args:
        name: its name.
        objective: as promised, a share; None: none.
        good, total: requests that kept their promise, of those judged.
        low, high: bounds of the share; None: nothing was judged.
        verdict: PASS, FAIL or INCONCLUSIVE; empty: it has no objective, or nothing was judged.
        ttft_p99_ms, tpot_p99_ms, tbt_p99_ms: of its answers; None: it had none.
    """

    name: str
    objective: float | None
    good: int
    total: int
    low: float | None
    high: float | None
    verdict: str
    ttft_p99_ms: float | None
    tpot_p99_ms: float | None
    tbt_p99_ms: float | None

    @property
    def share(self) -> float | None:
        """Attainment; None: nothing was judged."""
        return self.good / self.total if self.total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One candidate on one trace.

    Args:
        candidate: it.
        classes: in the manifest's order.
        verdict: on all of them.
        reason: its stable reason.
        requests: all of them.
        goodput_per_s: requests per second that kept their promise.
        device_hours: of all devices of all replicas, start-up included.
        preemptions, recomputed_tokens, swapped_tokens, shed: as counted.
        illustrative: the device's figures fit no device one can buy.
    """

    candidate: Candidate
    classes: tuple[ClassResult, ...]
    verdict: VerdictKind
    reason: str
    requests: int
    goodput_per_s: float
    device_hours: float
    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int
    shed: int
    illustrative: bool


def grid(
    policies: Iterable[Policy],
    budgets: Iterable[int],
    replicas: Iterable[int],
    preemptions: Iterable[Preemption],
    topologies: Iterable[str],
) -> tuple[Candidate, ...]:
    """Every combination; a topology says itself how many replicas there are."""
    budgets, preemptions, policies = tuple(budgets), tuple(preemptions), tuple(policies)
    flat = (
        Candidate(policy=p, token_budget=b, replicas=r, preemption=m)
        for p, b, r, m in product(policies, budgets, replicas, preemptions)
    )
    shaped = (
        Candidate(policy=p, token_budget=b, replicas=0, preemption=m, topology=t)
        for p, b, m, t in product(policies, budgets, preemptions, topologies)
    )
    return (*flat, *shaped)
