"""When a router is ready: it says so itself, and it sees every replica that it should."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from goodput_core.contract import PATH_READY

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_operator.local.snapshot import Address

__all__ = ["until_routable"]

_POLL_S: Final = 0.05
_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)


async def until_routable(
    session: aiohttp.ClientSession, address: Address, replicas: Callable[[], int]
) -> None:
    """Return once the router at this address answers ready and counts as many replicas as asked.

    Waits for ever: the caller bounds it.

    Args:
        session: of HTTP.
        address: of the router.
        replicas: how many it should see by now, which may change while it starts.
    """
    while not await _routable(session, address, replicas()):  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(_POLL_S)


async def _routable(session: aiohttp.ClientSession, address: Address, replicas: int) -> bool:
    try:
        async with session.get(address.url + PATH_READY, timeout=_TIMEOUT) as answer:
            if answer.status != 200:
                return False
            body: Any = await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return False
    counted = body.get("ready_replicas") if isinstance(body, dict) else None
    return not isinstance(counted, int) or counted >= replicas
