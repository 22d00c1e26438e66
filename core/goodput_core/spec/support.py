"""Checks for features of a valid manifest that this version does not implement."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from goodput_core.errors import SpecError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.spec.llmservice import LLMService

__all__ = ["SHIPPED_PROFILES", "require_servable", "require_supported"]

SHIPPED_PROFILES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "llama-3-70b-4xh100": 4,
        "llama-3-70b-4xh100-pp2": 2,
        "llama-3-8b-h100": 1,
        "llama-3-8b-h200": 1,
        "opt-13b-a100": 1,
        "published-70b-table": 4,
        "unit": 1,
    }
)
"""Tensor parallelism of each device profile that ships with the engine.

The operator does not import the engine, so the values are repeated here; a test compares them with
the profiles."""
_FILE_SUFFIXES: Final = (".yaml", ".yml")


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
    profiles = ", ".join(SHIPPED_PROFILES)
    if model.scheme != "emulated":
        raise UnsupportedError(
            "spec.model.source",
            f"torch execution is not implemented yet, so {model.source} cannot be served; emulate "
            f"a device profile instead: emulated:// followed by one of {profiles}",
        )
    if "/" in model.name or model.name.endswith(_FILE_SUFFIXES):
        return
    expected = SHIPPED_PROFILES.get(model.name)
    if expected is None:
        raise SpecError(
            "spec.model.source",
            f"there is no device profile {model.name}; use one of {profiles}",
        )
    tensor_parallel = service.spec.engine.tensor_parallel
    if tensor_parallel != expected:
        raise SpecError(
            "spec.engine.tensorParallel",
            f"is {tensor_parallel}, but the device profile {model.name} has {expected}; set it to "
            f"{expected} or use another profile",
        )
