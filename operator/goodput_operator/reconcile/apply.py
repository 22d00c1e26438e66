"""Carries out the actions of a decision: writes objects, the status and Events, and pushes limits.

Objects without our controller reference are never written. On objects with that reference, fields
of other managers are taken over, and an Event names the managers and fields.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final

from goodput_core.contract import API_VERSION, KIND_LLMSERVICE
from goodput_operator.control.admin_ports import push_limits
from goodput_operator.kube.client import FailedCall
from goodput_operator.kube.managed_fields import take_over
from goodput_operator.kube.objects import (
    EVENT,
    KINDS,
    LLMSERVICE,
    MANAGER,
    POD,
    SECRET,
    controlled_by,
)
from goodput_operator.reconcile.actions import (
    Apply,
    Create,
    CreateToken,
    Delete,
    Emit,
    Push,
    WriteStatus,
    without_fields,
)
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
"""Maximum number of fields per manager that one Event names."""
_CONCURRENT_PUSHES: Final = 16
_ALL_FIELDS: Final = ((),)
_NOT_DECLARED: Final = re.compile(
    r"\.status\.(?:(learnt|gate)(?:\.\w+)?|(summary\.gate)): field not declared in"
)


@dataclass(slots=True, kw_only=True)
class ApplyResult:
    """Failed actions of one reconciliation.

    Args:
        failures: messages of rejected actions by kind and name.
        delayed: messages of actions that failed temporarily, by kind and name.
        transient: True if the reconciliation should be repeated soon.
    """

    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    delayed: dict[tuple[str, str], str] = field(default_factory=dict)
    transient: bool = False

    def add(self, kind: str, name: str, call: FailedCall) -> None:
        """Record a failed call, without a message if it only shows a stale cache."""
        self.transient |= call.transient or call.stale
        if not call.stale:
            messages = self.delayed if call.transient else self.failures
            messages[kind, name] = call.message


class LimitsPusher:
    """Sends limits to engines, with tokens derived from the operator's key.

    A push is a write: it starts only while the Lease is held, and is cancelled when the Lease
    expires.

    Args:
        session: HTTP session for engines.
        fence: admits every push.
        key: the operator's key.
    """

    def __init__(self, session: aiohttp.ClientSession, *, fence: Fence, key: bytes) -> None:
        self._session = session
        self._fence = fence
        self._key = key
        self._slots = asyncio.Semaphore(_CONCURRENT_PUSHES)

    async def push(self, service_uid: str, pushes: Sequence[Push]) -> dict[str, str]:
        """Send limits to several engines concurrently, with a time limit of a few seconds for each.

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
            # Admit the push only now, since it may have waited long for a slot.
            remaining_ns = self._fence.admit(f"limits of {push.pod}")
            return await push_limits(
                self._session, push.url, token=token, limits=push.limits, within_ns=remaining_ns
            )


class Applier:
    """Carries out actions.

    Args:
        client: client of the API server.
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
        """Carry out all actions in order; a rejected action does not prevent the others.

        Args:
            snapshot: the snapshot from which the actions were decided.
            actions: actions of the decision.
            record: record of the service, which receives foreign objects and the written status.

        Raises:
            LeaseLostError: the Lease is no longer held.
        """
        result = ApplyResult()
        existing = {(body["kind"], body["metadata"]["name"]): body for body in snapshot.objects}
        for pushes, group in groupby(actions, key=lambda action: isinstance(action, Push)):
            if pushes:
                await self._push(snapshot, [p for p in group if isinstance(p, Push)], result)
                continue
            for action in group:
                match action:
                    case Apply():
                        await self._apply(snapshot.service, action, existing, record, result)
                    case Create():
                        await self._create(snapshot.service, action, record, result)
                    case CreateToken():
                        await self._create_token(snapshot.service, action, result)
                    case Delete():
                        await self._delete(snapshot.service, action, result)
                    case WriteStatus():
                        await self._write_status(snapshot.service, action, record, result)
                    case Emit():
                        await self._emit(snapshot.service, action, result)
                    case Push():  # grouped above
                        pass
        return result

    async def _apply(
        self,
        service: Object,
        action: Apply,
        existing: Mapping[tuple[str, str], Object],
        record: ServiceRecord,
        result: ApplyResult,
    ) -> None:
        kind, name = KINDS[action.body["kind"]], action.body["metadata"]["name"]
        live = existing.get((kind.name, name))
        if live is None:
            # Only objects with our label are watched. An object of the same name without the label
            # may exist, and an apply without a conflict would adopt it.
            response = await self._client.read(kind, service["metadata"]["namespace"], name)
            if not isinstance(response, FailedCall):
                live = response
            elif not response.not_found:
                result.add(kind.name, name, response)
                return
        overwritten: tuple[Conflict, ...] = ()
        if live is None:
            response = await self._client.apply(kind, action.body, force=False)
        elif controlled_by(live, record.uid):
            # The API server applies a body with a uid only to the object of this uid.
            metadata = {**action.body["metadata"], "uid": live["metadata"]["uid"]}
            body = {**action.body, "metadata": metadata}
            response, overwritten = await self._apply_to_ours(kind, body, action, record.uid)
        else:
            self._report_foreign(service, live, record, result)
            return
        if isinstance(response, FailedCall):
            result.add(kind.name, name, response)
        elif overwritten:
            await self._emit(service, _overwritten_event(kind, name, overwritten), result)

    @staticmethod
    def _report_foreign(
        service: Object, live: Object, record: ServiceRecord, result: ApplyResult
    ) -> None:
        kind, name = live["kind"], live["metadata"]["name"]
        record.foreign[kind, name] = live
        result.failures[kind, name] = (
            f"{kind} {name} exists and is not controlled by LLMService "
            f"{service['metadata']['name']}"
        )

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
            if isinstance(moved, FailedCall):
                return moved, ()
        response = await self._client.apply(kind, body, force=False)
        if isinstance(response, FailedCall) and response.conflicts:
            overwritten = (*overwritten, *response.conflicts)
            response = await self._client.apply(kind, body, force=True)
        if isinstance(response, FailedCall) and response.invalid:
            # A field that another manager added may contradict a rendered one.
            moved = await self._take_over(kind, body, service_uid, below=_ALL_FIELDS)
            if isinstance(moved, FailedCall):
                return moved, ()
            if moved:
                overwritten = (*overwritten, *moved)
                response = await self._client.apply(kind, body, force=True)
        return response, tuple(dict.fromkeys(overwritten))

    async def _take_over(
        self, kind: Kind, body: Object, service_uid: str, *, below: tuple[tuple[str, ...], ...]
    ) -> FailedCall | tuple[Conflict, ...]:
        """Take over other managers' fields, so that the next apply removes those it does not set.

        Returns:
            The moved fields with their former managers, or the failed call.
        """
        metadata = body["metadata"]
        live = await self._client.read(kind, metadata["namespace"], metadata["name"])
        if isinstance(live, FailedCall):
            return live
        moved, managed_fields = take_over(live, MANAGER, below=below)
        same = live["metadata"]["uid"] == metadata["uid"]
        if not moved or not same or not controlled_by(live, service_uid):
            return ()
        response = await self._client.replace_managed_fields(kind, live, managed_fields)
        return response if isinstance(response, FailedCall) else moved

    async def _create(
        self, service: Object, action: Create, record: ServiceRecord, result: ApplyResult
    ) -> None:
        kind, namespace = KINDS[action.body["kind"]], service["metadata"]["namespace"]
        response = await self._client.create(kind, namespace, action.body)
        if not isinstance(response, FailedCall):
            return
        metadata = action.body["metadata"]
        name, labels = metadata["name"], metadata.get("labels") or {}
        if response.reason == "AlreadyExists":
            live = await self._client.read(kind, namespace, name)
            if not isinstance(live, FailedCall):
                if not controlled_by(live, record.uid):
                    self._report_foreign(service, live, record, result)
                elif not labels.items() <= (live["metadata"].get("labels") or {}).items():
                    # It is not watched, so it could never be followed.
                    result.failures[kind.name, name] = (
                        f"{kind.name} {name} exists, but its labels were changed; delete it"
                    )
                return
            if live.not_found:  # it was deleted in between
                return
            response = live
        result.add(kind.name, name, response)

    async def _create_token(
        self, service: Object, action: CreateToken, result: ApplyResult
    ) -> None:
        metadata = service["metadata"]
        token = control_token(self._key, service_uid=metadata["uid"], revision=action.revision)
        body = {**action.body, "stringData": {TOKEN_KEY: token}}
        response = await self._client.create(SECRET, metadata["namespace"], body)
        if isinstance(response, FailedCall) and response.reason != "AlreadyExists":
            result.add(SECRET.name, action.body["metadata"]["name"], response)

    async def _delete(self, service: Object, action: Delete, result: ApplyResult) -> None:
        namespace = service["metadata"]["namespace"]
        response = await self._client.delete(KINDS[action.kind], namespace, action.name, action.uid)
        # A conflict means that a later object has the name, so this object is deleted already.
        if isinstance(response, FailedCall) and response.status not in {404, 409}:
            result.add(action.kind, action.name, response)

    async def _write_status(
        self, service: Object, action: WriteStatus, record: ServiceRecord, result: ApplyResult
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
        # The definition in the cluster may be of a version without an optional field, or without a
        # part of it.
        found = _NOT_DECLARED.findall(response.message) if isinstance(response, FailedCall) else ()
        if found:
            record.undeclared |= {whole or part for whole, part in found}
            status = without_fields(action.status, record.undeclared)
            response = await self._client.apply(
                LLMSERVICE, {**body, "status": status}, force=True, subresource="status"
            )
        if not isinstance(response, FailedCall):
            record.written = response
        elif not response.not_found:
            result.add(KIND_LLMSERVICE, metadata["name"], response)

    async def _emit(self, service: Object, emit: Emit, result: ApplyResult) -> None:
        failed = await self._recorder.emit(service, emit)
        if failed is not None:
            result.add(EVENT.name, emit.reason, failed)

    async def _push(self, snapshot: Snapshot, pushes: Sequence[Push], result: ApplyResult) -> None:
        uid = snapshot.service["metadata"]["uid"]
        for pod, error in (await self._pusher.push(uid, pushes)).items():
            result.failures[POD.name, pod] = error


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
