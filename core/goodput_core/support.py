"""What a manifest can ask for and this version cannot run.

A manifest that asks for more is refused by name, never given something else in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.errors import NotBuiltError

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService

__all__ = ["require_built", "require_served"]


def require_built(service: LLMService) -> None:
    """Refuse a manifest that asks for what this version does not have.

    Raises:
        NotBuiltError: the field, what it asks for, and what may stand there today.
    """
    if service.spec.rollout.gate is not None:
        raise NotBuiltError("spec.rollout.gate", "gated rollouts are not built yet; remove it")


def require_served(service: LLMService) -> None:
    """Refuse a manifest that no engine can serve as it stands.

    For whoever starts engines and cannot tell them to emulate a device in the model's place; where
    a command line can, whoever runs the engine knows which devices there are.

    Raises:
        NotBuiltError: as of `require_built`, and for a model that would have to be executed.
    """
    require_built(service)
    model = service.spec.model
    if model.scheme != "emulated":
        raise NotBuiltError(
            "spec.model.source",
            f"torch execution is not built yet, so {model.source} cannot be served; name a device "
            "profile to emulate, such as emulated://unit",
        )
