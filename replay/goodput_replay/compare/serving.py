"""Answer rollout controllers with the result of a gate.

Argo Rollouts measures a `web` metric with GET and compares a field of the JSON with its conditions,
so PASS, FAIL and INCONCLUSIVE stay three outcomes. Flagger calls a webhook with POST and only looks
at the status, so everything but PASS is 409.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from aiohttp import web

from goodput_core.signals import StopCause, handle_stop_signals
from goodput_core.slo.verdict import VerdictKind
from goodput_engine.http_server import listen
from goodput_replay.compare.gate import encode_result

if TYPE_CHECKING:
    from rich.console import Console

    from goodput_replay.compare.gate import GateResult

__all__ = ["make_app", "serve_result"]

_MAX_BODY_BYTES = 1 << 16


def serve_result(result: GateResult, address: tuple[str, int], console: Console) -> None:
    """Serve the result until Ctrl-C or SIGTERM.

    Args:
        result: the result.
        address: host and port; port 0 takes any free port.
        console: console on stderr, for the URL.

    Raises:
        UsageError: the port cannot be opened.
    """
    asyncio.run(_serve(result, address, console))


def make_app(result: GateResult) -> web.Application:
    """Return the application: GET and POST on any path give the result."""
    body = encode_result(result)
    passed = result.verdict is VerdictKind.PASS

    async def answer_get(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async def answer_post(request: web.Request) -> web.Response:
        await request.read()  # Flagger sends the canary's name, which does not matter here
        return web.Response(
            status=200 if passed else 409, body=body, content_type="application/json"
        )

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_get("/{path:.*}", answer_get)
    app.router.add_post("/{path:.*}", answer_post)
    return app


async def _serve(result: GateResult, address: tuple[str, int], console: Console) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(_: StopCause) -> None:
        loop.call_soon_threadsafe(stopped.set)

    async with AsyncExitStack() as stack:
        url, _ = await listen(stack, make_app(result), address)
        console.print(f"serving the result on {url}", highlight=False, markup=False)
        with handle_stop_signals(stop):
            await stopped.wait()
