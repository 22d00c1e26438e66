"""The condition that tells if a revision is bound to one image.

A revision stores the name of its image. If the name is a tag, a pod that starts later can run
another image than the one that the gate compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_core.contract import ROLE_ENGINE
from goodput_core.spec.status import Truth
from goodput_operator.reconcile.gate_plan import read_record
from goodput_operator.reconcile.status import REVISION_PINNED, Condition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_operator.reconcile.snapshot import PodView, View
    from goodput_operator.render.revisions import Revision

__all__ = ["IMAGE_TAG", "image_digest", "revision_pinned"]

IMAGE_TAG: Final = "ImageTag"
"""Reason of a revision whose image is named by a tag."""
_DIGEST: Final = "@sha256:"


def revision_pinned(
    view: View, revisions: Iterable[Revision], update: Revision | None, *, gated: bool
) -> list[Condition]:
    """Return the condition; none if there is neither a gate nor a difference.

    Args:
        view: classified objects of the service.
        revisions: stored revisions, and that of the spec.
        update: revision of the spec; None if it does not exist yet.
        gated: True if the spec has a gate.
    """
    for revision in revisions:
        if difference := _difference(view, revision):
            return [_condition(Truth.FALSE, "ImagesDiffer", difference)]
    if update is None or not gated:
        return []
    image = update.image
    if _DIGEST in image:
        return [_condition(Truth.TRUE, "Pinned", f"{update.name} names its image by digest")]
    return [
        _condition(
            Truth.FALSE,
            IMAGE_TAG,
            f"{update.name} names its image by a tag, {image}, so pods that start later can run "
            "another image than the compared one; name the image by digest",
        )
    ]


def image_digest(pod: PodView) -> str:
    """Return the digest of the image that the pod's engine runs; empty if its node names none."""
    for container in (pod.body.get("status") or {}).get("containerStatuses") or ():
        if container.get("name") == ROLE_ENGINE:
            _, found, digest = str(container.get("imageID") or "").partition(_DIGEST)
            return f"{_DIGEST[1:]}{digest}" if found else ""
    return ""


def _difference(view: View, revision: Revision) -> str:
    """Return how the images of a revision's pods differ, in a sentence; empty if they do not."""
    if _DIGEST in revision.image:
        return ""
    record = read_record(revision)
    judged = "" if record is None else record.image
    users = {judged: "its gate"} if judged else {}
    for pod in (*view.engines, *view.trials):
        if pod.revision == revision.name and not pod.terminating and (digest := image_digest(pod)):
            users.setdefault(digest, f"pod {pod.name}")
    if len(users) < 2:
        return ""
    used = ", ".join(f"{digest} ({user})" for digest, user in users.items())
    return (
        f"{revision.name} ran different images under the name {revision.image}: {used}; name "
        "the image by digest"
    )


def _condition(status: Truth, reason: str, message: str) -> Condition:
    return Condition(type=REVISION_PINNED, status=status, reason=reason, message=message)
