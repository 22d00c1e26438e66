"""Whether a process still answers: one that hangs is alive for the system and dead for clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import aiohttp

from goodput_core.contract import PATH_LIVE

if TYPE_CHECKING:
    from goodput_operator.local.snapshot import Address

__all__ = ["answers"]

_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)


async def answers(session: aiohttp.ClientSession, address: Address) -> bool:
    """Ask once; whatever the answer says, it is a sign of life."""
    try:
        async with session.get(address.url + PATH_LIVE, timeout=_TIMEOUT):
            return True
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
