"""The Lease: of all operators, one writes.

The election is `kubernetes.aio.leaderelection`'s. The lock under it is ours, because the one that
comes with it makes calls without time-outs, lets broken connections end the election, and dates
renewals in local time. Each renewal moves our `Fence`; nothing else does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.baselock import BaseLock

from goodput_core.units import NS_PER_S
from goodput_operator.kube.answers import Refusal
from goodput_operator.kube.errors import LeaseLostError
from goodput_operator.kube.kinds import LEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from goodput_operator.kube.answers import Answer
    from goodput_operator.kube.client import LeaseCalls
    from goodput_operator.kube.clock import Clock
    from goodput_operator.kube.fence import Fence
    from goodput_operator.kube.objects import Object

__all__ = ["FencingLock", "LeaseTimes", "hold_lease"]

_log = logging.getLogger(__name__)
_MARGIN_NS: Final = NS_PER_S
"""Clocks of two machines need not run equally fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """The times of the election, in whole seconds as the Lease keeps them.

    A leader that dies is followed after `duration_s` and two tries, so within 25 s; an API server
    that is away for less than `renew_s` costs nobody the Lease.

    Args:
        duration_s: how long others wait after the last renewal that they saw.
        renew_s: how long the leader tries to renew before it gives up.
        retry_s: between two tries, and between two renewals.
    """

    duration_s: int = 20
    renew_s: int = 15
    retry_s: int = 2


async def hold_lease(lock: FencingLock, *, leading: Callable[[], None]) -> None:
    """Wait for the Lease, hold it, and give it back when cancelled.

    Args:
        lock: the Lease.
        leading: called once, when the Lease is ours.

    Raises:
        LeaseLostError: it was ours and is not any more.
    """
    times = lock.times

    async def started() -> None:
        leading()

    election = LeaderElection(
        Config(
            lock,
            lease_duration=times.duration_s,
            renew_deadline=times.renew_s,
            retry_period=times.retry_s,
            onstarted_leading=started,
            onstopped_leading=_nothing,
        )
    )
    try:
        await election.run()
    except asyncio.CancelledError:
        lock.fence.close()
        # Others need not wait for the Lease to run out.
        with contextlib.suppress(TimeoutError):
            await asyncio.shield(asyncio.wait_for(lock.release(), times.retry_s))
        raise
    lock.fence.close()
    raise LeaseLostError(
        f"the Lease {lock.namespace}/{lock.name} was not renewed within {times.renew_s} s: "
        f"{lock.trouble or 'no try succeeded'}; another operator may write now"
    )


async def _nothing() -> None:
    """The election calls it after a loss; `hold_lease` itself says what that means."""


class FencingLock(BaseLock):
    """A Lease as the election's lock: plain dictionaries, bounded calls, refusals as values.

    Args:
        calls: the API server.
        name: of the Lease.
        namespace: of the Lease.
        identity: of this process, like no other's that runs. A Lease that carries it already was
            left by a predecessor that has ended, and is taken at once.
        fence: opened by each renewal.
        clock: both times.
        times: of the election.
    """

    def __init__(
        self,
        calls: LeaseCalls,
        *,
        name: str,
        namespace: str,
        identity: str,
        fence: Fence,
        clock: Clock,
        times: LeaseTimes,
    ) -> None:
        super().__init__(name, namespace, identity)
        self.fence = fence
        self.times = times
        self._calls = calls
        self._clock = clock
        self._seen: Object | None = None
        self._has_held = False
        self.trouble = ""
        """What the last try failed of."""

    async def get(
        self, name: str, namespace: str
    ) -> tuple[bool, LeaderElectionRecord] | tuple[bool, Exception]:
        """The record in the Lease, or why there is none.

        Raises:
            LeaseLostError: it was ours, and has been another's since or may have been.
        """
        answer = await self._calls.read(LEASE, namespace, name)
        if isinstance(answer, Refusal):
            if answer.gone:
                self._not_ours("deleted")
            return False, self._failure(answer)
        self._seen = answer
        spec = answer.get("spec") or {}
        holder = spec.get("holderIdentity") or None
        if holder != self.identity:
            self._not_ours(f"taken by {holder}" if holder else "given back by another operator")
        return True, LeaderElectionRecord(
            holder,
            str(spec["leaseDurationSeconds"]) if spec.get("leaseDurationSeconds") else None,
            spec.get("acquireTime"),
            spec.get("renewTime"),
        )

    async def create(
        self, name: str, namespace: str, election_record: LeaderElectionRecord
    ) -> bool:
        """Make the Lease, ours from the start."""
        del election_record  # dates in local time; ours say when this write was made
        begun_ns = self._clock.now_ns()
        answer = await self._calls.create_lease(
            namespace, {"metadata": {"name": name}, "spec": self._spec({})}
        )
        return self._held(answer, begun_ns)

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """Take or renew the Lease, unless somebody changed it since it was read."""
        del updated_record  # as in `create`
        assert self._seen is not None, "the election reads before it writes"
        begun_ns = self._clock.now_ns()
        body = {**self._seen, "spec": self._spec(self._seen.get("spec") or {})}
        return self._held(await self._calls.replace_lease(namespace, name, body), begun_ns)

    async def release(self) -> None:
        """Give the Lease back, if it is still ours."""
        found = await self._calls.read(LEASE, self.namespace, self.name)
        if isinstance(found, Refusal):
            _log.warning("lease not released", extra={"problem": found.message})
            return
        held: Mapping[str, Any] = found.get("spec") or {}
        if held.get("holderIdentity") != self.identity:
            return
        body = {**found, "spec": {**held, "holderIdentity": ""}}
        answer = await self._calls.replace_lease(self.namespace, self.name, body)
        if isinstance(answer, Refusal):
            _log.warning("lease not released", extra={"problem": answer.message})
        else:
            _log.info("lease released")

    def _not_ours(self, how: str) -> None:
        """Whoever has it, or had it meanwhile, writes, however much of our own time is left."""
        self.fence.close()
        if self._has_held:
            # What we remember of services is from before; a fresh process remembers nothing.
            raise LeaseLostError(
                f"the Lease {self.namespace}/{self.name} was ours and has been {how}"
            )

    def _spec(self, before: Mapping[str, Any]) -> dict[str, Any]:
        now = datetime.fromtimestamp(self._clock.unix_ns() / NS_PER_S, UTC)
        stamp = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
        same = before.get("holderIdentity") == self.identity
        changes = int(before.get("leaseTransitions") or 0) + (0 if same or not before else 1)
        return {
            **before,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self.times.duration_s,
            "acquireTime": before.get("acquireTime") if same else stamp,
            "renewTime": stamp,
            "leaseTransitions": changes,
        }

    def _held(self, answer: Answer, begun_ns: int) -> bool:
        if isinstance(answer, Refusal):
            self._failure(answer)
            return False
        self._seen = answer
        self._has_held = True
        # From when it was asked, not answered: others count from when they see it.
        self.fence.extend(begun_ns + self.times.duration_s * NS_PER_S - _MARGIN_NS)
        return True

    def _failure(self, refusal: Refusal) -> ApiException:
        self.trouble = refusal.message
        if not refusal.gone:
            _log.warning("lease not renewed", extra={"problem": refusal.message})
        failure = ApiException(status=refusal.status, reason=refusal.reason)
        # The election looks for the status in the body.
        failure.body = json.dumps({"code": refusal.status})
        return failure
