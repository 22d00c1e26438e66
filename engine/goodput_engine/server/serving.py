"""The serving port: OpenAI's API and the health checks, and nothing that administers.

Every answer that is not the one asked for leaves here in OpenAI's error form.
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
from goodput_engine.server.answering import Answering
from goodput_engine.server.front import Phase
from goodput_engine.server.load import LoadHeader
from goodput_engine.server.refusals import Refusal, error_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from goodput_engine.server.front import Front

__all__ = ["error_form", "serving_app"]

_log = logging.getLogger(__name__)


def serving_app(front: Front, readers: Executor) -> web.Application:
    """The application of the serving port.

    Args:
        front: the front's state.
        readers: where long bodies are read.
    """
    app = web.Application(middlewares=[error_form(front)])
    answering = Answering(front, readers)
    models = _Models(front)
    app.router.add_post(PATH_COMPLETIONS, answering.completions)
    app.router.add_post(PATH_CHAT_COMPLETIONS, answering.chat_completions)
    app.router.add_get(PATH_MODELS, models.list)
    app.router.add_get(PATH_MODELS + "/{name:.+}", models.show)
    app.router.add_get(PATH_LIVE, _live)
    app.router.add_get(PATH_READY, _ready(front))
    return app


def error_form(front: Front) -> Callable[..., Awaitable[web.StreamResponse]]:
    """A middleware that turns every refusal into OpenAI's error form."""
    names = front.settings.names
    replica = {HEADER_REPLICA: names.replica, HEADER_REVISION: names.revision}
    load = LoadHeader(front)

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as error:
            refusal = error
        except web.HTTPException as error:
            refusal = Refusal(
                error.status_code,
                f"{request.method} {request.path[:200]}: {error.reason}",
                code="not_found" if error.status_code == 404 else None,
            )
        except ConnectionError:
            # The client is gone; nobody reads what follows.
            raise
        except Exception:  # noqa: BLE001 - the last stop before a client would see HTML
            _log.exception("request_failed", extra={"path": request.path})
            refusal = Refusal(
                500, "the engine made an error; its log says more", kind="server_error"
            )
        headers = {**replica, **load.headers()}
        if refusal.retry_after_s:
            headers["Retry-After"] = str(refusal.retry_after_s)
        if refusal.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.Response(
            status=refusal.status,
            body=error_json(refusal),
            headers=headers,
            content_type="application/json",
        )

    return middleware


class _Models:
    """`/v1/models`: the one model of this replica."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    async def list(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model()]})

    async def show(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._front.settings.names.llmservice:
            raise Refusal(
                404, f"the model {name[:100]!r} is not served here", code="model_not_found"
            )
        return _json(self._model())

    def _model(self) -> dict[str, object]:
        ready = self._front.ready
        if ready is None:
            raise self._front.why_not()
        return {
            "id": self._front.settings.names.llmservice,
            "object": "model",
            "created": self._created,
            "owned_by": MODEL_OWNER,
            "max_model_len": ready.max_model_tokens,
        }


async def _live(_: web.Request) -> web.Response:
    return _json({"status": "live"})


def _ready(front: Front) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(_: web.Request) -> web.Response:
        if front.phase is not Phase.SERVING:
            raise front.why_not()
        return _json({"status": "ready"})

    return handler


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
