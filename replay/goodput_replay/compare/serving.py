"""Answer rollout controllers with the result of a gate.

Argo Rollouts measures a `web` metric with GET and compares a field of the JSON with its conditions,
so PASS, FAIL and INCONCLUSIVE stay three outcomes. Flagger calls a webhook with POST and only looks
at the status, so everything but PASS is 409.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from aiohttp import web

from goodput_core.signals import StopCause, handle_stop_signals
from goodput_core.slo.verdict import VerdictKind
from goodput_engine.http_server import listen
from goodput_replay.runs.json_results import encode_json

if TYPE_CHECKING:
    from rich.console import Console

    from goodput_replay.compare.gate import GateResult

__all__ = ["make_app", "serve_result"]

_PATH: Final = "/"
_MAX_BODY_BYTES: Final = 1 << 16
_BODY_S: Final = 5.0


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


def make_app(result: GateResult, *, body_s: float = _BODY_S) -> web.Application:
    """Return the application: GET and POST of `/` give the result, and no other path exists.

    Args:
        result: the result.
        body_s: time allowed for the body of a POST.
    """
    body = encode_json(result)
    passed = result.verdict is VerdictKind.PASS

    async def answer_get(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async def answer_post(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(body_s):
                await request.read()  # Flagger sends the canary's name, which does not matter here
        except TimeoutError:
            response = _refuse(408, f"the body did not arrive within {body_s:g} s; send it again")
            response.force_close()
            return response
        return web.Response(
            status=200 if passed else 409, body=body, content_type="application/json"
        )

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_get(_PATH, answer_get)
    app.router.add_post(_PATH, answer_post)
    app.router.add_route("*", "/{path:.*}", _reject)
    return app


async def _reject(request: web.Request) -> web.Response:
    if request.path == _PATH:
        return _refuse(405, f"{request.method} is not supported; use GET or POST")
    return _refuse(404, f"there is no such path; the result of the gate is at {_PATH}")


def _refuse(status: int, sentence: str) -> web.Response:
    return web.Response(status=status, text=f"{sentence}\n")


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
