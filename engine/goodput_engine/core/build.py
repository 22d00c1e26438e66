"""Build an engine core: a configuration from a manifest, and a core from the configuration.

This module resolves names and checks bounds, for real and for virtual time. A running core adopts
only those changes of the manifest that create no new revision in a cluster: `tokenBudget` and the
control mode. Any other change needs a new process.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeVar

from goodput_core.errors import InputError, UsageError, install_hint
from goodput_core.spec.choices import BudgetLaw, ControlMode, LateRequests, Preemption
from goodput_core.units import BYTES_PER_GIB
from goodput_engine.core.engine_core import EngineCore
from goodput_engine.executor.emulated import EmulatedExecutor
from goodput_engine.kv.blocks import BlockPool, HostPool
from goodput_engine.messages import Configure, FollowManifest
from goodput_engine.scheduler.policies.registry import build_policy
from goodput_engine.scheduler.policy import PolicySettings, SchedulerLimits
from goodput_engine.scheduler.prefill_budget import PrefillBudget
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_core.spec.workloads import EngineSpec
    from goodput_engine.device.profile import DeviceProfile
    from goodput_engine.executor.base import LoadedModel
    from goodput_engine.messages import ModelFolder
    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.policy import SchedulingPolicy

__all__ = ["build_core", "build_model_core", "configuration", "followed_by_core", "load_model"]

C = TypeVar("C", bound=StrEnum)

# Only this package imports torch.
_START_UP: Final = "goodput_engine.executor.torch.start_up"


def build_core(
    config: Configure,
    profile: DeviceProfile,
    *,
    on_step: Callable[[StepOutcome], None] | None = None,
    policy: SchedulingPolicy | None = None,
) -> EngineCore:
    """Build a core on an emulated device.

    Args:
        config: the configuration.
        profile: the profile that `config.device` names.
        on_step: called with the outcome of every step.
        policy: a new policy to run instead of the configured one, such as one that no manifest can
            name; None for the configured one.

    Raises:
        InputError: a value is out of bounds, or a name is unknown.
    """
    executor = EmulatedExecutor(profile)
    scheduler = _build_scheduler(
        config,
        policy,
        kv=BlockPool(total_blocks=profile.kv_blocks, block_size=profile.block_size),
        host=_host_memory(config, profile),
        max_model_tokens=profile.max_model_tokens,
        default_depth=executor.default_depth,
    )
    return EngineCore(
        scheduler=scheduler,
        executor=executor,
        ahead=executor,
        min_token_budget=config.min_token_budget,
        max_token_budget=config.max_token_budget,
        on_step=on_step,
    )


def load_model(
    config: Configure,
    settings: ModelFolder,
    *,
    on_warm_up: Callable[[int], None] | None = None,
) -> LoadedModel:
    """Load the model of a configuration, which takes seconds to minutes.

    Args:
        config: the configuration.
        settings: its model.
        on_warm_up: called before the first step and after each part of the warm-up, with the time
            of the loading in nanoseconds.

    Raises:
        InputError: the model cannot be served.
        UsageError: torch is not installed.
    """
    try:
        start_up = import_module(_START_UP)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"serving {settings.path} needs the package {error.name!r}; {install_hint('torch')}"
        ) from error
    with_swap = config.preemption != Preemption.RECOMPUTE
    loaded: LoadedModel = start_up.start_model(
        config, settings, with_swap=with_swap, on_warm_up=on_warm_up
    )
    return loaded


def build_model_core(
    config: Configure,
    model: LoadedModel,
    *,
    on_step: Callable[[StepOutcome], None] | None = None,
) -> EngineCore:
    """Build a core on a real model; for arguments and errors, see `build_core`."""
    scheduler = _build_scheduler(
        config,
        None,
        kv=BlockPool(total_blocks=model.kv_blocks, block_size=model.block_size),
        host=HostPool(total_blocks=model.host_blocks, ns_per_block=model.swap_ns_per_block),
        max_model_tokens=model.max_model_tokens,
        default_depth=model.executor.default_depth,
    )
    return EngineCore(
        scheduler=scheduler,
        executor=model.executor,
        min_token_budget=config.min_token_budget,
        max_token_budget=config.max_token_budget,
        on_step=on_step,
    )


def _build_scheduler(
    config: Configure,
    policy: SchedulingPolicy | None,
    *,
    kv: BlockPool,
    host: HostPool,
    max_model_tokens: int,
    default_depth: int,
) -> Scheduler:
    """Return the scheduler of a configuration on a device with this memory."""
    low, high = config.min_token_budget, config.max_token_budget
    _require_within("token budget", config.token_budget, low, high)
    _require_within("minimum token budget", low, 1, high)
    _require_within("number of sequences", config.max_num_seqs, 1, None)
    _require_within("number of waiting requests", config.max_waiting, 0, None)
    if config.batch_timeout_ns is not None:
        _require_within("batch timeout", config.batch_timeout_ns, 0, None)
    if config.ageing_ns is not None:
        _require_within("ageing", config.ageing_ns, 1, None)
    if config.prefill_chunk_tokens is not None:
        _require_within("prefill chunk", config.prefill_chunk_tokens, 1, None)
    depth = default_depth if config.depth is None else config.depth
    _require_within("depth", depth, 0, 2)
    if policy is None:
        settings = PolicySettings(
            batch_timeout_ns=config.batch_timeout_ns, ageing_ns=config.ageing_ns
        )
        policy = build_policy(config.policy, settings)
    prefill_budget = None
    if config.budget_law is not None and policy.uses_prefill_budget:
        law = _choose(BudgetLaw, "token budget law", config.budget_law)
        prefill_budget = PrefillBudget(law, min_tokens=low)
    return Scheduler(
        policy=policy,
        kv=kv,
        limits=SchedulerLimits(
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            max_waiting=config.max_waiting,
        ),
        max_model_tokens=max_model_tokens,
        depth=depth,
        host=host,
        preemption=_choose(Preemption, "preemption", config.preemption),
        prefill_budget=prefill_budget,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        late_requests=_choose(LateRequests, "treatment of late requests", config.late_requests),
    )


def configuration(
    engine: EngineSpec,
    *,
    mode: ControlMode,
    device: str,
    model: ModelFolder | None = None,
    step_log: str | None = None,
) -> Configure:
    """Return the configuration of a replica of a service.

    Args:
        engine: `spec.engine` of the manifest.
        mode: `spec.control.mode` of the manifest; only `Auto` uses a token-budget law.
        device: name or path of the device profile; not used if a model is computed.
        model: the model to compute; None to emulate `device`.
        step_log: absolute path of a step log to write; None to write none.
    """
    manifest_fields = followed_by_core(engine, mode=mode)
    return Configure(
        device=device,
        policy=engine.policy,
        preemption=engine.preemption,
        token_budget=engine.token_budget.initial,
        min_token_budget=manifest_fields.min_token_budget,
        max_token_budget=manifest_fields.max_token_budget,
        budget_law=manifest_fields.budget_law,
        max_num_seqs=engine.max_num_seqs,
        max_waiting=engine.max_waiting,
        batch_timeout_ns=engine.batch_timeout_ns,
        ageing_ns=engine.ageing_ns,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        late_requests=engine.late_requests,
        swap_space_bytes=engine.swap_space_gib * BYTES_PER_GIB,
        step_log=step_log,
        model=model,
    )


def followed_by_core(engine: EngineSpec, *, mode: ControlMode) -> FollowManifest:
    """Return the part of a manifest that a running core adopts.

    For the arguments, see `configuration`.
    """
    budget = engine.token_budget
    return FollowManifest(
        min_token_budget=budget.min,
        max_token_budget=budget.max,
        budget_law=budget.law if mode is ControlMode.AUTO else None,
    )


def _host_memory(config: Configure, profile: DeviceProfile) -> HostPool:
    """Return the pool of host blocks, as many as fit into the swap space."""
    _require_within("swap space", config.swap_space_bytes, 0, None)
    blocks = config.swap_space_bytes // (profile.block_size * profile.kv_bytes_per_token)
    return HostPool(
        total_blocks=0 if config.preemption == Preemption.RECOMPUTE else blocks,
        ns_per_block=profile.swap_ns_per_block,
    )


def _choose(kind: type[C], title: str, name: str) -> C:
    """Return the member of an enum with this name."""
    try:
        return kind(name)
    except ValueError as error:
        raise InputError(f"{title} {name!r} is not one of {', '.join(kind)}") from error


def _require_within(title: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise InputError(f"the {title} must be {bounds}, not {value}")
