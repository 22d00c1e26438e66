"""The lock of the election: each renewal extends the fence, and any doubt closes it."""

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
    """One Lease and its resource version; changes of an old version are rejected."""

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
def lease(bench: Any) -> Lease:
    lease = Lease()
    lease.clock = bench.clock
    return lease


def lock(bench: Any, lease: Lease, identity: str = "me") -> tuple[FencingLock, Fence]:
    fence = Fence(bench.clock)
    new_lock = FencingLock(
        lease,  # type: ignore[arg-type]
        name="goodput-operator",
        namespace="ns",
        identity=identity,
        fence=fence,
        clock=bench.clock,
        times=LeaseTimes(),
    )
    return new_lock, fence


async def renew(new_lock: FencingLock) -> bool:
    found, _ = await new_lock.get("goodput-operator", "ns")
    change = new_lock.update if found else new_lock.create
    return await change("goodput-operator", "ns", RECORD)


async def test_the_fence_closes_before_the_lease_expires_counted_from_the_start_of_the_renewal(
    bench: Any, lease: Lease
) -> None:
    mine, fence = lock(bench, lease)
    begun_ns, lease.slow_ns = bench.clock.ns, NS_PER_S
    assert await renew(mine)
    assert fence.remaining_ns() == 18 * NS_PER_S, "20 s less 1 s of margin and 1 s of waiting"
    bench.clock.ns = begun_ns + 19 * NS_PER_S
    assert not fence.open, "the deadline closes it"


async def test_a_lease_records_holder_times_and_transitions(bench: Any, lease: Lease) -> None:
    mine, _ = lock(bench, lease)
    await renew(mine)
    assert lease.stored is not None
    first = dict(lease.stored["spec"])
    bench.clock.ns += 2 * NS_PER_S
    await renew(mine)
    second = dict(lease.stored["spec"])
    assert second["acquireTime"] == first["acquireTime"]
    assert second["renewTime"] > first["renewTime"]
    assert second["leaseTransitions"] == 0
    theirs, _ = lock(bench, lease, "them")
    await renew(theirs)
    third = lease.stored["spec"]
    assert (third["holderIdentity"], third["leaseTransitions"]) == ("them", 1)
    assert third["acquireTime"] == third["renewTime"]


async def test_the_fence_closes_when_another_operator_holds_the_lease(
    bench: Any, lease: Lease
) -> None:
    mine, fence = lock(bench, lease)
    await renew(mine)
    theirs, _ = lock(bench, lease, "them")
    await renew(theirs)
    assert fence.open, "the loss was not observed yet"
    with pytest.raises(LeaseLostError, match="was taken by them"):
        await mine.get("goodput-operator", "ns")
    assert not fence.open


@pytest.mark.parametrize("then", ["taken", "released", "deleted"])
async def test_a_lease_lost_to_another_operator_is_never_acquired_again(
    bench: Any, lease: Lease, then: str
) -> None:
    mine, fence = lock(bench, lease)
    await renew(mine)
    # The process is suspended while another operator acquires the Lease.
    theirs, _ = lock(bench, lease, "them")
    await renew(theirs)
    if then != "taken":
        await theirs.release()
    if then == "deleted":
        lease.stored = None
    kept = lease.stored
    with pytest.raises(LeaseLostError, match=f"ns/goodput-operator, which was {then}"):
        await hold_lease(mine, leading=lambda: pytest.fail("it must not lead again"))
    assert not fence.open
    assert lease.stored == kept, "the Lease stays unchanged"


async def test_a_conflicting_renewal_does_not_extend_the_fence(bench: Any, lease: Lease) -> None:
    mine, fence = lock(bench, lease)
    await renew(mine)
    left_ns = fence.remaining_ns()
    await mine.get("goodput-operator", "ns")
    theirs, _ = lock(bench, lease, "them")
    await renew(theirs)
    assert not await mine.update("goodput-operator", "ns", RECORD)
    assert fence.remaining_ns() == left_ns
    assert mine.last_failure == "changed meanwhile"


@pytest.mark.parametrize("status", [0, 429, 503])
async def test_a_failing_api_server_is_a_failed_attempt_that_does_not_end_the_election(
    bench: Any, lease: Lease, status: int
) -> None:
    mine, fence = lock(bench, lease)
    await renew(mine)
    left_ns = fence.remaining_ns()
    lease.broken = FailedCall(status=status, reason="Unreachable", message="away")
    found, why = await mine.get("goodput-operator", "ns")
    assert not found
    assert isinstance(why, ApiException)
    assert json.loads(why.body or "{}")["code"] == status, "the election reads the status there"
    assert not await mine.update("goodput-operator", "ns", RECORD)
    assert fence.remaining_ns() == left_ns


async def test_only_the_holder_releases_a_lease_and_it_is_free_at_once(
    bench: Any, lease: Lease
) -> None:
    mine, _ = lock(bench, lease)
    theirs, _ = lock(bench, lease, "them")
    await renew(mine)
    await theirs.release()
    assert lease.stored is not None
    assert lease.stored["spec"]["holderIdentity"] == "me"
    await mine.release()
    assert lease.stored["spec"]["holderIdentity"] == ""
    found, record = await theirs.get("goodput-operator", "ns")
    assert found
    assert isinstance(record, LeaderElectionRecord)
    assert record.holder_identity is None, "the election acquires such a Lease without waiting"


@pytest.mark.parametrize(
    ("version", "status", "logged"),
    [
        pytest.param("9", 0, "lease not released", id="changed after it was read"),
        pytest.param("1", 503, "lease not released", id="not readable"),
        pytest.param("1", 0, "lease released", id="released"),
    ],
)
async def test_a_release_is_logged_only_after_it_succeeded(
    bench: Any,
    lease: Lease,
    version: str,
    status: int,
    logged: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine, _ = lock(bench, lease)
    await renew(mine)
    read = lease.read

    async def reading(*arguments: object) -> Any:
        found = await read(*arguments)
        assert lease.stored is not None
        lease.stored["metadata"]["resourceVersion"] = version
        return found

    lease.read = reading  # type: ignore[method-assign]
    if status:
        lease.broken = FailedCall(status=status, reason="Unreachable", message="away")
    caplog.set_level("INFO", "goodput_operator.kube.lease")
    await mine.release()
    assert caplog.messages == [logged]


@pytest.mark.parametrize(
    ("holder", "acquires"),
    [
        pytest.param("me", True, id="its own ended predecessor"),
        pytest.param("them", False, id="another holder"),
    ],
)
async def test_a_held_lease_is_acquired_at_once_only_under_the_same_identity(
    bench: Any, lease: Lease, holder: str, acquires: bool
) -> None:
    before, _ = lock(bench, lease, holder)
    await renew(before)
    was_read = asyncio.Event()
    read = lease.read

    async def reading(*arguments: object) -> Any:
        was_read.set()
        return await read(*arguments)

    lease.read = reading  # type: ignore[method-assign]
    led: list[bool] = []
    mine, fence = lock(bench, lease)
    election = asyncio.create_task(hold_lease(mine, leading=lambda: led.append(True)))
    await was_read.wait()
    for _ in range(10):  # steps after the response take no time
        await asyncio.sleep(0)
    assert bool(led) is fence.open is acquires
    election.cancel()
    with pytest.raises(asyncio.CancelledError):
        await election
