"""HTTP to armed shards: their state, and the start that they are sent."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

import aiohttp

from goodput_core.contract import PATH_REPLAY_START, PATH_REPLAY_STATE
from goodput_core.errors import SpecError
from goodput_core.replay_job import ShardState
from goodput_core.spec.codec import decode
from goodput_core.units import NS_PER_S
from goodput_operator.control.admin_ports import ScrapeError, fetch
from goodput_operator.render.secrets import control_token
from goodput_operator.replays.snapshot import ShardReading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from goodput_operator.kube.fence import Fence

__all__ = ["ShardClient", "shard_token"]

_TIME_LIMITS: Final = aiohttp.ClientTimeout(total=3, connect=1)
_POST_NS: Final = 2 * NS_PER_S
_MAX_BYTES: Final = 4096
_CONCURRENT: Final = 32


def shard_token(key: bytes, uid: str) -> str:
    """Derive the token that the shards of a TraceReplay accept a start with."""
    # A revision of an LLMService has no slash in its name, so no engine has this token.
    return control_token(key, service_uid=uid, revision="tracereplay/shards")


class ShardClient:
    """Reads the states of armed shards and sends their start.

    Args:
        session: HTTP session for pods.
        fence: admits every start.
        key: the operator's key, from which the tokens are derived.
    """

    def __init__(self, session: aiohttp.ClientSession, *, fence: Fence, key: bytes) -> None:
        self._session = session
        self._fence = fence
        self._key = key
        self._slots = asyncio.Semaphore(_CONCURRENT)

    async def read(
        self, urls: Mapping[str, str], unix_ns: Callable[[], int]
    ) -> dict[str, ShardReading]:
        """Read the states of several shards concurrently.

        Args:
            urls: URLs by the name of the pod.
            unix_ns: reads the operator's wall clock.
        """
        readings = await asyncio.gather(*(self._read(url, unix_ns) for url in urls.values()))
        return dict(zip(urls, readings, strict=True))

    async def _read(self, url: str, unix_ns: Callable[[], int]) -> ShardReading:
        async with self._slots:
            asked_ns = unix_ns()
            try:
                body = await fetch(
                    self._session,
                    url + PATH_REPLAY_STATE,
                    time_limits=_TIME_LIMITS,
                    max_bytes=_MAX_BYTES,
                )
                state = decode(ShardState, json.loads(body), "")
            except ScrapeError as error:
                return ShardReading(state=None, detail=str(error))
            except (ValueError, RecursionError, SpecError):
                return ShardReading(state=None, detail=f"{url} sent no state of a shard")
            return ShardReading(state=state, asked_ns=asked_ns, answered_ns=unix_ns())

    async def start(self, url: str, uid: str, start_at: str) -> str:
        """Send a start to one shard, and return the error; empty on success.

        Raises:
            LeaseLostError: the Lease is no longer held.
        """
        token = shard_token(self._key, uid)
        async with self._slots:
            remaining_ns = self._fence.admit(f"start of {url}")
            seconds = min(remaining_ns, _POST_NS) / NS_PER_S
            try:
                async with self._session.post(
                    url + PATH_REPLAY_START,
                    json={"startAt": start_at},
                    headers={"Authorization": f"Bearer {token}"},
                    timeout=aiohttp.ClientTimeout(total=seconds),
                    allow_redirects=False,
                ) as response:
                    return "" if response.status == 200 else f"HTTP status {response.status}"
            except TimeoutError:
                return f"no response within {seconds:g} s"
            except (aiohttp.ClientError, OSError) as error:
                return str(error)[:200]
