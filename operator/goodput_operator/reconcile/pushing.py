"""Tells engines their limits over their admin port, a few at a time and none for long.

A push is a write: it starts only while the Lease is certainly ours, and is given up when it ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from goodput_operator.limits_push import push_limits
from goodput_operator.render.secrets import control_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    import aiohttp

    from goodput_operator.kube.fence import Fence
    from goodput_operator.reconcile.actions import Push

__all__ = ["Pusher"]

_AT_ONCE: Final = 16


class Pusher:
    """Pushes limits with tokens derived from the operator's key.

    Args:
        session: of HTTP.
        fence: every push asks it first.
        key: the operator's.
    """

    def __init__(self, session: aiohttp.ClientSession, *, fence: Fence, key: bytes) -> None:
        self._session = session
        self._fence = fence
        self._key = key
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def push(self, service_uid: str, pushes: Sequence[Push]) -> dict[str, str]:
        """Push them all; the slowest takes seconds, not more.

        Returns:
            What went wrong, by pod.

        Raises:
            LeaseLostError: another operator may write by now.
        """
        words = await asyncio.gather(*(self._push(service_uid, push) for push in pushes))
        return {push.pod: said for push, said in zip(pushes, words, strict=True) if said}

    async def _push(self, service_uid: str, push: Push) -> str:
        token = control_token(self._key, service_uid=service_uid, revision=push.revision)
        async with self._free:
            # Asked here: those before it may have taken long.
            left_ns = self._fence.admit(f"limits of {push.pod}")
            return await push_limits(
                self._session, push.url, token=token, limits=push.limits, within_ns=left_ns
            )
