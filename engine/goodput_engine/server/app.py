"""The applications of the serving port and of the admin port.

The serving port has OpenAI's API and the health checks. Metrics, the engine's state and changes of
its limits are on the admin port, so that clients cannot reach them. Every error response of both
ports has OpenAI's form and the headers with the replica's name and load.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from goodput_core.contract import (
    HEADER_REPLICA,
    HEADER_REVISION,
    MODEL_OWNER,
    PATH_CHAT_COMPLETIONS,
    PATH_COMPLETIONS,
    PATH_CONTROL_LIMITS,
    PATH_CONTROL_STATE,
    PATH_LIVE,
    PATH_METRICS,
    PATH_MODELS,
    PATH_READY,
    TOKENIZER_EMULATED,
    TOKENIZER_MODEL,
)
from goodput_core.histogram import LengthHistogram
from goodput_engine.api_keys import ApiKeys
from goodput_engine.http_server import error_response, no_such_path
from goodput_engine.openai.errors import APIError, unavailable
from goodput_engine.server.handlers import CompletionHandlers
from goodput_engine.server.limits import LimitsHandler
from goodput_engine.server.metrics import CONTENT_TYPE, LoadHeader, read_load
from goodput_engine.server.state import ServerPhase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from goodput_engine.server.follower_channel import FollowerReport
    from goodput_engine.server.followers import Followers
    from goodput_engine.server.metrics import EngineMetrics
    from goodput_engine.server.parsers import Parsers
    from goodput_engine.server.state import ServerState

__all__ = ["admin_app", "serving_app"]

_log: Final = logging.getLogger(__name__)


def serving_app(state: ServerState, parsers: Parsers) -> web.Application:
    """Return the application of the serving port.

    Args:
        state: state of the HTTP process.
        parsers: threads that parse requests.

    Raises:
        InputError: the file of API keys is invalid.
    """

    async def live(_: web.Request) -> web.Response:
        if state.core is not None and state.core.stuck:
            raise unavailable("the engine core sends no messages", "engine_stuck")
        return _json({"status": "live"})

    async def ready(_: web.Request) -> web.Response:
        if state.phase is not ServerPhase.SERVING:
            raise state.not_serving_error()
        return _json({"status": "ready"})

    app = web.Application(middlewares=[_error_middleware(state)])
    key_file = state.settings.api_key_file
    if key_file is not None:
        app.middlewares.append(_key_middleware(ApiKeys(key_file, time.monotonic_ns)))
    completions = CompletionHandlers(state, parsers)
    models = _ModelHandlers(state)
    app.router.add_post(PATH_COMPLETIONS, completions.completions)
    app.router.add_post(PATH_CHAT_COMPLETIONS, completions.chat_completions)
    app.router.add_get(PATH_MODELS, models.list)
    app.router.add_get(PATH_MODELS + "/{name:.+}", models.show)
    app.router.add_get(PATH_LIVE, live)
    app.router.add_get(PATH_READY, ready)
    return app


def admin_app(
    state: ServerState, metrics: EngineMetrics, followers: Followers | None = None
) -> web.Application:
    """Return the application of the admin port.

    Args:
        state: state of the HTTP process.
        metrics: metrics of this replica.
        followers: the further HTTP processes; None if there are none.
    """

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def control_state(_: web.Request) -> web.Response:
        reports = [] if followers is None else await followers.reports()
        return _json(_control_state(state, reports))

    app = web.Application(middlewares=[_error_middleware(state)])
    app.router.add_get(PATH_METRICS, scrape)
    app.router.add_get(PATH_CONTROL_STATE, control_state)
    app.router.add_patch(PATH_CONTROL_LIMITS, LimitsHandler(state).patch)
    return app


def _error_middleware(state: ServerState) -> Callable[..., Awaitable[web.StreamResponse]]:
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
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            response = await no_such_path(request)
            response.headers.update({**replica, **load.headers()})
            return response
        except web.HTTPException as raised:
            message = f"{request.method} {request.path[:200]}: {raised.reason}"
            error = APIError(raised.status_code, message)
        except ConnectionError:
            raise  # the client closed the connection
        except Exception:  # noqa: BLE001 - otherwise aiohttp sends an HTML page
            _log.exception("request failed", extra={"path": request.path})
            error = APIError(500, "internal error; the engine's log has the details")
        return error_response(error, {**replica, **load.headers()})

    return middleware


def _key_middleware(keys: ApiKeys) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return a middleware that requires a key of every request but those of health checks."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in {PATH_LIVE, PATH_READY}:
            keys.require(request.headers)
        return await handler(request)

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
            raise self._state.not_serving_error()
        return {
            "id": self._state.settings.identity.llmservice,
            "object": "model",
            "created": self._created,
            "owned_by": MODEL_OWNER,
            "max_model_len": ready.max_model_tokens,
        }


def _control_state(server: ServerState, reports: Sequence[FollowerReport]) -> dict[str, Any]:
    settings = server.settings
    configure = server.configure
    lengths = LengthHistogram()
    # A follower that has not noticed the end of a core yet reports the lengths of that core.
    current = [one.lengths for one in reports if one.epoch == server.epoch]
    for row in chain(server.lengths.rows(), *current):
        requests, prompt, cached, output = row
        lengths.add(
            requests=requests, input_tokens=prompt, cached_tokens=cached, output_tokens=output
        )
    state: dict[str, Any] = {
        "epoch": server.epoch,
        "llmservice": settings.identity.llmservice,
        "replica": settings.identity.replica,
        "revision": settings.identity.revision,
        "phase": server.phase,
        "policy": configure.policy,
        "preemption": configure.preemption,
        "bounds": {
            "token_budget": [configure.min_token_budget, configure.max_token_budget],
            "max_num_seqs": [1, configure.max_num_seqs],
            "max_waiting": [0, configure.max_waiting],
        },
        "device": settings.device,
        "in_flight": server.in_flight + sum(one.in_flight for one in reports),
        "answered": lengths.rows(),
    }
    if server.core is not None and server.ready is not None:
        core = server.core.state
        state |= asdict(core)
        state["max_model_tokens"] = server.ready.max_model_tokens
        state["startup_seconds"] = server.startup_s
        state["device"] = {**settings.device, **server.ready.model_facts}
        state["tokenizer"] = TOKENIZER_EMULATED if configure.model is None else TOKENIZER_MODEL
        state |= read_load(server.core, draining=server.draining)
    return state


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
