"""A new revision gets the digest of its tag before anything of it is created."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.operator.reconcile.conftest import INSTALLATION, Cluster
from tests.operator.reconcile.gates import GATE, PASS, until_job

from goodput_core.units import NS_PER_S
from goodput_operator.reconcile.snapshot import ImagePin

if TYPE_CHECKING:
    from goodput_operator.reconcile.actions import Decision

TAG = "registry.test/engine:1"
FIRST, SECOND = (f"registry.test/engine@sha256:{digit * 64}" for digit in "12")
PINNING = replace(INSTALLATION, pinned_registries=frozenset({"registry.test"}))


class Resolving(Cluster):
    """A cluster whose operator resolves tags, as the observer does.

    Attributes:
        digests: name with the digest that each tag has now, or the problem with it.
        asked: images whose digest was asked for.
        pin: the last answer, which is kept until no decision asks for it.
    """

    digests: dict[str, str]
    asked: list[str]
    pin: ImagePin | None = None
    temporary = True

    def snapshot(self, measures: Any = None) -> Any:
        return replace(super().snapshot(measures), pin=self.pin)

    def decide(self, measures: Any = None) -> Decision:
        decision = super().decide(measures)
        image = decision.tagged_image
        known = self.pin
        if not image:
            self.pin = None
        elif known is None or known.image != image or not known.pinned:
            self.asked.append(image)
            answer = self.digests[image]
            self.pin = ImagePin(image=image, pinned=answer)
            if "@" not in answer:
                self.pin = ImagePin(
                    image=image,
                    problem=answer,
                    temporary=self.temporary,
                    retry_at_ns=self.now_ns + 10 * NS_PER_S,
                )
        return decision


@pytest.fixture
def cluster() -> Resolving:
    cluster = Resolving(installation=PINNING)
    cluster.digests, cluster.asked = {TAG: FIRST}, []
    cluster.spec["engine"] = {"image": TAG}
    return cluster


def images(cluster: Cluster, kind: str) -> set[str]:
    """Return the images of the engines' Deployments, or of their ControllerRevisions."""
    found = set()
    for (one, _), body in cluster.objects.items():
        spec = body["spec"] if one == "Deployment" else body.get("data", {})
        if one == kind and body["metadata"]["labels"]["goodput.dev/role"] != "router":
            found.add(spec["template"]["spec"]["containers"][0]["image"])
    return found


def test_a_revision_is_stored_with_the_digest_of_its_tag(cluster: Resolving) -> None:
    first = cluster.decide()
    assert first.tagged_image == TAG
    assert first.wake_at_ns == cluster.now_ns, "the registry is asked at once"
    assert images(cluster, "ControllerRevision") == set(), "not before the digest is known"
    assert cluster.condition("Reconciling") == ("True", "Creating")
    cluster.settle()
    assert images(cluster, "ControllerRevision") == images(cluster, "Deployment") == {FIRST}
    assert cluster.condition("Ready") == ("True", "Serving")
    assert cluster.asked == [TAG], "once"
    cluster.update_spec(rollout={"gate": GATE})
    cluster.settle()
    assert cluster.condition("RevisionPinned") == ("True", "Pinned")


def test_a_moved_tag_reaches_only_the_next_revision(cluster: Resolving) -> None:
    cluster.settle()
    cluster.digests[TAG] = SECOND
    cluster.restart_operator()
    cluster.settle()
    assert images(cluster, "Deployment") == {FIRST}
    assert cluster.asked == [TAG], "a stored revision asks for nothing"
    cluster.update_spec(engine={"image": TAG, "policy": "orca"})
    cluster.settle()
    assert images(cluster, "Deployment") == {SECOND}
    assert images(cluster, "ControllerRevision") == {FIRST, SECOND}
    reasons = [event.reason for event in cluster.events]
    assert (reasons.count("RollingOut"), reasons.count("RolledOut")) == (1, 1)
    cluster.update_spec(engine={"image": TAG})
    cluster.settle()
    assert images(cluster, "Deployment") == {FIRST}, "a rollback returns to the stored image"


def test_the_digest_stays_the_same_until_the_revision_is_stored(cluster: Resolving) -> None:
    cluster.rejections["ControllerRevision"] = "the webhook is not ready"
    for _ in range(3):
        assert cluster.reconcile().tagged_image == TAG
        cluster.digests[TAG] = SECOND
    del cluster.rejections["ControllerRevision"]
    cluster.settle()
    assert images(cluster, "Deployment") == {FIRST}
    assert cluster.asked == [TAG]


def test_the_stable_revision_serves_while_a_registry_does_not_respond(cluster: Resolving) -> None:
    cluster.settle()
    stable = cluster.status["currentRevision"]
    cluster.digests[TAG] = "registry registry.test returned status 500"
    cluster.update_spec(engine={"image": TAG, "policy": "orca"}, rollout={"gate": GATE})
    for _ in range(15):  # a status with another message only is written once a minute
        cluster.reconcile()
    decision = cluster.decide()
    assert decision.wake_at_ns is not None
    assert cluster.now_ns < decision.wake_at_ns <= cluster.now_ns + 10 * NS_PER_S
    assert cluster.condition("Reconciling") == ("True", "Retrying")
    message = cluster.message("Reconciling")
    assert f"waits for the digest of {TAG}: registry registry.test returned status 500" in message
    assert cluster.condition("Stalled")[0] == "False"
    assert cluster.status["updateRevision"] == cluster.status["currentRevision"] == stable
    assert len(cluster.engines(ready=True)) == 2
    assert not cluster.deployments("candidate")
    cluster.digests[TAG] = SECOND
    until_job(cluster)
    assert cluster.condition("RevisionPinned") == ("True", "Pinned")
    cluster.end_job(PASS)
    cluster.settle()
    assert images(cluster, "Deployment") == {SECOND}


def test_a_missing_tag_stalls_the_service_until_it_is_there(cluster: Resolving) -> None:
    cluster.temporary = False
    cluster.settle()
    cluster.digests[TAG] = "registry registry.test has no tag 1 of engine"
    cluster.update_spec(engine={"image": TAG, "policy": "orca"})
    cluster.reconcile()
    cluster.reconcile()
    assert cluster.condition("Stalled") == ("True", "ImageNotResolved")
    assert cluster.message("Stalled").endswith("registry registry.test has no tag 1 of engine")
    assert cluster.condition("Reconciling") == ("False", "ImageNotResolved")
    assert cluster.condition("Ready") == ("True", "Serving")
    cluster.digests[TAG] = SECOND
    cluster.settle()
    assert cluster.condition("Stalled") == ("False", "Unhindered")
    assert images(cluster, "Deployment") == {SECOND}


@pytest.mark.parametrize("image", ["elsewhere.test/engine:1", SECOND])
def test_other_images_keep_their_names(cluster: Resolving, image: str) -> None:
    cluster.spec["engine"] = {"image": image}
    cluster.settle()
    assert images(cluster, "Deployment") == {image}
    assert cluster.asked == []


def test_the_pair_of_a_gate_has_the_stored_images(cluster: Resolving) -> None:
    cluster.update_spec(rollout={"gate": GATE})
    cluster.settle()
    cluster.digests[TAG] = SECOND
    cluster.update_spec(engine={"image": TAG, "policy": "orca"})
    until_job(cluster)
    pair = {
        role: cluster.objects["Deployment", name]["spec"]["template"]["spec"]["containers"][0]
        for role in ("baseline", "candidate")
        for name in cluster.deployments(role)
    }
    assert pair["baseline"]["image"] == FIRST
    assert pair["candidate"]["image"] == SECOND
