"""Carries out the actions of a decision, and collects what the API server and engines refused.

Objects without our controller reference are never written. Fields of other managers are taken over
only on objects with it, and an Event names the managers and fields.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final

from goodput_core.contract import API_VERSION, KIND_LLMSERVICE
from goodput_operator.control.admin_ports import push_limits
from goodput_operator.kube.client import Refusal
from goodput_operator.kube.managed_fields import take_over
from goodput_operator.kube.objects import (
    KINDS,
    LLMSERVICE,
    MANAGER,
    POD,
    SECRET,
    controlled_by,
)
from goodput_operator.reconcile.actions import Apply, CreateToken, Delete, Emit, Push, WriteStatus
from goodput_operator.render.secrets import TOKEN_KEY, control_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import aiohttp

    from goodput_operator.kube.client import ApiResponse, Client
    from goodput_operator.kube.fence import Fence
    from goodput_operator.kube.managed_fields import Conflict
    from goodput_operator.kube.objects import Kind, Object
    from goodput_operator.reconcile.actions import Action
    from goodput_operator.reconcile.event_recorder import EventRecorder
    from goodput_operator.reconcile.observe import ServiceRecord
    from goodput_operator.reconcile.snapshot import Snapshot

__all__ = ["Applier", "ApplyResult", "LimitsPusher"]

_MAX_FIELDS: Final = 5
"""Fields per manager that one Event names."""
_CONCURRENT_PUSHES: Final = 16
_ALL_FIELDS: Final = ((),)


@dataclass(slots=True, kw_only=True)
class ApplyResult:
    """Failed actions of one reconciliation.

    Args:
        failures: messages of refused actions by kind and name.
        delayed: the same for failures that may pass without a change of the cluster.
        transient: True if the reconciliation should be repeated soon.
    """

    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    delayed: dict[tuple[str, str], str] = field(default_factory=dict)
    transient: bool = False

    def add(self, kind: str, name: str, refusal: Refusal) -> None:
        """Record a refusal; one that only shows a stale cache has no message."""
        self.transient |= refusal.transient or refusal.stale
        if not refusal.stale:
            messages = self.delayed if refusal.transient else self.failures
            messages[kind, name] = refusal.message


class LimitsPusher:
    """Sends limits to engines, with tokens derived from the operator's key.

    A push is a write: it starts only while the Lease is held, and is cancelled when it expires.

    Args:
        session: HTTP session.
        fence: admits every push.
        key: the operator's key.
    """

    def __init__(self, session: aiohttp.ClientSession, *, fence: Fence, key: bytes) -> None:
        self._session = session
        self._fence = fence
        self._key = key
        self._slots = asyncio.Semaphore(_CONCURRENT_PUSHES)

    async def push(self, service_uid: str, pushes: Sequence[Push]) -> dict[str, str]:
        """Send all of them, each within a few seconds.

        Returns:
            Error messages by pod.

        Raises:
            LeaseLostError: the Lease is no longer held.
        """
        errors = await asyncio.gather(*(self._push(service_uid, push) for push in pushes))
        return {push.pod: error for push, error in zip(pushes, errors, strict=True) if error}

    async def _push(self, service_uid: str, push: Push) -> str:
        token = control_token(self._key, service_uid=service_uid, revision=push.revision)
        async with self._slots:
            # Admitted here, since the wait for a slot may have been long.
            remaining_ns = self._fence.admit(f"limits of {push.pod}")
            return await push_limits(
                self._session, push.url, token=token, limits=push.limits, within_ns=remaining_ns
            )


class Applier:
    """Carries out actions.

    Args:
        client: of the API server.
        pusher: sends limits to engines.
        recorder: writes Events.
        key: the operator's key, from which tokens are derived.
    """

    def __init__(
        self, *, client: Client, pusher: LimitsPusher, recorder: EventRecorder, key: bytes
    ) -> None:
        self._client = client
        self._pusher = pusher
        self._recorder = recorder
        self._key = key

    async def carry_out(
        self, snapshot: Snapshot, actions: Sequence[Action], record: ServiceRecord
    ) -> ApplyResult:
        """Carry out all actions in order; a refused one does not prevent the others.

        Args:
            snapshot: that the actions were decided from.
            actions: of the decision.
            record: of the service; found foreign objects and the written status are stored in it.

        Raises:
            LeaseLostError: the Lease is no longer held.
        """
        outcome = ApplyResult()
        existing = {(o["kind"], o["metadata"]["name"]): o for o in snapshot.objects}
        for pushes, group in groupby(actions, key=lambda action: isinstance(action, Push)):
            if pushes:
                await self._push(snapshot, [p for p in group if isinstance(p, Push)], outcome)
                continue
            for action in group:
                match action:
                    case Apply():
                        await self._apply(snapshot.service, action, existing, record, outcome)
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
        existing: Mapping[tuple[str, str], Object],
        record: ServiceRecord,
        outcome: ApplyResult,
    ) -> None:
        kind, name = KINDS[action.body["kind"]], action.body["metadata"]["name"]
        live = existing.get((kind.name, name))
        if live is None:
            # Only objects with our label are watched. An apply without a conflict would adopt an
            # object of the same name without it.
            found = await self._client.read(kind, service["metadata"]["namespace"], name)
            if not isinstance(found, Refusal):
                live = found
            elif not found.not_found:
                outcome.add(kind.name, name, found)
                return
        overwritten: tuple[Conflict, ...] = ()
        if live is None:
            response = await self._client.apply(kind, action.body, force=False)
        elif controlled_by(live, record.uid):
            body = _of_uid(action.body, live["metadata"]["uid"])
            response, overwritten = await self._apply_to_ours(kind, body, action, record.uid)
        else:
            record.foreign[kind.name, name] = live
            outcome.failures[kind.name, name] = (
                f"{kind.name} {name} exists and is not controlled by LLMService "
                f"{service['metadata']['name']}"
            )
            return
        if isinstance(response, Refusal):
            outcome.add(kind.name, name, response)
        elif overwritten:
            await self._emit(service, _overwritten_event(kind, name, overwritten), outcome)

    async def _apply_to_ours(
        self, kind: Kind, body: Object, action: Apply, service_uid: str
    ) -> tuple[ApiResponse, tuple[Conflict, ...]]:
        """Apply to an object that we control.

        Returns:
            The response, and the fields of other managers that were changed or removed.
        """
        overwritten = action.overwrites
        if action.take_over:
            moved = await self._take_over(kind, body, service_uid, below=action.take_over)
            if isinstance(moved, Refusal):
                return moved, ()
        response = await self._client.apply(kind, body, force=False)
        if isinstance(response, Refusal) and response.conflicts:
            overwritten = (*overwritten, *response.conflicts)
            response = await self._client.apply(kind, body, force=True)
        if isinstance(response, Refusal) and response.invalid:
            # Another manager may have added a field that our fields do not permit.
            moved = await self._take_over(kind, body, service_uid, below=_ALL_FIELDS)
            if isinstance(moved, Refusal):
                return moved, ()
            if moved:
                overwritten = (*overwritten, *moved)
                response = await self._client.apply(kind, body, force=True)
        return response, tuple(dict.fromkeys(overwritten))

    async def _take_over(
        self, kind: Kind, body: Object, service_uid: str, *, below: tuple[tuple[str, ...], ...]
    ) -> Refusal | tuple[Conflict, ...]:
        """Make other managers' fields ours, so that the next apply removes those it lacks.

        Returns:
            The moved fields with their former managers, or the refusal.
        """
        metadata = body["metadata"]
        found = await self._client.read(kind, metadata["namespace"], metadata["name"])
        if isinstance(found, Refusal):
            return found
        moved, managed_fields = take_over(found, MANAGER, below=below)
        same = found["metadata"]["uid"] == metadata["uid"]
        if not moved or not same or not controlled_by(found, service_uid):
            return ()
        response = await self._client.replace_managed_fields(kind, found, managed_fields)
        return response if isinstance(response, Refusal) else moved

    async def _create_token(
        self, service: Object, action: CreateToken, outcome: ApplyResult
    ) -> None:
        metadata = service["metadata"]
        token = control_token(self._key, service_uid=metadata["uid"], revision=action.revision)
        body = {**action.body, "stringData": {TOKEN_KEY: token}}
        response = await self._client.create(SECRET, metadata["namespace"], body)
        if isinstance(response, Refusal) and response.reason != "AlreadyExists":
            outcome.add(SECRET.name, action.body["metadata"]["name"], response)

    async def _delete(self, service: Object, action: Delete, outcome: ApplyResult) -> None:
        namespace = service["metadata"]["namespace"]
        response = await self._client.delete(KINDS[action.kind], namespace, action.name, action.uid)
        # A conflict means that a later object has the name, so this one is deleted already.
        if isinstance(response, Refusal) and response.status not in {404, 409}:
            outcome.add(action.kind, action.name, response)

    async def _write_status(
        self, service: Object, action: WriteStatus, record: ServiceRecord, outcome: ApplyResult
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
        # Forced, because the operator is the only writer of the status.
        response = await self._client.apply(LLMSERVICE, body, force=True, subresource="status")
        if not isinstance(response, Refusal):
            record.written = response
        elif not response.not_found:
            outcome.add(KIND_LLMSERVICE, metadata["name"], response)

    async def _emit(self, service: Object, emit: Emit, outcome: ApplyResult) -> None:
        refusal = await self._recorder.emit(service, emit)
        if refusal is not None:
            outcome.add("Event", emit.reason, refusal)

    async def _push(self, snapshot: Snapshot, pushes: Sequence[Push], outcome: ApplyResult) -> None:
        uid = snapshot.service["metadata"]["uid"]
        for pod, error in (await self._pusher.push(uid, pushes)).items():
            outcome.failures[POD.name, pod] = error


def _of_uid(body: Object, uid: str) -> Object:
    """Return a body that the API server applies only to the object of this uid."""
    return {**body, "metadata": {**body["metadata"], "uid": uid}}


def _overwritten_event(kind: Kind, name: str, conflicts: Iterable[Conflict]) -> Emit:
    fields: dict[str, list[str]] = defaultdict(list)
    for conflict in conflicts:
        fields[conflict.manager].append(conflict.field)
    managers = "; ".join(
        f'"{manager}" had set {", ".join(paths[:_MAX_FIELDS])}'
        + (f" and {len(paths) - _MAX_FIELDS} more" if len(paths) > _MAX_FIELDS else "")
        for manager, paths in sorted(fields.items())
    )
    return Emit(
        warning=True,
        reason="Overwritten",
        message=f"{kind.name} {name} was reset to its LLMService: {managers}",
    )
