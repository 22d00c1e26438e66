"""The policies by their names in a manifest."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_engine.scheduler.policies.dynamic import DynamicPolicy
from goodput_engine.scheduler.policies.fastserve import FastServePolicy
from goodput_engine.scheduler.policies.orca import OrcaPolicy
from goodput_engine.scheduler.policies.priority import PriorityPolicy
from goodput_engine.scheduler.policies.request import RequestPolicy
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.policies.sjf import SjfPolicy
from goodput_engine.scheduler.policies.slo.policy import SloPolicy
from goodput_engine.scheduler.policies.splitfuse import SplitFusePolicy
from goodput_engine.scheduler.policies.static import StaticPolicy
from goodput_engine.scheduler.policies.vllm import VllmPolicy
from goodput_engine.scheduler.policy import PolicySettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_engine.scheduler.policy import SchedulingPolicy

__all__ = ["POLICIES", "build_policy"]

POLICIES: Final[Mapping[str, type[SchedulingPolicy]]] = MappingProxyType(
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
            FastServePolicy,
            SloPolicy,
        )
    }
)

_DEFAULTS: Final = PolicySettings()


def build_policy(name: str, settings: PolicySettings = _DEFAULTS) -> SchedulingPolicy:
    """Build the policy of one scheduler.

    Args:
        name: name of the policy in a manifest.
        settings: settings of the manifest for policies.

    Raises:
        InputError: there is no such policy.
    """
    if name not in POLICIES:
        names = ", ".join(sorted(POLICIES))
        raise InputError(f"policy {name!r} is not a policy; this version has {names}")
    return POLICIES[name].configured(settings)
