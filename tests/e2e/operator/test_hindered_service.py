"""What keeps a service from running stands in its conditions, in the words of whoever said so."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.operator.installed import Installed

    Until = Callable[..., Any]


def says(installed: Installed, name: str, kind: str, wanted: str, words: str) -> None:
    """Its condition has this reason, and these words in its message."""
    reason, message = installed.condition(name, kind)
    assert reason == wanted
    assert words in message


@pytest.mark.slow
def test_an_image_that_cannot_be_pulled_is_told_in_the_kubelets_words(
    installed: Installed, asked: Callable[..., None]
) -> None:
    asked("unpulled", engine={"policy": "sarathi", "image": "example.test/none:1"})
    installed.wait("condition=Stalled", "llmservice/unpulled")
    says(installed, "unpulled", "Stalled", "ImagePullFailed", 'image "example.test/none:1"')
    assert installed.condition("unpulled", "Stalled")[1].startswith("pod unpulled-")


@pytest.mark.slow
def test_pods_without_a_node_are_told_in_the_schedulers_words(
    installed: Installed, asked: Callable[..., None]
) -> None:
    gpu = {"limits": {"nvidia.com/gpu": 1000}}
    asked("unscheduled", engine={"policy": "sarathi", "resources": gpu})
    installed.wait("condition=ScalingLimited", "llmservice/unscheduled")
    words = "Insufficient nvidia.com/gpu"
    for kind in ("Reconciling", "ScalingLimited"):
        says(installed, "unscheduled", kind, "Unschedulable", words)
    # A node may still come.
    installed.wait("condition=Stalled=false", "llmservice/unscheduled")


@pytest.mark.slow
def test_a_quota_is_told_in_its_own_words_and_pods_come_once_it_is_raised(
    installed: Installed, serve: Callable[..., None], until: Until
) -> None:
    serve("few", replicas=1)
    with quota(installed, "pods=1", until):
        installed.kubectl("scale", "llmservice/few", "--replicas=2")
        installed.wait("condition=Stalled", "llmservice/few")
        for kind in ("Stalled", "ScalingLimited"):
            words = "exceeded quota: no-more, requested: pods=1"
            says(installed, "few", kind, "QuotaExceeded", words)
        installed.wait("condition=Ready", "llmservice/few")
    installed.settled("few")
    installed.wait("condition=Stalled=false", "llmservice/few")


def test_what_a_quota_refuses_the_operator_itself_is_told_and_tried_again(
    installed: Installed, asked: Callable[..., None], until: Until
) -> None:
    with quota(installed, "count/poddisruptionbudgets.policy=0", until):
        asked("refused", suspend=True)
        installed.wait("condition=Stalled", "llmservice/refused")
        words = '"refused-engines" is forbidden: exceeded quota: no-more'
        says(installed, "refused", "Stalled", "QuotaExceeded", words)
    installed.wait("condition=Stalled=false", "llmservice/refused")
    installed.get("poddisruptionbudget", "refused-engines")


@contextmanager
def quota(installed: Installed, hard: str, until: Until) -> Iterator[None]:
    """A quota `no-more` that is in force during the block."""
    installed.kubectl("create", "quota", "no-more", f"--hard={hard}")
    try:
        # It counts only once its controller has looked at it.
        until(lambda: installed.get("quota", "no-more").get("status", {}).get("hard"), "in force")
        yield
    finally:
        installed.kubectl("delete", "quota", "no-more")
