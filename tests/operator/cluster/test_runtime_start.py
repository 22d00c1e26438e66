"""The start and the end of the operator: its requirements, and the order of the shutdown."""

from __future__ import annotations

import asyncio
import gc
import resource
from typing import TYPE_CHECKING, Any

import pytest
from kubernetes.aio.client import ApiClient, Configuration

from goodput_core.errors import InputError, UnreachableError
from goodput_operator.kube.lease import FencingLock, LeaseTimes
from goodput_operator.manager.options import parse_options
from goodput_operator.manager.runtime import Operator, require_served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATH = "/apis/goodput.dev/v1alpha1"


async def test_a_missing_resource_definition_is_reported_with_a_remedy(bench: Any) -> None:
    with pytest.raises(UnreachableError, match="install its custom resource definition"):
        await require_served(bench.client)


async def test_a_rejected_discovery_has_the_servers_message(bench: Any) -> None:
    refusal = {"reason": "Forbidden", "message": 'User "op" cannot get path'}
    bench.server.rejections["GET", PATH] = (403, refusal)
    with pytest.raises(UnreachableError, match='User "op" cannot get path'):
        await require_served(bench.client)


async def test_an_api_server_that_serves_the_resources_is_accepted(bench: Any) -> None:
    resources = [{"name": "llmservices"}, {"name": "tracereplays"}]
    bench.server.objects[PATH] = {"kind": "APIResourceList", "resources": resources}
    await require_served(bench.client)


async def test_a_definition_of_an_earlier_release_alone_is_not_enough(bench: Any) -> None:
    resources = [{"name": "llmservices"}, {"name": "llmservices/status"}]
    bench.server.objects[PATH] = {"kind": "APIResourceList", "resources": resources}
    with pytest.raises(UnreachableError, match="does not serve TraceReplay of"):
        await require_served(bench.client)


@pytest.fixture
def operator(bench: Any) -> Operator:
    return Operator(
        parse_options(["--engine-image", "engine:1", "--router-image", "router:1"]),
        decide=lambda _: pytest.fail("a decision"),
        measure=lambda _: pytest.fail("a measurement"),
        clock=bench.clock,
        on_failure=lambda: pytest.fail("the operator failed"),
    )


async def test_repeated_logins_wait_before_watches_are_retried(
    operator: Operator,
) -> None:
    async with ApiClient(Configuration()) as operator._api:
        first = await operator.login()
        again = asyncio.create_task(operator.login())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not again.done()
        again.cancel()
        await first.aiohttp_session.close()


def list_all(operator: Operator, *services: dict[str, Any], version: int = 1) -> None:
    """List each kind once, services first, as Kopf does at its start."""
    for path, (kind, _) in operator._watched.items():
        items = list(services) if kind == "LLMService" else []
        metadata = {"resourceVersion": str(version)}
        operator._store_list(path, {"apiVersion": "v1", "metadata": metadata, "items": items})


SERVICE: dict[str, Any] = {
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "5"}
}
NOTHING: dict[str, Any] = {"apiVersion": "v1", "metadata": {"resourceVersion": "9"}, "items": []}


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "stands by"])
async def test_no_service_is_reconciled_before_all_kinds_are_listed(
    operator: Operator, leads: bool
) -> None:
    operator._leading = leads
    operator._store_list(f"{PATH}/llmservices", {**NOTHING, "items": [SERVICE]})
    operator.enqueue(("ns", "chat"))
    assert operator._workers.queue.waiting() == 0, "its children may exist, but are not listed yet"
    list_all(operator, SERVICE, version=9)
    assert operator._workers.queue.waiting() == leads


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "stands by"])
async def test_a_service_missing_from_a_later_list_is_reconciled(
    operator: Operator, leads: bool
) -> None:
    list_all(operator, SERVICE, version=6)
    operator._leading = leads
    operator._store_list(PATH, {"kind": "APIResourceList"})  # another request of Kopf
    operator._store_list(f"{PATH}/namespaces/elsewhere/llmservices", NOTHING)
    assert operator._workers.queue.waiting() == 0
    operator._store_list(f"{PATH}/llmservices", NOTHING)
    assert operator._workers.queue.waiting() == leads
    assert operator._cache.services() == []


async def test_a_new_leader_reconciles_every_service(operator: Operator) -> None:
    list_all(operator, SERVICE, version=6)
    led = asyncio.Event()

    async def worker() -> None:
        led.set()
        await asyncio.Event().wait()

    operator._workers._work = worker  # type: ignore[method-assign]
    leading = asyncio.create_task(operator._supervise(free_lock(operator)))
    async with asyncio.timeout(10):
        await led.wait()
    assert operator._workers.queue.waiting() == 1
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)


class FreeLease:
    """A Lease without a holder and without competitors."""

    def __init__(self) -> None:
        self.stored: Any = {}

    async def read(self, *_: object) -> Any:
        return self.stored

    async def replace_lease(self, _: str, __: str, body: Any) -> Any:
        self.stored = body
        return body


def free_lock(operator: Operator) -> FencingLock:
    return FencingLock(
        FreeLease(),  # type: ignore[arg-type]
        name="goodput",
        namespace="ns",
        identity="me",
        fence=operator._fence,
        clock=operator._clock,
        times=LeaseTimes(),
    )


async def test_the_error_of_a_worker_ends_the_operator_and_is_stored(operator: Operator) -> None:
    ended: list[bool] = []
    operator._on_failure = lambda: ended.append(True)

    async def worker() -> None:
        raise ValueError("a defect of the queue")

    operator._workers._work = worker  # type: ignore[method-assign]
    await operator._supervise(free_lock(operator))
    assert str(operator.failure) == "a defect of the queue"
    assert ended == [True]


async def test_the_lease_is_released_after_the_last_write_has_ended(operator: Operator) -> None:
    order: list[str] = []

    async def held(what: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append(what)

    operator._task = asyncio.create_task(held("the Lease"))
    operator._workers_task = asyncio.create_task(held("a write"))
    await asyncio.sleep(0)
    await operator.stop()
    assert order == ["a write", "the Lease"]


@pytest.fixture
def few_files() -> Iterator[int]:
    """Lower the limit of open files as container runtimes do, and return its maximum."""
    was, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (was, most))


async def test_the_limit_of_open_files_is_raised_to_its_maximum(
    operator: Operator, few_files: int
) -> None:
    with pytest.raises(InputError, match="key"):
        await operator.start()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few_files, few_files)


@pytest.fixture
def collections_of_old_objects() -> Iterator[Callable[[], int]]:
    """Count collections of old objects, beginning with Python's default thresholds."""
    was = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.collect()
    yield lambda: gc.get_stats()[1]["collections"]
    gc.set_threshold(*was)


async def test_short_lived_objects_stay_in_the_young_generation(
    operator: Operator, collections_of_old_objects: Callable[[], int]
) -> None:
    with pytest.raises(InputError, match="key"):
        await operator.start()
    before = collections_of_old_objects()
    held = [[number] for number in range(50_000)]
    assert len(held) == 50_000
    assert collections_of_old_objects() == before
