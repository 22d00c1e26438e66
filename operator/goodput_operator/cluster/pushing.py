"""Tells engines their limits over their admin port, a few at a time and none for long."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from goodput_core.contract import PATH_CONTROL_LIMITS
from goodput_operator.cluster.tokens import control_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_operator.decide.actions import Push

__all__ = ["Pusher"]

_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)
_AT_ONCE: Final = 16
_MOST_BYTES: Final = 4096
_NOT_PACED: Final = "not_paced"


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
        limits = {
            "revision": push.limits_revision,
            "token_budget": push.bounds.max_tokens,
            "max_num_seqs": push.bounds.max_num_seqs,
            "safety_percent": push.bounds.safety_percent,
        }
        token = control_token(self._key, service_uid=service_uid, revision=push.revision)
        async with self._free:
            try:
                status, answer = await self._patch(push.url, token, limits)
                if status == 400 and answer.get("code") == _NOT_PACED:
                    # Policies that size their steps themselves have no use for the factor.
                    del limits["safety_percent"]
                    status, answer = await self._patch(push.url, token, limits)
            except TimeoutError:
                return f"limits not pushed: no answer within {_TIMEOUT.total:g} s"
            except (aiohttp.ClientError, OSError) as error:
                return f"limits not pushed: {error}"
        return "" if status < 300 else f"limits refused: {answer.get('message') or status}"

    async def _patch(
        self, url: str, token: str, limits: dict[str, int]
    ) -> tuple[int, dict[str, Any]]:
        """The status, and the error when there is one."""
        async with self._session.patch(
            url.rstrip("/") + PATH_CONTROL_LIMITS,
            json=limits,
            headers={"Authorization": f"Bearer {token}"},
            timeout=_TIMEOUT,
            allow_redirects=False,
        ) as response:
            body = await response.content.read(_MOST_BYTES)
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            error = None
        return response.status, error if isinstance(error, dict) else {}
