"""A revision whose image can change, or did, is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.operator.reconcile.gates import GATE, PASS, change, until_job

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster

PINNED = "RevisionPinned"
FIRST, SECOND = (f"registry.test/engine@sha256:{digit * 64}" for digit in "12")
BY_DIGEST = f"registry.test/engine@sha256:{'3' * 64}"


def run_image(cluster: Cluster, image_id: str, *roles: str) -> None:
    """Let the pods of these roles report an image."""
    for pod in cluster.pods.values():
        if pod["metadata"]["labels"]["goodput.dev/role"] in roles:
            container = {"name": "engine", "imageID": image_id, "state": {"running": {}}}
            pod["status"]["containerStatuses"] = [container]


def types(cluster: Cluster) -> set[str]:
    return {one["type"] for one in cluster.status["conditions"]}


def test_a_revision_with_a_tag_is_not_pinned(gated: Cluster) -> None:
    assert gated.condition(PINNED) == ("False", "ImageTag")
    assert "names its image by a tag, engine:1, so" in gated.message(PINNED)
    gated.update_spec(engine={"image": BY_DIGEST}, rollout=None)
    gated.settle()
    assert PINNED not in types(gated), "nothing is compared without a gate"
    gated.update_spec(rollout={"gate": GATE})
    gated.settle()
    assert gated.condition(PINNED) == ("True", "Pinned")
    gated.update_spec(replicas=-1)
    gated.reconcile()
    assert gated.condition(PINNED) == ("True", "Pinned"), "a rejected spec changes nothing"
    reasons = {event.reason for event in gated.events}
    assert not reasons & {"ImageTag", PINNED}, "a tag is no change"


def test_a_tag_that_moved_after_the_gate_is_reported(gated: Cluster) -> None:
    change(gated)
    until_job(gated)
    run_image(gated, FIRST, "baseline", "candidate", "engine")
    gated.end_job(PASS)
    gated.settle()
    assert gated.condition(PINNED) == ("False", "ImageTag"), "no pod reports another image"
    run_image(gated, FIRST, "engine")
    gated.settle()
    assert gated.condition(PINNED) == ("False", "ImageTag")
    run_image(gated, SECOND, "engine")
    gated.settle()
    assert gated.condition(PINNED) == ("False", "ImagesDiffer")
    first, second = (image.partition("@")[2] for image in (FIRST, SECOND))
    name = gated.engines()[0]["metadata"]["name"]
    assert f"{first} (its gate), {second} (pod {name})" in gated.message(PINNED)
    gated.settle()
    (event,) = [event for event in gated.events if event.reason == "ImagesDiffer"]
    assert event.warning
    gated.restart_operator()
    gated.settle()
    assert gated.condition(PINNED) == ("False", "ImagesDiffer"), "the record has the digest"


def test_two_images_of_one_revision_are_reported_without_a_gate(running: Cluster) -> None:
    assert PINNED not in types(running)
    run_image(running, FIRST, "engine")
    running.settle()
    assert PINNED not in types(running)
    pod = running.engines()[1]
    for image_id in ("sha256:5", SECOND):
        assert PINNED not in types(running), "the id of an image is not a digest"
        pod["status"]["containerStatuses"][0]["imageID"] = image_id
        running.settle()
    assert running.condition(PINNED) == ("False", "ImagesDiffer")
    assert running.condition("Stalled") == ("False", "Unhindered")
    run_image(running, SECOND, "engine")
    running.settle()
    assert PINNED not in types(running)
