"""Names of policies: what a manifest may ask for is what the engine has."""

from __future__ import annotations

import pytest

from goodput_core.errors import InputError
from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policies.registry import POLICIES, build_policy


def test_the_registry_holds_exactly_the_policies_that_manifests_may_ask_for() -> None:
    assert set(POLICIES) == set(Policy)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_built_policy_knows_its_name_and_belongs_to_one_scheduler(name: str) -> None:
    assert build_policy(name).name == name
    assert build_policy(name) is not build_policy(name)
    assert "Source:" in (type(build_policy(name)).__doc__ or "")


def test_what_there_is_not_is_rejected_by_name() -> None:
    problem = "'fifo' is not a policy; this version has dynamic, fastserve, orca, "
    with pytest.raises(InputError, match=problem):
        build_policy("fifo")
