"""From a policy's name in a manifest to the object; refuses by name what is not built."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_core.spec.llmservice import Policy
from goodput_engine.scheduler.policies.dynamic import DynamicPolicy
from goodput_engine.scheduler.policies.orca import OrcaPolicy
from goodput_engine.scheduler.policies.priority import PriorityPolicy
from goodput_engine.scheduler.policies.request import RequestPolicy
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.policies.sjf import SjfPolicy
from goodput_engine.scheduler.policies.slo import SloPolicy
from goodput_engine.scheduler.policies.splitfuse import SplitFusePolicy
from goodput_engine.scheduler.policies.static import StaticPolicy
from goodput_engine.scheduler.policies.vllm import VllmPolicy
from goodput_engine.scheduler.settings import PolicySettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_engine.scheduler.policy import SchedulingPolicy

__all__ = ["POLICIES", "build_policy"]

POLICIES: Final[Mapping[Policy, type[SchedulingPolicy]]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            RequestPolicy,
            StaticPolicy,
            DynamicPolicy,
            OrcaPolicy,
            VllmPolicy,
            SarathiPolicy,
            SplitFusePolicy,
            SjfPolicy,
            PriorityPolicy,
            SloPolicy,
        )
    }
)

_DEFAULTS: Final = PolicySettings()


def build_policy(name: str, settings: PolicySettings = _DEFAULTS) -> SchedulingPolicy:
    """A fresh policy object for one scheduler.

    Args:
        name: a name of the manifest's.
        settings: what the manifest says beside it.

    Raises:
        InputError: no such policy, or none that this version has.
    """
    for policy, kind in POLICIES.items():
        if policy == name:
            return kind.configured(settings)
    built = ", ".join(sorted(POLICIES))
    known = name in {policy.value for policy in Policy}
    problem = "is not built yet" if known else "is not a policy"
    raise InputError(f"policy {name!r} {problem}; this version has {built}")
