"""What a manifest can ask for and this version cannot run.

A manifest that asks for more is refused by name, never given something else in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.errors import NotBuiltError

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService

__all__ = ["require_built"]


def require_built(service: LLMService) -> None:
    """Refuse a manifest that asks for what this version does not have.

    Raises:
        NotBuiltError: the field, what it asks for, and what may stand there today.
    """
    if service.spec.rollout.gate is not None:
        raise NotBuiltError("spec.rollout.gate", "gated rollouts are not built yet; remove it")
