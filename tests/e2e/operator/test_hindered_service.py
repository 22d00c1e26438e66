"""What keeps a service from running stands in its conditions, in the words of whoever said so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.operator.installed import Installed

    Until = Callable[..., Any]


def condition(installed: Installed, name: str, kind: str) -> tuple[str, str]:
    """Its reason and its message."""
    [one] = [c for c in installed.status(name)["conditions"] if c["type"] == kind]
    return one["reason"], one["message"]


@pytest.mark.slow
def test_an_image_that_cannot_be_pulled_is_told_in_the_kubelets_words(
    installed: Installed, asked: Callable[..., None]
) -> None:
    asked("unpulled", engine={"policy": "sarathi", "image": "example.test/none:1"})
    installed.wait("condition=Stalled", "llmservice/unpulled")
    reason, message = condition(installed, "unpulled", "Stalled")
    assert reason == "ImagePullFailed"
    assert 'image "example.test/none:1"' in message
    assert message.startswith("pod unpulled-")


@pytest.mark.slow
def test_pods_without_a_node_are_told_in_the_schedulers_words(
    installed: Installed, asked: Callable[..., None]
) -> None:
    gpu = {"limits": {"nvidia.com/gpu": 1000}}
    asked("unscheduled", engine={"policy": "sarathi", "resources": gpu})
    installed.wait("condition=ScalingLimited", "llmservice/unscheduled")
    for kind in ("Reconciling", "ScalingLimited"):
        reason, message = condition(installed, "unscheduled", kind)
        assert reason == "Unschedulable"
        assert "0/2 nodes are available: 2 Insufficient nvidia.com/gpu" in message
    # A node may still come.
    installed.wait("condition=Stalled=false", "llmservice/unscheduled")


@pytest.mark.slow
def test_a_quota_is_told_in_its_own_words_and_pods_come_once_it_is_raised(
    installed: Installed, serve: Callable[..., None], until: Until
) -> None:
    serve("few", replicas=1)
    installed.kubectl("create", "quota", "no-more", "--hard=pods=1")
    try:
        # The quota counts only once its controller has looked at it.
        until(lambda: installed.get("quota", "no-more").get("status", {}).get("hard"), "in force")
        installed.kubectl("scale", "llmservice/few", "--replicas=2")
        installed.wait("condition=Stalled", "llmservice/few")
        for kind in ("Stalled", "ScalingLimited"):
            reason, message = condition(installed, "few", kind)
            assert reason == "QuotaExceeded"
            assert "exceeded quota: no-more, requested: pods=1" in message
        installed.wait("condition=Ready", "llmservice/few")
    finally:
        installed.kubectl("delete", "quota", "no-more")
    installed.settled("few")
    installed.wait("condition=Stalled=false", "llmservice/few")
