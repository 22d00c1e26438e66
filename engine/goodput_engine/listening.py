"""Opening a port, and saying where a process listens: the same for the engine and the router."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Final

from aiohttp import web

from goodput_core.contract import EVENT_LISTENING
from goodput_core.errors import UsageError

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

__all__ = ["announce", "listen"]

_EVERYWHERE: Final = "::"
_BACKLOG: Final = 4096
_log: Final = logging.getLogger(__name__)


async def listen(stack: AsyncExitStack, runner: web.AppRunner, host: str, port: int) -> str:
    """Serve an application until the stack is closed.

    Args:
        stack: closes the port and ends what runs.
        runner: of the application, not set up yet.
        host: an address, or a name whose first address is taken; `::`: every address, of both
            families where the kernel has both.
        port: 0 takes any free one.

    Returns:
        The URL, with the port that it got.

    Raises:
        UsageError: the port cannot be opened.
    """
    if host == _EVERYWHERE and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104 - what was asked for, without IPv6
    listener = _bind(host, port)
    stack.callback(listener.close)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.SockSite(runner, listener, backlog=_BACKLOG).start()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def announce(url: str, admin_url: str, *, as_json: bool) -> None:
    """Say where the process listens: on the log, and to a parent as one line on stdout.

    Args:
        url: of the serving port.
        admin_url: of the admin port.
        as_json: whether a parent reads stdout.
    """
    _log.info("listening", extra={"url": url, "admin_url": admin_url})
    if as_json:
        event = {"event": EVENT_LISTENING, "url": url, "admin_url": admin_url, "pid": os.getpid()}
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if host == _EVERYWHERE:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # a name may be one that IDNA cannot encode
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; choose another") from error
    return listener
