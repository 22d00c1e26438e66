"""Telling one engine its limits: the same request to a pod and to a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from goodput_core.contract import PATH_CONTROL_LIMITS
from goodput_core.units import NS_PER_S
from goodput_operator.untrusted import decoded

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["push_limits"]

_MOST_NS: Final = 5 * NS_PER_S
_MOST_BYTES: Final = 4096


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _Error


_REFUSAL: Final = msgspec.json.Decoder(_Refusal)


async def push_limits(
    session: aiohttp.ClientSession,
    url: str,
    *,
    token: str,
    limits: Mapping[str, int],
    within_ns: int = _MOST_NS,
) -> str:
    """PATCH an engine's limits; takes seconds at most.

    Args:
        session: of HTTP.
        url: of the engine's admin port.
        token: its bearer token.
        limits: the body, `revision` included.
        within_ns: how long it may take, where that is less.

    Returns:
        What went wrong, for people; empty: nothing.
    """
    seconds = min(within_ns, _MOST_NS) / NS_PER_S
    try:
        async with session.patch(
            url.rstrip("/") + PATH_CONTROL_LIMITS,
            json=dict(limits),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=seconds),
            allow_redirects=False,
        ) as response:
            if response.status < 300:
                return ""
            body = await response.content.read(_MOST_BYTES)
            status = response.status
    except TimeoutError:
        return f"limits not pushed: no answer within {seconds:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return f"limits not pushed: {error}"
    try:
        words = decoded(_REFUSAL, body).error.message
    except ValueError:
        words = f"HTTP status {status}"
    return f"limits refused: {words}"
