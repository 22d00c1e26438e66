"""The lock under the election: each renewal moves the fence, every doubt closes it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord

from goodput_core.units import NS_PER_S
from goodput_operator.kube.client import FailedCall
from goodput_operator.kube.errors import LeaseLostError
from goodput_operator.kube.fence import Fence
from goodput_operator.kube.lease import FencingLock, LeaseTimes, hold_lease

RECORD = LeaderElectionRecord("ignored", "15", "2026-01-01 00:00:00", "2026-01-01 00:00:00")


class Lease:
    """One Lease and its resource version; changes with an old version are refused."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] | None = None
        self.broken: FailedCall | None = None
        self.slow_ns = 0
        self.clock: Any = None

    async def read(self, *_: object) -> Any:
        if self.broken:
            return self.broken
        missing = FailedCall(status=404, reason="NotFound", message="no such lease")
        return missing if self.stored is None else json.loads(json.dumps(self.stored))

    async def create_lease(self, _: str, body: Any) -> Any:
        return self._store(body, "1")

    async def replace_lease(self, _: str, __: str, body: Any) -> Any:
        assert self.stored is not None
        version = self.stored["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != version:
            return FailedCall(status=409, reason="Conflict", message="changed meanwhile")
        return self._store(body, str(int(version) + 1))

    def _store(self, body: Any, version: str) -> Any:
        self.clock.ns += self.slow_ns
        if self.broken:
            return self.broken
        self.stored = {**body, "metadata": {**body["metadata"], "resourceVersion": version}}
        return self.stored


@pytest.fixture
def lease(memory: Any) -> Lease:
    lease = Lease()
    lease.clock = memory.clock
    return lease


def lock(memory: Any, lease: Lease, identity: str = "me") -> tuple[FencingLock, Fence]:
    fence = Fence(memory.clock)
    made = FencingLock(
        lease,  # type: ignore[arg-type]
        name="goodput-operator",
        namespace="ns",
        identity=identity,
        fence=fence,
        clock=memory.clock,
        times=LeaseTimes(),
    )
    return made, fence


async def renewed(made: FencingLock) -> bool:
    found, _ = await made.get("goodput-operator", "ns")
    change = made.update if found else made.create
    return await change("goodput-operator", "ns", RECORD)


async def test_the_fence_is_open_for_less_than_the_lease_from_when_the_renewal_began(
    memory: Any, lease: Lease
) -> None:
    mine, fence = lock(memory, lease)
    begun_ns, lease.slow_ns = memory.clock.ns, NS_PER_S
    assert await renewed(mine)
    assert fence.remaining_ns() == 18 * NS_PER_S, "20, less 1 of margin and 1 of waiting"
    memory.clock.ns = begun_ns + 19 * NS_PER_S
    assert not fence.open, "time alone closes it"


async def test_a_lease_records_holder_times_and_transitions(memory: Any, lease: Lease) -> None:
    mine, _ = lock(memory, lease)
    await renewed(mine)
    assert lease.stored is not None
    first = dict(lease.stored["spec"])
    memory.clock.ns += 2 * NS_PER_S
    await renewed(mine)
    second = dict(lease.stored["spec"])
    assert second["acquireTime"] == first["acquireTime"]
    assert second["renewTime"] > first["renewTime"]
    assert second["leaseTransitions"] == 0
    theirs, _ = lock(memory, lease, "them")
    await renewed(theirs)
    third = lease.stored["spec"]
    assert (third["holderIdentity"], third["leaseTransitions"]) == ("them", 1)
    assert third["acquireTime"] == third["renewTime"]


async def test_the_fence_closes_when_another_holds_the_lease(memory: Any, lease: Lease) -> None:
    mine, fence = lock(memory, lease)
    await renewed(mine)
    theirs, _ = lock(memory, lease, "them")
    await renewed(theirs)
    assert fence.open, "nothing was heard of it yet"
    with pytest.raises(LeaseLostError, match="was taken by them"):
        await mine.get("goodput-operator", "ns")
    assert not fence.open


@pytest.mark.parametrize("then", ["taken", "released", "deleted"])
async def test_a_lease_that_has_been_anothers_is_never_ours_again(
    memory: Any, lease: Lease, then: str
) -> None:
    mine, fence = lock(memory, lease)
    await renewed(mine)
    # Frozen for a while, during which another takes over.
    theirs, _ = lock(memory, lease, "them")
    await renewed(theirs)
    if then != "taken":
        await theirs.release()
    if then == "deleted":
        lease.stored = None
    kept = lease.stored
    with pytest.raises(LeaseLostError, match=f"ns/goodput-operator, which was {then}"):
        await hold_lease(mine, leading=lambda: pytest.fail("it does not lead again"))
    assert not fence.open
    assert lease.stored == kept, "it is left as it was found"


async def test_a_renewal_that_lost_the_race_moves_nothing(memory: Any, lease: Lease) -> None:
    mine, fence = lock(memory, lease)
    await renewed(mine)
    left_ns = fence.remaining_ns()
    await mine.get("goodput-operator", "ns")
    theirs, _ = lock(memory, lease, "them")
    await renewed(theirs)
    assert not await mine.update("goodput-operator", "ns", RECORD)
    assert fence.remaining_ns() == left_ns
    assert mine.last_failure == "changed meanwhile"


@pytest.mark.parametrize("status", [0, 429, 503])
async def test_a_failing_api_server_is_a_failed_attempt_and_not_the_end(
    memory: Any, lease: Lease, status: int
) -> None:
    mine, fence = lock(memory, lease)
    await renewed(mine)
    left_ns = fence.remaining_ns()
    lease.broken = FailedCall(status=status, reason="Unreachable", message="away")
    found, why = await mine.get("goodput-operator", "ns")
    assert not found
    assert isinstance(why, ApiException)
    assert json.loads(why.body or "{}")["code"] == status, "the election reads the status there"
    assert not await mine.update("goodput-operator", "ns", RECORD)
    assert fence.remaining_ns() == left_ns


async def test_a_released_lease_is_free_at_once_and_only_its_holder_releases_it(
    memory: Any, lease: Lease
) -> None:
    mine, _ = lock(memory, lease)
    theirs, _ = lock(memory, lease, "them")
    await renewed(mine)
    await theirs.release()
    assert lease.stored is not None
    assert lease.stored["spec"]["holderIdentity"] == "me"
    await mine.release()
    assert lease.stored["spec"]["holderIdentity"] == ""
    found, record = await theirs.get("goodput-operator", "ns")
    assert found
    assert isinstance(record, LeaderElectionRecord)
    assert record.holder_identity is None, "the election takes such a Lease without waiting"


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        pytest.param("9", 0, "lease not released", id="changed after it was read"),
        pytest.param("1", 503, "lease not released", id="not readable"),
        pytest.param("1", 0, "lease released", id="given back"),
    ],
)
async def test_a_lease_is_said_to_be_released_once_it_is(
    memory: Any,
    lease: Lease,
    version: str,
    status: int,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine, _ = lock(memory, lease)
    await renewed(mine)
    read = lease.read

    async def reading(*words: object) -> Any:
        found = await read(*words)
        assert lease.stored is not None
        lease.stored["metadata"]["resourceVersion"] = version
        return found

    lease.read = reading  # type: ignore[method-assign]
    if status:
        lease.broken = FailedCall(status=status, reason="Unreachable", message="away")
    caplog.set_level("INFO", "goodput_operator.kube.lease")
    await mine.release()
    assert caplog.messages == [said]


@pytest.mark.parametrize(
    ("holder", "takes"),
    [
        pytest.param("me", True, id="its own predecessor, which has ended"),
        pytest.param("them", False, id="another holder"),
    ],
)
async def test_a_lease_that_is_held_is_taken_at_once_by_its_holder_only(
    memory: Any, lease: Lease, holder: str, takes: bool
) -> None:
    before, _ = lock(memory, lease, holder)
    await renewed(before)
    asked = asyncio.Event()
    read = lease.read

    async def reading(*words: object) -> Any:
        asked.set()
        return await read(*words)

    lease.read = reading  # type: ignore[method-assign]
    led: list[bool] = []
    mine, fence = lock(memory, lease)
    standing = asyncio.create_task(hold_lease(mine, leading=lambda: led.append(True)))
    await asked.wait()
    for _ in range(10):  # what follows the answer needs no time
        await asyncio.sleep(0)
    assert bool(led) is fence.open is takes
    standing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await standing
