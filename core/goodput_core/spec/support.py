"""Features of a valid manifest that this version does not run: refused, never substituted."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from goodput_core.errors import NotBuiltError, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.spec.llmservice import LLMService

__all__ = ["SHIPPED_PROFILES", "require_built", "require_served"]

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
"""Tensor parallelism of each device profile in the engine's package, which the operator does not
import; a test compares the two."""
_FILE_SUFFIXES: Final = (".yaml", ".yml")


def require_built(service: LLMService) -> None:
    """Refuse a manifest with a feature that this version does not have.

    Raises:
        NotBuiltError: names the field, the feature and the remedy.
    """
    if service.spec.rollout.gate is not None:
        raise NotBuiltError("spec.rollout.gate", "gated rollouts are not built yet; remove it")


def require_served(service: LLMService) -> None:
    """Refuse a manifest that no engine can serve without `--device`.

    A profile named by a path is not checked: only the engine's pod has the file.

    Raises:
        NotBuiltError: as `require_built`, and for a model that would have to be executed.
        SpecError: the device profile does not exist, or has another tensor parallelism.
    """
    require_built(service)
    model = service.spec.model
    profiles = ", ".join(SHIPPED_PROFILES)
    if model.scheme != "emulated":
        raise NotBuiltError(
            "spec.model.source",
            f"torch execution is not built yet, so {model.source} cannot be served; emulate a "
            f"device profile, emulated:// and one of {profiles}",
        )
    if "/" in model.name or model.name.endswith(_FILE_SUFFIXES):
        return
    expected = SHIPPED_PROFILES.get(model.name)
    if expected is None:
        raise SpecError(
            "spec.model.source",
            f"there is no device profile {model.name}; use one of {profiles}",
        )
    wanted = service.spec.engine.tensor_parallel
    if wanted != expected:
        raise SpecError(
            "spec.engine.tensorParallel",
            f"is {wanted}, but the device profile {model.name} has {expected}; set it to "
            f"{expected} or use another profile",
        )
