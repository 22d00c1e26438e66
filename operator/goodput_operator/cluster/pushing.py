"""Tells engines their limits over their admin port, a few at a time and none for long."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

import aiohttp

from goodput_core.contract import PATH_CONTROL_LIMITS
from goodput_operator.cluster.tokens import control_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_operator.decide.actions import Push

__all__ = ["Pusher"]

_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)
_AT_ONCE: Final = 16
_MOST_BYTES: Final = 4096


class Pusher:
    """Pushes limits with tokens derived from the operator's key.

    Args:
        session: of HTTP.
        key: the operator's.
    """

    def __init__(self, session: aiohttp.ClientSession, *, key: bytes) -> None:
        self._session = session
        self._key = key
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def push(self, service_uid: str, pushes: Sequence[Push]) -> dict[str, str]:
        """Push them all; the slowest takes seconds, not more.

        Returns:
            What went wrong, by pod.
        """
        words = await asyncio.gather(*(self._push(service_uid, push) for push in pushes))
        return {push.pod: said for push, said in zip(pushes, words, strict=True) if said}

    async def _push(self, service_uid: str, push: Push) -> str:
        token = control_token(self._key, service_uid=service_uid, revision=push.revision)
        async with self._free:
            try:
                return await self._patch(push.url, token, push.limits)
            except TimeoutError:
                return f"limits not pushed: no answer within {_TIMEOUT.total:g} s"
            except (aiohttp.ClientError, OSError) as error:
                return f"limits not pushed: {error}"

    async def _patch(self, url: str, token: str, limits: Mapping[str, int]) -> str:
        async with self._session.patch(
            url.rstrip("/") + PATH_CONTROL_LIMITS,
            json=dict(limits),
            headers={"Authorization": f"Bearer {token}"},
            timeout=_TIMEOUT,
            allow_redirects=False,
        ) as response:
            if response.status < 300:
                return ""
            body = await response.content.read(_MOST_BYTES)
        try:
            words = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            words = f"HTTP status {response.status}"
        return f"limits refused: {words}"
