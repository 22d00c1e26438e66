"""Conditions quote the message of the component that prevents a service from running."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.e2e.installation import ChartRelease


def check_condition(
    installation: ChartRelease, name: str, kind: str, expected_reason: str, words: str
) -> None:
    reason, message = installation.condition(name, kind)
    assert reason == expected_reason
    assert words in message


@pytest.mark.slow
def test_an_image_that_cannot_be_pulled_is_reported_with_the_kubelets_message(
    installation: ChartRelease, apply_service: Callable[..., None]
) -> None:
    apply_service("unpulled", engine={"policy": "sarathi", "image": "example.test/none:1"})
    installation.wait("condition=Stalled", "llmservice/unpulled")
    image = 'image "example.test/none:1"'
    check_condition(installation, "unpulled", "Stalled", "ImagePullFailed", image)
    assert installation.condition("unpulled", "Stalled")[1].startswith("pod unpulled-")


@pytest.mark.slow
def test_pods_that_fit_no_node_are_reported_with_the_schedulers_message(
    installation: ChartRelease, apply_service: Callable[..., None]
) -> None:
    gpu = {"limits": {"nvidia.com/gpu": 1000}}
    apply_service("unscheduled", engine={"policy": "sarathi", "resources": gpu})
    installation.wait("condition=ScalingLimited", "llmservice/unscheduled")
    words = "Insufficient nvidia.com/gpu"
    for kind in ("Reconciling", "ScalingLimited"):
        check_condition(installation, "unscheduled", kind, "Unschedulable", words)
    # A suitable node may be added later.
    installation.wait("condition=Stalled=false", "llmservice/unscheduled")


@pytest.mark.slow
def test_a_quota_on_pods_is_reported_and_pods_start_once_it_is_removed(
    installation: ChartRelease, serve: Callable[..., None]
) -> None:
    serve("few", replicas=1)
    with quota(installation, "pods=1"):
        installation.kubectl("scale", "llmservice/few", "--replicas=2")
        installation.wait("condition=Stalled", "llmservice/few")
        for kind in ("Stalled", "ScalingLimited"):
            words = "exceeded quota: no-more, requested: pods=1"
            check_condition(installation, "few", kind, "QuotaExceeded", words)
        installation.wait("condition=Ready", "llmservice/few")
    installation.wait_settled("few")
    installation.wait("condition=Stalled=false", "llmservice/few")


def test_a_quota_that_rejects_an_object_of_the_operator_is_reported_and_retried(
    installation: ChartRelease, apply_service: Callable[..., None]
) -> None:
    with quota(installation, "count/poddisruptionbudgets.policy=0"):
        apply_service("refused", suspend=True)
        installation.wait("condition=Stalled", "llmservice/refused")
        words = '"refused-engines" is forbidden: exceeded quota: no-more'
        check_condition(installation, "refused", "Stalled", "QuotaExceeded", words)
    installation.wait("condition=Stalled=false", "llmservice/refused")
    installation.get("poddisruptionbudget", "refused-engines")


@contextmanager
def quota(installation: ChartRelease, hard: str) -> Iterator[None]:
    """Create a quota `no-more` for the length of the block."""
    installation.kubectl("create", "quota", "no-more", f"--hard={hard}")
    try:
        wait_for(
            lambda: installation.get("quota", "no-more").get("status", {}).get("hard"),
            "the quota's controller enforces it",
        )
        yield
    finally:
        installation.kubectl("delete", "quota", "no-more")
