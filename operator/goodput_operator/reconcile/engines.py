"""What engines are told directly: the token of their admin ports, and their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_operator.kube.objects import admin_url
from goodput_operator.reconcile.actions import CreateToken, Push
from goodput_operator.reconcile.problems import Reason, Trouble
from goodput_operator.render.secrets import secret_of, token_secret

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from goodput_operator.control.rounds import LimitsPush
    from goodput_operator.reconcile.view import View
    from goodput_operator.render.revisions import Revision

__all__ = ["missing_tokens", "pushes"]


def missing_tokens(
    view: View,
    revisions: Iterable[Revision],
    uids: Mapping[str, str],
    *,
    known: Sequence[str],
    begun: Container[str],
    undone: Container[tuple[str, str]],
    found: Iterable[Trouble],
) -> list[CreateToken]:
    """Secrets that are not known to be there: nobody may look.

    A running engine needs its Secret no more, so one that somebody deleted is missed when a pod
    begins: it is then made again, whether it is there or not, and once more if the pod tells of it.

    Args:
        view: what there is.
        revisions: those that have engines, or are to have some.
        uids: of the ControllerRevisions that exist, by name.
        known: uids of ControllerRevisions whose Secret was made: it goes with them.
        begun: revisions with a pod that was not there in the last round.
        undone: (kind, name) of what the last round could not do.
        found: what stands in the way.
    """
    lost = " ".join(one.message for one in found if one.reason is Reason.CONTAINER_CONFIG)
    made = []
    for revision in revisions:
        uid, name = uids.get(revision.name), secret_of(revision.template)
        if uid is None or name is None:
            continue
        missed = revision.name in begun or ("Secret", name) in undone or f'"{name}"' in lost
        if missed or uid not in known:
            body = token_secret(view.owner, name, revision=revision.name, revision_uid=uid)
            made.append(CreateToken(revision=revision.name, body=body))
    return made


def pushes(view: View, told: Iterable[LimitsPush]) -> list[Push]:
    """Limits on their way to the pods that do not have them.

    Args:
        view: what there is.
        told: what each is to be told, by the pod's name.
    """
    pods = {pod.name: pod for pod in view.engines if not pod.leaving}
    actions = []
    for one in told:
        pod = pods.get(one.name)
        url = None if pod is None else admin_url(pod.body)
        if pod is None or url is None:
            continue
        actions.append(Push(pod=pod.name, url=url, revision=pod.revision, limits=one.limits))
    return actions
