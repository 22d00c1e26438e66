"""Choice of the device profile that a replica emulates, and the facts published about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from goodput_core.errors import InputError, SpecError, UnsupportedError
from goodput_core.spec.profiles import block_problem, memory_problem, require_tensor_parallel
from goodput_engine.device.load import list_profiles, load_profile

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_core.spec.workloads import EngineSpec
    from goodput_engine.device.profile import DeviceProfile

__all__ = ["budget_problem", "choose_device", "device_facts", "model_facts", "require_memory"]


def choose_device(
    spec: LLMServiceSpec, *, device: str | None, source: str
) -> tuple[str, DeviceProfile]:
    """Return the profile named by `--device` or, without it, by `spec.model.source`.

    Args:
        spec: the service.
        device: the value of `--device`; None if it was not given.
        source: the manifest's path, for error messages.

    Returns:
        The name or path, and the profile.

    Raises:
        UnsupportedError: `spec.model.source` is no device profile and `--device` is not given.
        InputError: the profile of `--device` is unknown or invalid.
        SpecError: the profile of `spec.model.source` is unknown or invalid, its tensor parallelism
            differs from `spec.engine.tensorParallel`, or the smallest token budget is less than one
            of its KV blocks.
    """
    model = spec.model
    if device is None and model.scheme != "emulated":
        raise UnsupportedError(
            "spec.model.source",
            f"{model.source} is a real model, not a device profile; emulate a device with "
            f"--device, one of {', '.join(list_profiles())}",
            source,
        )
    name = model.name if device is None else device
    try:
        profile = load_profile(name)
    except InputError as error:
        if device is None:
            raise SpecError("spec.model.source", f"{error}", source) from error
        raise InputError(f"--device: {error}") from error
    try:
        require_tensor_parallel(
            spec.engine.tensor_parallel, profile=profile.name, expected=profile.tensor_parallel
        )
    except SpecError as error:
        raise error.at(source) from error
    problem = budget_problem(spec.engine.token_budget.min, profile)
    if problem is not None:
        raise SpecError("spec.engine.tokenBudget.min", problem, source)
    return name, profile


def budget_problem(tokens: int, profile: DeviceProfile) -> str | None:
    """Return the error of a token budget that is too small for a device; None if it is valid."""
    return block_problem(
        tokens, block_size=profile.block_size, device=f"the device profile {profile.name}"
    )


def require_memory(engine: EngineSpec, *, name: str, profile: DeviceProfile) -> None:
    """Reject a device whose KV memory holds no request that a server must expect.

    A replay knows its requests, and compares them with the device instead.

    Args:
        engine: `spec.engine` of the manifest.
        name: name or path of the profile.
        profile: the profile.

    Raises:
        InputError: names the profile and the remedy.
    """
    problem = memory_problem(
        kv_blocks=profile.kv_blocks,
        block_size=profile.block_size,
        context_tokens=profile.max_model_tokens,
        min_budget=engine.token_budget.min,
    )
    if problem is not None:
        raise InputError(
            f"{name}: {problem}; raise kv_blocks of the device profile, or lower max_model_tokens"
        )


def device_facts(profile: DeviceProfile) -> dict[str, Any]:
    """Return the device facts of `GET /control/state`; they suffice to predict a step's time."""
    return {
        "name": profile.name,
        "illustrative": profile.illustrative,
        "tensor_parallel": profile.tensor_parallel,
        "pipeline_parallel": profile.pipeline_parallel,
        "step_time": {"form": profile.form_name, **msgspec.to_builtins(profile.form)},
        "overlap": profile.overlap,
        "host_ns_per_step": profile.host_ns_per_step,
        "host_ns_per_request": profile.host_ns_per_request,
        "startup_seconds": profile.startup_seconds,
    }


def model_facts(name: str) -> dict[str, Any]:
    """Return the facts of a real model that are known before it is loaded."""
    return {
        "name": name,
        "illustrative": False,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
    }
