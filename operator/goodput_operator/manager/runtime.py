"""The running operator: put together once, supervised, and ended by the first part that ends.

Kopf owns the event loop's start and end (`goodput operator` and `kopf run` alike), so this is
started and stopped by its handlers.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import InputError, UnreachableError, root_of
from goodput_core.process import raise_open_files
from goodput_core.units import NS_PER_S
from goodput_operator.backoff import BackOff
from goodput_operator.control.admin_ports import session_for_pods
from goodput_operator.kube.cache import Cache
from goodput_operator.kube.client import Client, LeaseClient, Refusal
from goodput_operator.kube.fence import Fence
from goodput_operator.kube.lease import FencingLock, LeaseTimes, hold_lease
from goodput_operator.kube.objects import LLMSERVICE
from goodput_operator.kube.watch import WATCHED, connect, watch_session
from goodput_operator.manager.health import Health
from goodput_operator.manager.probes import Probes
from goodput_operator.manager.process_limits import collect_garbage_seldom
from goodput_operator.reconcile.apply import Applier, LimitsPusher
from goodput_operator.reconcile.event_recorder import EventRecorder
from goodput_operator.reconcile.metrics import OperatorMetrics
from goodput_operator.reconcile.observe import Observer
from goodput_operator.reconcile.reconciler import Reconciler
from goodput_operator.reconcile.work_queue import RateLimit, Result, Workers, WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import aiohttp
    import kopf
    from kubernetes.aio.client import ApiClient

    from goodput_operator.kube.cache import Key
    from goodput_operator.kube.fence import Clock
    from goodput_operator.manager.options import Options
    from goodput_operator.reconcile.actions import Decision
    from goodput_operator.reconcile.observe import Measure
    from goodput_operator.reconcile.snapshot import Snapshot

__all__ = ["LEAST_KEY_BYTES", "Operator", "read_key", "require_served"]

_log = logging.getLogger(__name__)
LEAST_KEY_BYTES: Final = 32
_MOST_KEY_BYTES: Final = 4096
_CALL_NS: Final = 10 * NS_PER_S
_LOGIN_AGAIN_S: Final = 2
_LEASE_CALL_NS: Final = 2 * NS_PER_S
"""Two of them and a pause fit several times into the time that a leader has to renew."""


class Operator:
    """One operator process.

    Args:
        options: how it runs.
        decide: from a snapshot to a decision.
        measure: gathers numbers; made with a session of HTTP.
        clock: both times.
        ended: called once when it cannot go on; `failure` then says why.
    """

    def __init__(
        self,
        options: Options,
        *,
        decide: Callable[[Snapshot], Decision],
        measure: Callable[[aiohttp.ClientSession], Measure],
        clock: Clock,
        ended: Callable[[], None],
    ) -> None:
        self._options = options
        self._decide = decide
        self._measure = measure
        self._clock = clock
        self._ended = ended
        self._fence = Fence(clock)
        self._metrics = OperatorMetrics()
        self._queue: WorkQueue[Key] = WorkQueue(RateLimit(back_off=BackOff(seed=clock.unix_ns())))
        self._stack = AsyncExitStack()
        self._task: asyncio.Task[None] | None = None
        self._working: asyncio.Task[None] | None = None
        self._api: ApiClient | None = None
        self._reconciler: Reconciler | None = None
        self._logged_in = False
        self._leading = False
        self._workers: Workers[Key] = Workers(
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
        """Why it ended by itself."""

    async def start(self) -> None:
        """Connect, listen, and stand for election.

        Raises:
            GoodputError: it cannot run as asked.
        """
        options, clock = self._options, self._clock
        files = raise_open_files()
        collect_garbage_seldom()
        key = read_key(options.key_file)
        api = await self._stack.enter_async_context(await connect(options.kubeconfig))
        self._api = api
        client = Client(api, fence=self._fence, timeout_ns=_CALL_NS, count=self._metrics.call)
        await require_served(client)
        session = await self._stack.enter_async_context(session_for_pods())
        measure = self._measure(session)
        self._reconciler = Reconciler(
            cache=self._cache,
            observer=Observer(cache=self._cache, client=client, measure=measure, clock=clock),
            decide=self._decide,
            applier=Applier(
                client=client,
                pusher=LimitsPusher(session, fence=self._fence, key=key),
                recorder=EventRecorder(client, clock=clock, instance=options.identity),
                key=key,
            ),
            measure=measure,
            metrics=self._metrics,
        )
        probes = Probes(self._health, self._metrics)
        port = await probes.start(options.probe_host, options.probe_port)
        self._stack.push_async_callback(probes.stop)
        lock = FencingLock(
            LeaseClient(api, timeout_ns=_LEASE_CALL_NS, count=self._metrics.call),
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
            extra={"probe_port": port, "identity": options.identity, "open_files": files},
        )

    async def stop(self) -> None:
        """Stop working, give the Lease back, and close what was opened."""
        # In this order: no write of ours is on its way when another operator begins.
        for task in (self._working, self._task):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._stack.aclose()
        _log.info("stopped")

    async def login(self) -> kopf.AiohttpSession:
        """What Kopf watches with; from the second time on, after a pause.

        Kopf asks for another session whenever the API server knows nobody, as it does while it
        starts, and tries all watches at once with each.
        """
        assert self._api is not None, "Kopf logs in after its start-up handlers"
        if self._logged_in:
            await asyncio.sleep(_LOGIN_AGAIN_S)
        self._logged_in = True
        return await watch_session(self._api, requested=self._health.heard, listed=self._listed)

    def told(self, body: Any, *, deleted: bool) -> None:
        """Kopf delivered an event."""
        self._cache.update(body, deleted=deleted)
        self._health.event()

    def wanted(self, key: Key) -> None:
        """A service may want a turn; only the leader gives any, and only once all is known."""
        if self._leading and self._cache.complete:
            self._workers.add(key)

    def _listed(self, path: str, content: Any) -> None:
        """Kopf is about to take in a list; it asks for other things as well."""
        if path not in self._watched:
            return
        before = self._cache.complete
        changed: Iterable[Key] = self._cache.replace(*self._watched[path], content)
        for key in changed if before else self._cache.services():
            self.wanted(key)

    async def _reconcile(self, key: Key) -> Result:
        assert self._reconciler is not None, "workers start after all the rest"
        return await self._reconciler.reconcile(key)

    async def _supervise(self, lock: FencingLock) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:

                def leading() -> None:
                    self._leading = True
                    _log.info("leading", extra={"identity": lock.identity})
                    for key in self._cache.services():
                        self.wanted(key)
                    self._working = tasks.create_task(self._workers.run(), name="workers")

                await hold_lease(lock, leading=leading)
        except Exception as error:  # noqa: BLE001 - whatever it is, the process ends by it
            self._fail(root_of(error))

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        _log.error("ended", extra={"reason": str(error)})
        self._ended()


async def require_served(client: Client) -> None:
    """Check that there is anything to look after.

    Raises:
        UnreachableError: the API server does not answer, or knows no LLMServices.
    """
    answer = await client.discover(LLMSERVICE)
    if not isinstance(answer, Refusal):
        return
    if answer.not_found:
        raise UnreachableError(
            f"the API server knows no {LLMSERVICE.name} of {LLMSERVICE.api_version}; install its "
            "custom resource definition first"
        )
    raise UnreachableError(f"the cluster cannot be used: {answer.message}")


def read_key(path: Path) -> bytes:
    """Read the operator's key from the mounted Secret.

    Raises:
        InputError: the file cannot be read or is too short.
    """
    try:
        with path.open("rb") as file:
            key = file.read(_MOST_KEY_BYTES)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}; mount the Secret with the operator's key "
            "there, or name the file with --key-file"
        ) from error
    if len(key) < LEAST_KEY_BYTES:
        raise InputError(
            f"{path}: has {len(key)} bytes; a key needs at least {LEAST_KEY_BYTES}, such as "
            f"`head -c {LEAST_KEY_BYTES} /dev/urandom` writes"
        )
    return key
