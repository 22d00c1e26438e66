"""Checks for features of a valid manifest that this version does not implement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.errors import InputError, SpecError, UnsupportedError
from goodput_core.spec.profiles import (
    SHIPPED_PROFILES,
    is_profile_path,
    require_shipped,
    require_tensor_parallel,
)

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService

__all__ = ["require_servable", "require_supported"]


def require_supported(service: LLMService) -> None:
    """Reject a manifest with a feature that this version does not implement.

    Raises:
        UnsupportedError: names the field, the feature and the remedy.
    """
    if service.spec.rollout.gate is not None:
        raise UnsupportedError(
            "spec.rollout.gate", "gated rollouts are not implemented yet; remove it"
        )


def require_servable(service: LLMService) -> None:
    """Reject a manifest that no engine can serve without `--device`.

    A profile given as a path is not checked, because only the engine's pod has the file.

    Raises:
        UnsupportedError: a feature is not implemented (see `require_supported`), or the model has
            real weights.
        SpecError: the device profile does not exist, or has another tensor parallelism.
    """
    require_supported(service)
    model = service.spec.model
    if model.scheme != "emulated":
        raise UnsupportedError(
            "spec.model.source",
            f"torch execution is not implemented yet, so {model.source} cannot be served; emulate "
            "a device profile instead: emulated:// followed by one of "
            f"{', '.join(SHIPPED_PROFILES)}",
        )
    if is_profile_path(model.name):
        return
    try:
        require_shipped(model.name)
    except InputError as error:
        raise SpecError("spec.model.source", str(error)) from error
    require_tensor_parallel(
        service.spec.engine.tensor_parallel,
        profile=model.name,
        expected=SHIPPED_PROFILES[model.name],
    )
