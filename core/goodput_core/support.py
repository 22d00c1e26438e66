"""What this version can run of what a manifest can ask for.

A manifest that asks for more is refused by name, never given something else in its place. The
sets grow with the code that backs them; a test holds them against the engine's registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_core.errors import NotBuiltError
from goodput_core.spec.llmservice import ControlMode, Policy, Preemption, RouterPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_core.spec.llmservice import LLMService

__all__ = [
    "BUILT_CONTROL_MODES",
    "BUILT_POLICIES",
    "BUILT_PREEMPTIONS",
    "BUILT_ROUTER_POLICIES",
    "require_built",
]

BUILT_POLICIES: Final = frozenset(Policy)
BUILT_PREEMPTIONS: Final = frozenset(Preemption)
BUILT_ROUTER_POLICIES: Final = frozenset(RouterPolicy)
BUILT_CONTROL_MODES: Final = frozenset(ControlMode)


def require_built(
    service: LLMService, *, control_modes: frozenset[ControlMode] = BUILT_CONTROL_MODES
) -> None:
    """Refuse a manifest that asks for what this version does not have.

    Args:
        service: the manifest.
        control_modes: those that the caller honours. `BUILT_CONTROL_MODES` are those of a whole
            local service; an engine alone does its part of every mode, the budget's inner loop,
            whoever does the rest.

    Raises:
        NotBuiltError: the field, what it asks for, and what may stand there today.
    """
    spec = service.spec
    _one_of("spec.engine.policy", spec.engine.policy, BUILT_POLICIES)
    _one_of("spec.engine.preemption", spec.engine.preemption, BUILT_PREEMPTIONS)
    _one_of("spec.router.policy", spec.router.policy, BUILT_ROUTER_POLICIES)
    _one_of("spec.control.mode", spec.control.mode, control_modes)
    if spec.rollout.gate is not None:
        raise NotBuiltError("spec.rollout.gate", "gated rollouts are not built yet; remove it")


def _one_of(path: str, asked: str, built: Iterable[str]) -> None:
    if asked not in built:
        names = ", ".join(sorted(built))
        raise NotBuiltError(path, f"{asked} is not built yet; this version has {names}")
