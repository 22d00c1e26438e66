"""From a configuration to an engine core: where names become objects and bounds are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.errors import InputError
from goodput_core.spec.choices import BudgetLaw, Preemption
from goodput_engine.core.engine_core import EngineCore
from goodput_engine.executor.emulated import EmulatedExecutor
from goodput_engine.kv.blocks import BlockPool, HostPool
from goodput_engine.scheduler.policies.registry import build_policy
from goodput_engine.scheduler.policies.sjf import SjfPolicy
from goodput_engine.scheduler.policy import PolicySettings, SchedulerLimits
from goodput_engine.scheduler.prediction import KnownLengths
from goodput_engine.scheduler.prefill_budget import PrefillBudget
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.device.profile import DeviceProfile
    from goodput_engine.messages import Configure
    from goodput_engine.scheduler.plan import StepOutcome

__all__ = ["build_core"]


def build_core(
    config: Configure,
    profile: DeviceProfile,
    *,
    on_step: Callable[[StepOutcome], None] | None = None,
    oracle: Callable[[int], int] | None = None,
) -> EngineCore:
    """A core on an emulated device.

    Args:
        config: what to run; its `device` was loaded as `profile`.
        profile: the device.
        on_step: told of every step when it is done.
        oracle: the true output tokens by rid, for a bound in virtual time: whatever the policy
            that the configuration names, the shortest job goes first by them.

    Raises:
        InputError: a value that cannot be, or a name that this version does not have.
    """
    if config.preemption not in set(Preemption):
        known = ", ".join(Preemption)
        raise InputError(f"preemption {config.preemption!r} is not one of {known}")
    preemption = Preemption(config.preemption)
    low, high = config.min_token_budget, config.max_token_budget
    _within("token budget", config.token_budget, low, high)
    _within("minimum token budget", low, 1, high)
    _within("number of sequences", config.max_num_seqs, 1, None)
    _within("number of waiting requests", config.max_waiting, 0, None)
    if config.batch_timeout_ns is not None:
        _within("batch timeout", config.batch_timeout_ns, 0, None)
    if config.ageing_ns is not None:
        _within("ageing", config.ageing_ns, 1, None)
    depth = profile.default_depth if config.depth is None else config.depth
    _within("depth", depth, 0, 2)
    policy = build_policy(
        config.policy,
        PolicySettings(batch_timeout_ns=config.batch_timeout_ns, ageing_ns=config.ageing_ns),
    )
    if oracle is not None:
        policy = SjfPolicy(predictor=KnownLengths(oracle), ageing_ns=config.ageing_ns)
    prefill_budget = None
    if config.budget_law is not None and policy.uses_prefill_budget:
        prefill_budget = PrefillBudget(_budget_law(config.budget_law), min_tokens=low)
    scheduler = Scheduler(
        policy=policy,
        kv=BlockPool(total_blocks=profile.kv_blocks, block_size=profile.block_size),
        limits=SchedulerLimits(
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            max_waiting=config.max_waiting,
        ),
        max_model_tokens=profile.max_model_tokens,
        depth=depth,
        host=_host_memory(config.swap_space_bytes, preemption, profile),
        preemption=preemption,
        prefill_budget=prefill_budget,
    )
    executor = EmulatedExecutor(profile)
    return EngineCore(
        scheduler=scheduler,
        executor=executor,
        ahead=executor,
        min_token_budget=low,
        max_token_budget=high,
        on_step=on_step,
    )


def _host_memory(size: int, preemption: Preemption, profile: DeviceProfile) -> HostPool:
    """Room for copies: as many whole blocks as the budget holds, where copies are wanted."""
    _within("swap space", size, 0, None)
    blocks = size // (profile.block_size * profile.kv_bytes_per_token)
    return HostPool(
        total_blocks=0 if preemption is Preemption.RECOMPUTE else blocks,
        ns_per_block=profile.swap_ns_per_block,
    )


def _budget_law(name: str) -> BudgetLaw:
    if name not in set(BudgetLaw):
        raise InputError(f"token budget law {name!r} is not one of {', '.join(BudgetLaw)}")
    return BudgetLaw(name)


def _within(what: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise InputError(f"the {what} must be {bounds}, not {value}")
