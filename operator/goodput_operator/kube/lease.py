"""Leader election by a Lease, so that only one operator writes.

The election is that of `kubernetes.aio.leaderelection`, with a lock of our own. The library's lock
makes calls without time limits, lets a broken connection end the election, and writes renewal times
in local time. Each renewal extends the `Fence`.
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
from goodput_operator.kube.client import FailedCall
from goodput_operator.kube.errors import LeaseLostError
from goodput_operator.kube.objects import LEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from goodput_operator.kube.client import ApiResponse, LeaseClient
    from goodput_operator.kube.fence import ClockSource, Fence
    from goodput_operator.kube.objects import Object

__all__ = ["FencingLock", "LeaseTimes", "hold_lease"]

_log = logging.getLogger(__name__)
_MARGIN_NS: Final = NS_PER_S
"""Allows for clock drift between two machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Times of the election, in whole seconds as the Lease stores them.

    A failed leader is replaced after `duration_s` and two attempts, that is, within 25 s. A leader
    keeps the Lease if the API server is unavailable for less than `renew_s`.

    Args:
        duration_s: time that other operators wait after the last observed renewal.
        renew_s: time after which a leader that cannot renew stops.
        retry_s: time between two attempts, and between two renewals.
    """

    duration_s: int = 20
    renew_s: int = 15
    retry_s: int = 2


async def hold_lease(lock: FencingLock, *, leading: Callable[[], None]) -> None:
    """Acquire the Lease, renew it, and release it when cancelled.

    Args:
        lock: lock of the Lease.
        leading: called once, when the Lease is acquired.

    Raises:
        LeaseLostError: the Lease was acquired and then lost.
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
            onstopped_leading=_ignore_loss,
        )
    )
    try:
        await election.run()
    except asyncio.CancelledError:
        lock.fence.close()
        # Release the Lease, so that the next leader need not wait until it expires.
        with contextlib.suppress(TimeoutError):
            await asyncio.shield(asyncio.wait_for(lock.release(), times.retry_s))
        raise
    lock.fence.close()
    raise LeaseLostError(
        f"the Lease {lock.namespace}/{lock.name} was not renewed within {times.renew_s} s: "
        f"{lock.last_failure or 'no attempt succeeded'}; another operator may write now"
    )


async def _ignore_loss() -> None:
    """Do nothing; `hold_lease` reports the loss after the election has ended."""


class FencingLock(BaseLock):
    """A Lease as the election's lock, read and written by bounded calls.

    Args:
        client: unfenced calls to the API server.
        name: name of the Lease.
        namespace: namespace of the Lease.
        identity: identity of this process, unique among running operators. A Lease that already
            carries it was left by an earlier process of the same pod, and is acquired at once.
        fence: extended by each renewal.
        clock: source of monotonic and calendar time.
        times: times of the election.
    """

    def __init__(
        self,
        client: LeaseClient,
        *,
        name: str,
        namespace: str,
        identity: str,
        fence: Fence,
        clock: ClockSource,
        times: LeaseTimes,
    ) -> None:
        super().__init__(name, namespace, identity)
        self.fence = fence
        self.times = times
        self._client = client
        self._clock = clock
        self._stored: Object | None = None
        self._has_held = False
        self.last_failure = ""
        """Message of the last failed attempt."""

    async def get(
        self, name: str, namespace: str
    ) -> tuple[bool, LeaderElectionRecord] | tuple[bool, Exception]:
        """Read the Lease's record, or return the exception that the election expects.

        Raises:
            LeaseLostError: this process held the Lease earlier, but no longer holds it.
        """
        response = await self._client.read(LEASE, namespace, name)
        if isinstance(response, FailedCall):
            if response.not_found:
                self._close_fence("deleted")
            return False, self._note_failure(response)
        self._stored = response
        spec = response.get("spec") or {}
        holder = spec.get("holderIdentity") or None
        if holder != self.identity:
            self._close_fence(f"taken by {holder}" if holder else "released by another operator")
        return True, LeaderElectionRecord(
            holder,
            str(spec["leaseDurationSeconds"]) if spec.get("leaseDurationSeconds") else None,
            spec.get("acquireTime"),
            spec.get("renewTime"),
        )

    async def create(
        self, name: str, namespace: str, election_record: LeaderElectionRecord
    ) -> bool:
        """Create the Lease, held by this process."""
        del election_record  # it has local times; `_spec` writes UTC
        start_ns = self._clock.now_ns()
        response = await self._client.create_lease(
            namespace, {"metadata": {"name": name}, "spec": self._spec({})}
        )
        return self._note_renewal(response, start_ns)

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """Acquire or renew the Lease unless it changed since it was read."""
        del updated_record  # as in `create`
        assert self._stored is not None, "the election reads before it writes"
        start_ns = self._clock.now_ns()
        body = {**self._stored, "spec": self._spec(self._stored.get("spec") or {})}
        return self._note_renewal(await self._client.replace_lease(namespace, name, body), start_ns)

    async def release(self) -> None:
        """Release the Lease if this process holds it."""
        lease = await self._client.read(LEASE, self.namespace, self.name)
        if isinstance(lease, FailedCall):
            _log.warning("lease not released", extra={"problem": lease.message})
            return
        spec: Mapping[str, Any] = lease.get("spec") or {}
        if spec.get("holderIdentity") != self.identity:
            return
        body = {**lease, "spec": {**spec, "holderIdentity": ""}}
        response = await self._client.replace_lease(self.namespace, self.name, body)
        if isinstance(response, FailedCall):
            _log.warning("lease not released", extra={"problem": response.message})
        else:
            _log.info("lease released")

    def _close_fence(self, how: str) -> None:
        """Close the fence before its deadline, since another holder may write."""
        self.fence.close()
        if self._has_held:
            # The services' state in memory is out of date. End the process: a new one starts
            # without that state.
            raise LeaseLostError(
                f"this operator held the Lease {self.namespace}/{self.name}, which was {how}"
            )

    def _spec(self, last: Mapping[str, Any]) -> dict[str, Any]:
        """Return the Lease's next spec, held by this process.

        Args:
            last: the current spec; empty for a new Lease.
        """
        now = datetime.fromtimestamp(self._clock.unix_ns() / NS_PER_S, UTC)
        stamp = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
        same = last.get("holderIdentity") == self.identity
        transitions = int(last.get("leaseTransitions") or 0) + (0 if same or not last else 1)
        return {
            **last,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self.times.duration_s,
            "acquireTime": last.get("acquireTime") if same else stamp,
            "renewTime": stamp,
            "leaseTransitions": transitions,
        }

    def _note_renewal(self, response: ApiResponse, start_ns: int) -> bool:
        if isinstance(response, FailedCall):
            self._note_failure(response)
            return False
        self._stored = response
        self._has_held = True
        # Counted from the start of the request, because another operator may observe the renewal as
        # soon as it is stored.
        self.fence.extend(start_ns + self.times.duration_s * NS_PER_S - _MARGIN_NS)
        return True

    def _note_failure(self, call: FailedCall) -> ApiException:
        self.last_failure = call.message
        if not call.not_found:
            _log.warning("lease not renewed", extra={"problem": call.message})
        error = ApiException(status=call.status, reason=call.reason)
        # The election reads the status from the body.
        error.body = json.dumps({"code": call.status})
        return error
