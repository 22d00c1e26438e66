"""The admin port: metrics, the engine's state, and changes of its limits.

A port of its own, so that what clients can reach never shows or steers the engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from goodput_core.contract import (
    PATH_CONTROL_LIMITS,
    PATH_CONTROL_STATE,
    PATH_METRICS,
    TOKENIZER_EMULATED,
)
from goodput_engine.server.limits import LimitsGate
from goodput_engine.server.load import load_of
from goodput_engine.server.metrics import CONTENT_TYPE
from goodput_engine.server.refusals import Refusal
from goodput_engine.server.serving import error_form

if TYPE_CHECKING:
    from goodput_engine.server.front import Front
    from goodput_engine.server.metrics import EngineMetrics

__all__ = ["admin_app"]

_MAX_BODY_BYTES: Final = 64 * 1024
_BODY_S: Final = 10.0


def admin_app(front: Front, metrics: EngineMetrics) -> web.Application:
    """The application of the admin port.

    Args:
        front: the front's state.
        metrics: of this replica.
    """
    app = web.Application(middlewares=[error_form(front)], client_max_size=_MAX_BODY_BYTES)
    admin = _Admin(front, metrics)
    app.router.add_get(PATH_METRICS, admin.metrics)
    app.router.add_get(PATH_CONTROL_STATE, admin.state)
    app.router.add_patch(PATH_CONTROL_LIMITS, admin.limits)
    return app


class _Admin:
    def __init__(self, front: Front, metrics: EngineMetrics) -> None:
        self._front = front
        self._metrics = metrics
        settings = front.settings
        # Nothing but our own messages raises the core's revision, which starts at 0.
        first = 0 if settings.limits is None else settings.limits.revision
        self._gate = LimitsGate(token=settings.control_token, revision=first)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def state(self, _: web.Request) -> web.Response:
        return _json(_state(self._front))

    async def limits(self, request: web.Request) -> web.Response:
        self._gate.authorise(request.headers.get("Authorization"))
        core = self._front.serving()
        try:
            async with asyncio.timeout(_BODY_S):
                body = await request.read()
        except TimeoutError as error:
            raise Refusal(
                HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {_BODY_S:g} s"
            ) from error
        change = self._gate.read(body, self._front.configure)
        core.set_limits(change)
        return _json({"revision": change.revision})


def _state(front: Front) -> dict[str, Any]:
    settings = front.settings
    configure = front.configure
    state: dict[str, Any] = {
        "epoch": front.epoch,
        "llmservice": settings.names.llmservice,
        "replica": settings.names.replica,
        "revision": settings.names.revision,
        "phase": front.phase,
        "policy": configure.policy,
        "preemption": configure.preemption,
        "bounds": {
            "token_budget": [configure.min_token_budget, configure.max_token_budget],
            "max_num_seqs": [1, configure.max_num_seqs],
            "max_waiting": [0, configure.max_waiting],
        },
        "device": settings.device,
        "in_flight": front.in_flight,
        "answered": front.answered.bins(),
    }
    if front.core is not None and front.ready is not None:
        core = front.core.state
        state |= asdict(core)
        state["max_model_tokens"] = front.ready.max_model_tokens
        state["startup_seconds"] = front.startup_s
        state["tokenizer"] = TOKENIZER_EMULATED
        state |= load_of(front.core, draining=front.draining)
    return state


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
