"""Observes one TraceReplay, decides, and applies: the driver beside that of the LLMServices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from goodput_core.contract import API_VERSION, KIND_TRACEREPLAY
from goodput_core.errors import SpecError
from goodput_core.spec.codec import decode
from goodput_core.spec.tracereplay import TraceReplaySpec
from goodput_core.units import NS_PER_S
from goodput_operator.kube.client import FailedCall
from goodput_operator.kube.objects import (
    CLAIM,
    KINDS,
    SECRET,
    TRACEREPLAY,
    admin_url,
    controlled_by,
    is_ready,
)
from goodput_operator.reconcile.actions import Create, Delete, Emit, WriteStatus
from goodput_operator.reconcile.work_queue import Result
from goodput_operator.render.replay_pod import claims_of
from goodput_operator.render.secrets import TOKEN_KEY
from goodput_operator.replays.actions import CreateReplayToken, PostStart
from goodput_operator.replays.decide import decide
from goodput_operator.replays.jobs import ReplayRun
from goodput_operator.replays.shards import shard_token
from goodput_operator.replays.snapshot import ReplaySnapshot
from goodput_operator.replays.status import is_finished

if TYPE_CHECKING:
    from goodput_operator.kube.cache import Cache, ReplayKey
    from goodput_operator.kube.client import ApiResponse, Client
    from goodput_operator.kube.fence import ClockSource
    from goodput_operator.kube.objects import Object
    from goodput_operator.reconcile.event_recorder import EventRecorder
    from goodput_operator.render.pods import Installation
    from goodput_operator.replays.actions import ReplayAction, ReplayDecision
    from goodput_operator.replays.shards import ShardClient

__all__ = ["EVENT_REPLAY", "ReplayReconciler"]

EVENT_REPLAY: Final = "replay"
"""Log event of the outcome of a replay, with the reason and message of its Event."""
_log = logging.getLogger(__name__)


class ReplayReconciler:
    """Reconciles TraceReplays; calls for the same key must not overlap.

    Args:
        cache: cache of the watched objects.
        client: client of the API server.
        shards: client of armed shards.
        recorder: writes Events.
        installation: images and platform settings.
        clock: source of calendar and monotonic time.
        key: the operator's key, from which the tokens of the shards are derived.
    """

    def __init__(
        self,
        *,
        cache: Cache,
        client: Client,
        shards: ShardClient,
        recorder: EventRecorder,
        installation: Installation,
        clock: ClockSource,
        key: bytes,
    ) -> None:
        self._cache = cache
        self._client = client
        self._shards = shards
        self._recorder = recorder
        self._installation = installation
        self._clock = clock
        self._key = key
        self._foreign: dict[ReplayKey, Object] = {}
        """Jobs of other owners under a name that a replay needs, until the replay ends."""
        self._rejected: dict[ReplayKey, str] = {}
        """Rejections of the last reconciliation's objects."""
        self._written: dict[ReplayKey, Object] = {}
        """Replays as the API server returned them after a status write, until the watch has it."""

    async def reconcile(self, key: ReplayKey) -> Result:
        """Observe a replay, decide, and carry out the actions.

        Raises:
            LeaseLostError: the Lease is no longer held.
        """
        replay = self._cache.replay(key)
        if replay is None:
            self._written.pop(key, None)
            self._foreign.pop(key, None)
            self._rejected.pop(key, None)
            return Result(deleted=True)
        replay = self._with_written_status(key, replay)
        if "deletionTimestamp" in replay["metadata"]:
            return Result()
        snapshot = await self._observe(key, replay)
        decision = decide(snapshot, self._installation)
        failed = await self._apply(key, replay, decision)
        wake_ns = None
        if decision.wake_after_s is not None:
            wake_ns = self._clock.now_ns() + max(0, round(decision.wake_after_s * NS_PER_S))
        return Result(failed=failed, again_at_ns=wake_ns)

    def _with_written_status(self, key: ReplayKey, replay: Object) -> Object:
        written = self._written.get(key)
        if written is None:
            return replay
        same = written["metadata"]["uid"] == replay["metadata"]["uid"]
        versions = [int(body["metadata"]["resourceVersion"]) for body in (replay, written)]
        if not same or versions[0] >= versions[1]:
            del self._written[key]
            return replay
        return {**replay, "status": written.get("status") or {}}

    async def _observe(self, key: ReplayKey, replay: Object) -> ReplaySnapshot:
        jobs, pods = self._cache.jobs(key), self._cache.pods(key)
        if (foreign := self._foreign.pop(key, None)) is not None:
            jobs = (*jobs, foreign)
        siblings = self._cache.replays_in(key.namespace)
        unix_ns = self._clock.unix_ns
        try:
            spec = decode(TraceReplaySpec, replay.get("spec"), "spec")
        except SpecError:
            spec = None
        if spec is None or is_finished(replay):
            return ReplaySnapshot(
                unix_ns=unix_ns(), replay=replay, jobs=jobs, pods=pods, siblings=siblings
            )
        service = None
        if spec.target.service is not None:
            service = self._cache.service((key.namespace, spec.target.service))
        claims: dict[str, tuple[str, ...] | None] = {}
        unread = ""
        if not jobs:
            gate = spec.gate
            compared = () if gate is None else (gate.baseline, gate.history)
            for name in claims_of(spec.trace, spec.target.tokenizer, spec.records, *compared):
                response = await self._client.read(CLAIM, key.namespace, name)
                if not isinstance(response, FailedCall):
                    claims[name] = tuple((response.get("spec") or {}).get("accessModes") or ())
                elif response.not_found:
                    claims[name] = None
                else:
                    unread = f"PersistentVolumeClaim {name}: {response.message}"
        run = ReplayRun.of(replay, spec)
        urls = {
            pod["metadata"]["name"]: url
            for pod in pods
            if pod["metadata"]["name"].startswith(f"{run.shards_job}-")
            and is_ready(pod)
            and (url := admin_url(pod)) is not None
        }
        readings = await self._shards.read(urls, unix_ns) if urls else {}
        return ReplaySnapshot(
            unix_ns=unix_ns(),
            replay=replay,
            jobs=jobs,
            pods=pods,
            service=service,
            claims=claims,
            unread=unread,
            rejected=self._rejected.get(key, ""),
            readings=readings,
            siblings=siblings,
        )

    async def _apply(self, key: ReplayKey, replay: Object, decision: ReplayDecision) -> bool:
        """Carry out the actions in order, and return True if one failed.

        After a failure the rest is left to the next reconciliation, since an action may need the
        one before it: a start is sent only once it is stored.
        """
        rejected = self._rejected.pop(key, "")
        for action in decision.actions:
            problem = await self._carry_out(key, replay, action)
            creates = isinstance(action, Create | CreateReplayToken)
            if problem and creates:
                self._rejected[key] = problem
            elif rejected and not creates:
                self._rejected[key] = rejected  # until an object is created
            if problem:
                fields = {"namespace": key.namespace, "tracereplay": key.name, "detail": problem}
                _log.warning("delayed", extra=fields)
                return True
        return False

    async def _carry_out(self, key: ReplayKey, replay: Object, action: ReplayAction) -> str:
        """Carry out one action, and return the problem; empty on success."""
        uid = replay["metadata"]["uid"]
        match action:
            case CreateReplayToken(body=body):
                token = shard_token(self._key, uid)
                secret = {**body, "stringData": {TOKEN_KEY: token}}
                response = await self._client.create(SECRET, key.namespace, secret)
                return _problem(response, unless="AlreadyExists")
            case Create(body=body):
                return await self._create(key, uid, body)
            case PostStart(pod=pod, url=url, start_at=start_at):
                error = await self._shards.start(url, uid, start_at)
                return error and f"start of {pod}: {error}"
            case WriteStatus(status=status):
                return await self._write_status(key, uid, status)
            case Delete(kind=kind, name=name, uid=child):
                response = await self._client.delete(KINDS[kind], key.namespace, name, child)
                if isinstance(response, FailedCall) and response.status in {404, 409}:
                    return ""  # it is gone, or another object has its name
                return _problem(response)
            case Emit():
                level = logging.WARNING if action.warning else logging.INFO
                fields = {"namespace": key.namespace, "tracereplay": key.name}
                fields |= {"reason": action.reason, "detail": action.message}
                _log.log(level, EVENT_REPLAY, extra=fields)
                failed = await self._recorder.emit(replay, action)
                return "" if failed is None else failed.message

    async def _create(self, key: ReplayKey, uid: str, body: Object) -> str:
        """Create a Job; one of another owner under its name becomes a part of the snapshot."""
        kind, name = KINDS[body["kind"]], body["metadata"]["name"]
        response = await self._client.create(kind, key.namespace, body)
        if not isinstance(response, FailedCall) or response.reason != "AlreadyExists":
            return _problem(response)
        live = await self._client.read(kind, key.namespace, name)
        if isinstance(live, FailedCall):
            return "" if live.not_found else live.message
        if controlled_by(live, uid):
            return ""
        self._foreign[key] = live
        return f"{kind.name} {name} belongs to another object"

    async def _write_status(self, key: ReplayKey, uid: str, status: Object) -> str:
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND_TRACEREPLAY,
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": uid},
            "status": status,
        }
        response = await self._client.apply(TRACEREPLAY, body, force=True, subresource="status")
        if not isinstance(response, FailedCall):
            self._written[key] = response
        elif response.not_found:
            return ""
        return _problem(response)


def _problem(response: ApiResponse, *, unless: str = "") -> str:
    if not isinstance(response, FailedCall) or (unless and response.reason == unless):
        return ""
    return response.message
