"""From the `engine` part of a manifest to what a core is told: one place for every world.

What a running core follows is what makes no new revision in a cluster: `tokenBudget`, and the
control mode. Everything else of it starts a new process there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.spec.choices import ControlMode
from goodput_core.units import BYTES_PER_GIB, NS_PER_S
from goodput_engine.messages import Configure, FollowManifest

if TYPE_CHECKING:
    from goodput_core.spec.workloads import EngineSpec

__all__ = ["configuration", "followed_by_core"]


def configuration(
    engine: EngineSpec, *, mode: ControlMode, device: str, step_log: str | None = None
) -> Configure:
    """What a replica of this service runs.

    Args:
        engine: the manifest's `spec.engine`.
        mode: the manifest's `spec.control.mode`: only `Auto` sizes steps by a law.
        device: the device profile's name or path.
        step_log: a file to write the step log to, absolute; None: none.
    """
    may_change = followed_by_core(engine, mode=mode)
    return Configure(
        device=device,
        policy=engine.policy,
        preemption=engine.preemption,
        token_budget=engine.token_budget.initial,
        min_token_budget=may_change.min_token_budget,
        max_token_budget=may_change.max_token_budget,
        budget_law=may_change.budget_law,
        max_num_seqs=engine.max_num_seqs,
        max_waiting=engine.max_waiting,
        batch_timeout_ns=engine.batch_timeout_ns,
        ageing_ns=engine.ageing_seconds * NS_PER_S,
        swap_space_bytes=engine.swap_space_gib * BYTES_PER_GIB,
        step_log=step_log,
    )


def followed_by_core(engine: EngineSpec, *, mode: ControlMode) -> FollowManifest:
    """What a core that runs already takes over of a manifest; arguments as of `configuration`."""
    budget = engine.token_budget
    return FollowManifest(
        min_token_budget=budget.min,
        max_token_budget=budget.max,
        budget_law=budget.law if mode is ControlMode.AUTO else None,
    )
