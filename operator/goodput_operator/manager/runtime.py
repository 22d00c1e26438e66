"""The running operator: election, work queue, reconciler and probes, supervised together.

The operator ends when the first of these ends. Kopf runs the event loop, so Kopf's startup and
cleanup handlers start and stop the operator.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import InputError, UnreachableError, root_of
from goodput_core.process import raise_open_files
from goodput_core.units import NS_PER_S
from goodput_operator.backoff import BackOff
from goodput_operator.control.admin_ports import read_gate_state, session_for_pods
from goodput_operator.kube.cache import Cache, ReplayKey
from goodput_operator.kube.client import Client, FailedCall, LeaseClient
from goodput_operator.kube.fence import Fence
from goodput_operator.kube.lease import FencingLock, LeaseTimes, hold_lease
from goodput_operator.kube.objects import LLMSERVICE, TRACEREPLAY
from goodput_operator.kube.watch import WATCHED, connect, watch_session
from goodput_operator.manager.health import Health, ProbeServer
from goodput_operator.manager.listing import list_services
from goodput_operator.reconcile.apply import Applier, LimitsPusher
from goodput_operator.reconcile.event_recorder import EventRecorder
from goodput_operator.reconcile.metrics import OperatorMetrics
from goodput_operator.reconcile.observe import Observer
from goodput_operator.reconcile.reconciler import Reconciler
from goodput_operator.reconcile.work_queue import Result, Workers, WorkQueue
from goodput_operator.registry import RegistryClient, session_for_registries
from goodput_operator.replays.reconciler import ReplayReconciler
from goodput_operator.replays.shards import ShardClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import aiohttp
    import kopf
    from kubernetes.aio.client import ApiClient

    from goodput_operator.kube.cache import OwnerKey
    from goodput_operator.kube.fence import ClockSource
    from goodput_operator.manager.options import Options
    from goodput_operator.reconcile.actions import Decision
    from goodput_operator.reconcile.observe import Collector
    from goodput_operator.reconcile.snapshot import Snapshot

__all__ = ["MIN_KEY_BYTES", "Operator", "read_key", "require_served"]

_log = logging.getLogger(__name__)
MIN_KEY_BYTES: Final = 32
_MAX_KEY_BYTES: Final = 4096
_CALL_NS: Final = 10 * NS_PER_S
_RELOGIN_S: Final = 2
_LEASE_CALL_NS: Final = 2 * NS_PER_S
"""Short enough for several calls within the time in which a leader must renew the Lease."""
_YOUNG_OBJECTS: Final = 100_000
"""Threshold of the garbage collector's young generation: the objects of several reconciliations.
With Python's default of 700, the objects of a waiting reconciliation become old before the
reconciliation ends, so that the millions of cached objects are searched every few seconds."""


class Operator:
    """One operator process.

    Args:
        options: settings of the operator.
        decide: returns the decision on a snapshot.
        measure: creates the collector of measurements for an HTTP session.
        clock: source of monotonic and calendar time.
        on_failure: called once when the operator fails; `failure` then holds the error.
    """

    def __init__(
        self,
        options: Options,
        *,
        decide: Callable[[Snapshot], Decision],
        measure: Callable[[aiohttp.ClientSession], Collector],
        clock: ClockSource,
        on_failure: Callable[[], None],
    ) -> None:
        self._options = options
        self._decide = decide
        self._measure = measure
        self._clock = clock
        self._on_failure = on_failure
        self._fence = Fence(clock)
        self._metrics = OperatorMetrics()
        self._queue: WorkQueue[OwnerKey] = WorkQueue(BackOff(seed=clock.unix_ns()))
        self._stack = AsyncExitStack()
        self._task: asyncio.Task[None] | None = None
        self._workers_task: asyncio.Task[None] | None = None
        self._api: ApiClient | None = None
        self._reconciler: Reconciler | None = None
        self._replays: ReplayReconciler | None = None
        self._logged_in = False
        self._leading = False
        self._workers: Workers[OwnerKey] = Workers(
            queue=self._queue, reconcile=self._reconcile, clock=clock, count=options.workers
        )
        self._watched = {
            kind.path(namespace): (kind.name, namespace)
            for kind in WATCHED
            for namespace in options.namespaces or ("",)
        }
        self._cache = Cache(self._watched.values())
        self._health = Health(
            clock=clock,
            paths=self._watched,
            fence=self._fence,
            workers=self._workers,
        )
        self.failure: BaseException | None = None
        """The error that ended the operator; None if it has not failed."""

    async def start(self) -> None:
        """Connect, serve the probes, and join the election.

        Raises:
            GoodputError: a setting is invalid, or the cluster cannot be reached.
        """
        options, clock = self._options, self._clock
        open_files = raise_open_files()
        _, *older = gc.get_threshold()
        gc.set_threshold(_YOUNG_OBJECTS, *older)
        key = read_key(options.key_file)
        api = await self._stack.enter_async_context(await connect(options.kubeconfig))
        self._api = api
        client = Client(api, fence=self._fence, timeout_ns=_CALL_NS, count=self._metrics.count_call)
        await require_served(client)
        session = await self._stack.enter_async_context(session_for_pods())
        registries = await self._stack.enter_async_context(session_for_registries())
        measure = self._measure(session)
        recorder = EventRecorder(client, clock=clock, instance=options.identity)
        self._replays = ReplayReconciler(
            cache=self._cache,
            client=client,
            shards=ShardClient(session, fence=self._fence, key=key),
            recorder=recorder,
            installation=options.installation,
            clock=clock,
            key=key,
        )
        self._reconciler = Reconciler(
            cache=self._cache,
            observer=Observer(
                cache=self._cache,
                client=client,
                measure=measure,
                read_gate=partial(read_gate_state, session),
                resolve_tag=RegistryClient(registries, options.registries).resolve,
                clock=clock,
            ),
            decide=self._decide,
            applier=Applier(
                client=client,
                pusher=LimitsPusher(session, fence=self._fence, key=key),
                recorder=recorder,
                key=key,
            ),
            measure=measure,
            metrics=self._metrics,
        )
        probes = ProbeServer(self._health, self._metrics, lambda: list_services(self._cache))
        port = await probes.start(options.probe_host, options.probe_port)
        self._stack.push_async_callback(probes.stop)
        lock = FencingLock(
            LeaseClient(api, timeout_ns=_LEASE_CALL_NS, count=self._metrics.count_call),
            name=options.lease_name,
            namespace=options.lease_namespace,
            identity=options.identity,
            fence=self._fence,
            clock=clock,
            times=LeaseTimes(),
        )
        self._task = asyncio.create_task(self._supervise(lock), name="operator")
        _log.info(
            "started",
            extra={"probe_port": port, "identity": options.identity, "open_files": open_files},
        )

    async def stop(self) -> None:
        """Stop the workers, release the Lease, and close connections."""
        # In this order, so that no write is in flight when another operator takes the Lease.
        for task in (self._workers_task, self._task):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._stack.aclose()
        _log.info("stopped")

    async def login(self) -> kopf.AiohttpSession:
        """Return a session for Kopf's watches, after a pause unless it is the first.

        Kopf logs in again whenever the API server responds with 401, for example while the server
        starts. Kopf then retries all watches at once.
        """
        assert self._api is not None, "Kopf logs in after its start-up handlers"
        if self._logged_in:
            await asyncio.sleep(_RELOGIN_S)
        self._logged_in = True
        return await watch_session(
            self._api, on_request=self._health.note_watch, on_list=self._store_list
        )

    def store_event(self, body: Any, *, deleted: bool) -> None:
        """Store the object of a watch event in the cache, or remove it."""
        self._cache.update(body, deleted=deleted)
        self._health.note_event()

    def enqueue(self, key: OwnerKey) -> None:
        """Request a reconciliation if this operator leads and the cache is complete."""
        if self._leading and self._cache.complete:
            self._workers.add(key)

    def _store_list(self, path: str, content: Any) -> None:
        """Store a list in the cache before Kopf reads it; ignore responses of other paths."""
        if path not in self._watched:
            return
        was_complete = self._cache.complete
        changed: Iterable[OwnerKey] = self._cache.replace(*self._watched[path], content)
        for key in changed if was_complete else self._owners():
            self.enqueue(key)

    def _owners(self) -> list[OwnerKey]:
        """Return the keys of all services and replays."""
        return [*self._cache.services(), *self._cache.replays()]

    async def _reconcile(self, key: OwnerKey) -> Result:
        assert self._reconciler is not None, "workers start after the reconciler"
        if isinstance(key, ReplayKey):
            assert self._replays is not None, "workers start after the reconciler"
            return await self._replays.reconcile(key)
        return await self._reconciler.reconcile(key)

    async def _supervise(self, lock: FencingLock) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:

                def leading() -> None:
                    self._leading = True
                    _log.info("leading", extra={"identity": lock.identity})
                    for key in self._owners():
                        self.enqueue(key)
                    self._workers_task = tasks.create_task(self._workers.run(), name="workers")

                await hold_lease(lock, leading=leading)
        except Exception as error:  # noqa: BLE001 - any error ends the process
            self._fail(root_of(error))

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        _log.error("ended", extra={"reason": str(error)})
        self._on_failure()


async def require_served(client: Client) -> None:
    """Check that the API server serves LLMServices and TraceReplays.

    Raises:
        UnreachableError: the API server does not serve them, or cannot be reached.
    """
    response = await client.discover(LLMSERVICE)
    if isinstance(response, FailedCall):
        if not response.not_found:
            raise UnreachableError(f"the cluster cannot be used: {response.message}")
        served: set[str] = set()
    else:
        served = {resource["name"] for resource in response.get("resources") or ()}
    for kind in (LLMSERVICE, TRACEREPLAY):
        if kind.plural not in served:
            raise UnreachableError(
                f"the API server does not serve {kind.name} of {kind.api_version}; install its "
                "custom resource definition first"
            )


def read_key(path: Path) -> bytes:
    """Read the operator's key from the mounted Secret.

    Raises:
        InputError: the file cannot be read or is too short.
    """
    try:
        with path.open("rb") as file:
            key = file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}; mount the Secret with the operator's key "
            "there, or name the file with --key-file"
        ) from error
    if len(key) < MIN_KEY_BYTES:
        raise InputError(
            f"{path}: has {len(key)} bytes; a key needs at least {MIN_KEY_BYTES}, such as "
            f"`head -c {MIN_KEY_BYTES} /dev/urandom` writes"
        )
    return key
