"""What can be chosen, and what came of one choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.spec.llmservice import LLMServiceSpec

__all__ = ["Candidate", "ClassResult", "Evaluation", "grid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A manifest with some of its fields set anew.

    Args:
        policy: `spec.engine.policy`.
        token_budget: `spec.engine.tokenBudget.initial`.
        replicas: `spec.replicas`; 0: the topology says how many.
        preemption: `spec.engine.preemption`.
        placement: `spec.router.policy`.
        topology: a topology file; empty: none.
    """

    policy: Policy
    token_budget: int
    replicas: int
    preemption: Preemption
    placement: RouterPolicy
    topology: str = ""

    def applied(self, spec: LLMServiceSpec) -> LLMServiceSpec:
        """The manifest with these fields.

        The control law would move two of them: it is off, as in a manifest with `Manual`.
        """
        budget = spec.engine.token_budget
        engine = replace(
            spec.engine,
            policy=self.policy,
            preemption=self.preemption,
            token_budget=replace(
                budget,
                initial=self.token_budget,
                min=min(budget.min, self.token_budget),
                max=max(budget.max, self.token_budget),
            ),
        )
        return replace(
            spec,
            engine=engine,
            replicas=self.replicas or 1,
            router=replace(spec.router, policy=self.placement),
            control=replace(spec.control, mode=ControlMode.MANUAL),
        )


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
    *,
    policies: Sequence[Policy],
    budgets: Sequence[int],
    preemptions: Sequence[Preemption],
    replicas: Sequence[int],
    placements: Sequence[RouterPolicy],
    pools: Sequence[str] = (),
    migrations: Sequence[str] = (),
) -> tuple[Candidate, ...]:
    """Every combination.

    A router with one replica has nothing to choose: there only the first placement is tried.

    Args:
        policies: values of `Candidate.policy`.
        budgets: of its token budget.
        preemptions: of its preemption.
        replicas: of its replicas.
        placements: of its placement.
        pools: topology files with two pools, which say themselves how many replicas there are.
        migrations: topology files in which the replicas give each other requests.
    """
    fleets = [
        (count, placement, topology)
        for topology in ("", *migrations)
        for count in replicas
        for placement in (placements if count > 1 else placements[:1])
    ]
    fleets += [(0, placement, topology) for topology in pools for placement in placements]
    return tuple(
        Candidate(
            policy=policy,
            token_budget=budget,
            preemption=preemption,
            replicas=count,
            placement=placement,
            topology=topology,
        )
        for policy, budget, preemption, (count, placement, topology) in product(
            policies, budgets, preemptions, fleets
        )
    )
