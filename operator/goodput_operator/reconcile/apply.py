"""Carries out what was decided, action by action, and brings back what the API server said.

It never touches an object that does not carry our controller reference, takes fields from others
only on those that do, and says in an Event from whom it took them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final

from goodput_core.contract import API_VERSION, KIND_LLMSERVICE
from goodput_operator.kube.client import Refusal
from goodput_operator.kube.managed_fields import take_over
from goodput_operator.kube.objects import KINDS, LLMSERVICE, MANAGER, POD, SECRET, controlled_by
from goodput_operator.reconcile.actions import Apply, CreateToken, Delete, Emit, Push, WriteStatus
from goodput_operator.render.secrets import TOKEN_KEY, control_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_operator.kube.client import ApiResponse, Client, Conflict
    from goodput_operator.kube.objects import Kind, Object
    from goodput_operator.reconcile.actions import Action
    from goodput_operator.reconcile.event_recorder import Events
    from goodput_operator.reconcile.pushing import Pusher
    from goodput_operator.reconcile.record import Record
    from goodput_operator.reconcile.snapshot import Snapshot

__all__ = ["Applier", "Outcome"]

_MOST_FIELDS: Final = 5
"""Fields named in one Event."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a turn's actions went.

    Args:
        failures: what was refused and in which words, by kind and name.
        delayed: the same of what may pass a little later by itself.
        transient: whether it is worth trying again soon although nobody changes anything.
    """

    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    delayed: dict[tuple[str, str], str] = field(default_factory=dict)
    transient: bool = False

    def note(self, kind: str, name: str, refusal: Refusal) -> None:
        """Keep a refusal, unless it only says that our cache was behind."""
        self.transient |= refusal.transient or refusal.stale
        if not refusal.stale:
            kept = self.delayed if refusal.transient else self.failures
            kept[kind, name] = refusal.message


class Applier:
    """Carries out actions.

    Args:
        client: the API server.
        pusher: the engines.
        events: the Events.
        key: the operator's, from which tokens are derived.
    """

    def __init__(self, *, client: Client, pusher: Pusher, events: Events, key: bytes) -> None:
        self._client = client
        self._pusher = pusher
        self._events = events
        self._key = key

    async def carry_out(
        self, snapshot: Snapshot, actions: Sequence[Action], record: Record
    ) -> Outcome:
        """Do it all, in order; what is refused does not keep the rest from being done.

        Args:
            snapshot: that the actions were decided from.
            actions: them.
            record: of the service; what was learnt is kept there.

        Raises:
            LeaseLostError: another operator may write by now.
        """
        outcome = Outcome()
        standing = {(o["kind"], o["metadata"]["name"]): o for o in snapshot.objects}
        for pushes, group in groupby(actions, key=lambda action: isinstance(action, Push)):
            if pushes:
                await self._push(snapshot, [p for p in group if isinstance(p, Push)], outcome)
                continue
            for action in group:
                match action:
                    case Apply():
                        await self._apply(snapshot.service, action, standing, record, outcome)
                    case CreateToken():
                        await self._create_token(snapshot.service, action, outcome)
                    case Delete():
                        await self._delete(snapshot.service, action, outcome)
                    case WriteStatus():
                        await self._write_status(snapshot.service, action, record, outcome)
                    case Emit():
                        await self._emit(snapshot.service, action, outcome)
                    case Push():  # grouped above
                        pass
        return outcome

    async def _apply(
        self,
        service: Object,
        action: Apply,
        standing: Mapping[tuple[str, str], Object],
        record: Record,
        outcome: Outcome,
    ) -> None:
        kind, name = KINDS[action.body["kind"]], action.body["metadata"]["name"]
        live = standing.get((kind.name, name))
        if live is None:
            # Only what carries our label is watched. Whatever else has that name must not be
            # joined: a server-side apply that meets no conflict would.
            found = await self._client.read(kind, service["metadata"]["namespace"], name)
            if not isinstance(found, Refusal):
                live = found
            elif not found.not_found:
                outcome.note(kind.name, name, found)
                return
        if live is not None and not controlled_by(live, record.uid):
            record.foreign[kind.name, name] = live
            outcome.failures[kind.name, name] = (
                f"{kind.name} {name} exists and is not controlled by LLMService "
                f"{service['metadata']['name']}"
            )
            return
        body = action.body if live is None else _to_this_very(action.body, live)
        answer = await self._client.apply(kind, body, force=False)
        taken: Sequence[Conflict] = ()
        if isinstance(answer, Refusal) and live is not None:
            if answer.conflicts:
                taken = answer.conflicts
                answer = await self._client.apply(kind, body, force=True)
            if isinstance(answer, Refusal) and answer.invalid:
                answer, more = await self._apply_alone(kind, body, answer, record.uid)
                taken = (*taken, *more)
        if isinstance(answer, Refusal):
            outcome.note(kind.name, name, answer)
        elif taken:
            await self._emit(service, _overwritten(kind, name, taken), outcome)

    async def _apply_alone(
        self, kind: Kind, body: Object, refused: Refusal, service_uid: str
    ) -> tuple[ApiResponse, Sequence[Conflict]]:
        """Apply to an object of ours to which others added what ours cannot stand beside.

        Returns:
            The answer, and what was taken from whom; `refused` itself where nobody added anything.
        """
        metadata = body["metadata"]
        found = await self._client.read(kind, metadata["namespace"], metadata["name"])
        if isinstance(found, Refusal):
            return found, ()
        taken, managed_fields = take_over(found, MANAGER)
        same = found["metadata"]["uid"] == metadata["uid"]
        if not taken or not same or not controlled_by(found, service_uid):
            return refused, ()
        handed = await self._client.replace_managed_fields(kind, found, managed_fields)
        if isinstance(handed, Refusal):
            return handed, ()
        return await self._client.apply(kind, body, force=True), taken

    async def _create_token(self, service: Object, action: CreateToken, outcome: Outcome) -> None:
        metadata = service["metadata"]
        token = control_token(self._key, service_uid=metadata["uid"], revision=action.revision)
        body = {**action.body, "stringData": {TOKEN_KEY: token}}
        answer = await self._client.create(SECRET, metadata["namespace"], body)
        if isinstance(answer, Refusal) and answer.reason != "AlreadyExists":
            outcome.note(SECRET.name, action.body["metadata"]["name"], answer)

    async def _delete(self, service: Object, action: Delete, outcome: Outcome) -> None:
        namespace = service["metadata"]["namespace"]
        answer = await self._client.delete(KINDS[action.kind], namespace, action.name, action.uid)
        # A conflict means that a successor has the name: this very one is gone.
        if isinstance(answer, Refusal) and answer.status not in {404, 409}:
            outcome.note(action.kind, action.name, answer)

    async def _write_status(
        self, service: Object, action: WriteStatus, record: Record, outcome: Outcome
    ) -> None:
        metadata = service["metadata"]
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND_LLMSERVICE,
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": record.uid,
            },
            "status": action.status,
        }
        # Forced: the status has one writer, whoever else tried a hand at it.
        answer = await self._client.apply(LLMSERVICE, body, force=True, subresource="status")
        if not isinstance(answer, Refusal):
            record.written = answer
        elif not answer.not_found:
            outcome.note(KIND_LLMSERVICE, metadata["name"], answer)

    async def _emit(self, service: Object, emit: Emit, outcome: Outcome) -> None:
        refusal = await self._events.emit(service, emit)
        if refusal is not None:
            outcome.note("Event", emit.reason, refusal)

    async def _push(self, snapshot: Snapshot, pushes: Sequence[Push], outcome: Outcome) -> None:
        uid = snapshot.service["metadata"]["uid"]
        for pod, words in (await self._pusher.push(uid, pushes)).items():
            outcome.failures[POD.name, pod] = words


def _to_this_very(body: Object, live: Object) -> Object:
    """A body that the API server applies to no other object of its name than the one looked at."""
    return {**body, "metadata": {**body["metadata"], "uid": live["metadata"]["uid"]}}


def _overwritten(kind: Kind, name: str, conflicts: Sequence[Conflict]) -> Emit:
    fields: dict[str, list[str]] = defaultdict(list)
    for conflict in conflicts:
        fields[conflict.manager].append(conflict.field)
    taken = "; ".join(
        f'"{manager}" had set {", ".join(paths[:_MOST_FIELDS])}'
        + (f" and {len(paths) - _MOST_FIELDS} more" if len(paths) > _MOST_FIELDS else "")
        for manager, paths in sorted(fields.items())
    )
    return Emit(
        warning=True,
        reason="Overwritten",
        message=f"{kind.name} {name} was put back as the LLMService says: {taken}",
    )
