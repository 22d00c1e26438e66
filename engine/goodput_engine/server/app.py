"""The application of the serving port: OpenAI's API and the health checks.

Every error response has OpenAI's form and the headers with the replica's name and load.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from goodput_core.contract import (
    HEADER_REPLICA,
    HEADER_REVISION,
    MODEL_OWNER,
    PATH_CHAT_COMPLETIONS,
    PATH_COMPLETIONS,
    PATH_LIVE,
    PATH_MODELS,
    PATH_READY,
)
from goodput_engine.http_server import error_response
from goodput_engine.openai.errors import APIError
from goodput_engine.server.handlers import CompletionHandlers
from goodput_engine.server.metrics import LoadHeader
from goodput_engine.server.state import ServerPhase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from goodput_engine.server.state import ServerState

__all__ = ["error_middleware", "serving_app"]

_log = logging.getLogger(__name__)


def serving_app(state: ServerState, parsers: Executor) -> web.Application:
    """Return the application of the serving port.

    Args:
        state: state of the HTTP process.
        parsers: executor that parses large bodies.
    """
    app = web.Application(middlewares=[error_middleware(state)])
    completions = CompletionHandlers(state, parsers)
    models = _ModelHandlers(state)
    app.router.add_post(PATH_COMPLETIONS, completions.completions)
    app.router.add_post(PATH_CHAT_COMPLETIONS, completions.chat_completions)
    app.router.add_get(PATH_MODELS, models.list)
    app.router.add_get(PATH_MODELS + "/{name:.+}", models.show)
    app.router.add_get(PATH_LIVE, _live)
    app.router.add_get(PATH_READY, _ready(state))
    return app


def error_middleware(state: ServerState) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return a middleware that converts every error to a response in OpenAI's form."""
    identity = state.settings.identity
    replica = {HEADER_REPLICA: identity.replica, HEADER_REVISION: identity.revision}
    load = LoadHeader(state)

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except APIError as raised:
            error = raised
        except web.HTTPException as raised:
            error = APIError(
                raised.status_code,
                f"{request.method} {request.path[:200]}: {raised.reason}",
                code="not_found" if raised.status_code == 404 else None,
            )
        except ConnectionError:
            raise  # the client closed the connection
        except Exception:  # noqa: BLE001 - otherwise aiohttp sends an HTML page
            _log.exception("request_failed", extra={"path": request.path})
            error = APIError(500, "internal error; the engine's log has the details")
        return error_response(error, {**replica, **load.headers()})

    return middleware


class _ModelHandlers:
    """`/v1/models`: the one model of this replica."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._created = int(time.time())

    async def list(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model()]})

    async def show(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._state.settings.identity.llmservice:
            raise APIError(
                404, f"the model {name[:100]!r} is not served here", code="model_not_found"
            )
        return _json(self._model())

    def _model(self) -> dict[str, object]:
        ready = self._state.ready
        if ready is None:
            raise self._state.not_serving()
        return {
            "id": self._state.settings.identity.llmservice,
            "object": "model",
            "created": self._created,
            "owned_by": MODEL_OWNER,
            "max_model_len": ready.max_model_tokens,
        }


async def _live(_: web.Request) -> web.Response:
    return _json({"status": "live"})


def _ready(state: ServerState) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(_: web.Request) -> web.Response:
        if state.phase is not ServerPhase.SERVING:
            raise state.not_serving()
        return _json({"status": "ready"})

    return handler


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
