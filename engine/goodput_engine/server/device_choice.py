"""Which device profile a replica emulates, and what it publishes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from goodput_core.errors import InputError, NotBuiltError, SpecError
from goodput_engine.device.load import list_profiles, load_profile

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_engine.device.profile import DeviceProfile

__all__ = ["choose_device", "device_facts"]


def choose_device(
    spec: LLMServiceSpec, *, asked: str | None, source: str
) -> tuple[str, DeviceProfile]:
    """The profile that `--device` or `spec.model.source` names.

    Args:
        spec: the service.
        asked: `--device`; None: not given.
        source: the manifest's file, for errors.

    Returns:
        Its name or path, and the profile.

    Raises:
        NotBuiltError: real weights, and no `--device`.
        InputError: no such profile, or one that cannot be used.
        SpecError: the profile is of another number of devices than `tensorParallel`.
    """
    model = spec.model
    if asked is None and model.scheme != "emulated":
        raise NotBuiltError(
            "spec.model.source",
            f"torch execution is not built yet, so {model.source} cannot be served; emulate a "
            f"device with --device, one of {', '.join(list_profiles())}",
            source,
        )
    name = model.name if asked is None else asked
    try:
        profile = load_profile(name)
    except InputError as error:
        if asked is None:
            raise SpecError("spec.model.source", f"{error}", source) from error
        raise InputError(f"--device: {error}") from error
    wanted = spec.engine.tensor_parallel
    if profile.tensor_parallel != wanted:
        raise SpecError(
            "spec.engine.tensorParallel",
            f"is {wanted}, but the device profile {profile.name} stands for "
            f"{profile.tensor_parallel}; write that number or choose another profile",
            source,
        )
    return name, profile


def device_facts(profile: DeviceProfile) -> dict[str, Any]:
    """What `GET /control/state` says of the device: enough to predict a step."""
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
