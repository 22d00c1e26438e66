"""Names of policies: what a manifest may ask for is what the engine has."""

from __future__ import annotations

import pytest

from goodput_core.errors import InputError
from goodput_core.support import BUILT_POLICIES
from goodput_engine.scheduler.policies.registry import POLICIES, build_policy


def test_the_registry_holds_exactly_the_policies_that_manifests_may_ask_for() -> None:
    assert set(POLICIES) == BUILT_POLICIES


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_built_policy_knows_its_name_and_belongs_to_one_scheduler(name: str) -> None:
    assert build_policy(name).name == name
    assert build_policy(name) is not build_policy(name)
    assert "Source:" in (type(build_policy(name)).__doc__ or "")


@pytest.mark.parametrize(
    ("name", "problem"),
    [("fastserve", "is not built yet"), ("fifo", "is not a policy")],
)
def test_what_there_is_not_is_refused_by_name(name: str, problem: str) -> None:
    with pytest.raises(InputError, match=f"'{name}' {problem}; this version has dynamic, .*, vllm"):
        build_policy(name)
