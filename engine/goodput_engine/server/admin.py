"""The admin port: metrics, the engine's state, and changes of its limits.

It is a port of its own, so that no client can read or change the engine through the serving port.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from goodput_core.contract import (
    PATH_CONTROL_LIMITS,
    PATH_CONTROL_STATE,
    PATH_METRICS,
    TOKENIZER_EMULATED,
)
from goodput_engine.server.app import error_middleware
from goodput_engine.server.limits import LimitsHandler
from goodput_engine.server.metrics import CONTENT_TYPE, load_of

if TYPE_CHECKING:
    from goodput_engine.server.metrics import EngineMetrics
    from goodput_engine.server.state import ServerState

__all__ = ["admin_app"]


def admin_app(state: ServerState, metrics: EngineMetrics) -> web.Application:
    """Return the application of the admin port.

    Args:
        state: state of the HTTP process.
        metrics: metrics of this replica.
    """
    app = web.Application(middlewares=[error_middleware(state)])
    admin = _Admin(state, metrics)
    app.router.add_get(PATH_METRICS, admin.metrics)
    app.router.add_get(PATH_CONTROL_STATE, admin.state)
    app.router.add_patch(PATH_CONTROL_LIMITS, LimitsHandler(state).patch)
    return app


class _Admin:
    def __init__(self, state: ServerState, metrics: EngineMetrics) -> None:
        self._state = state
        self._metrics = metrics

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def state(self, _: web.Request) -> web.Response:
        return _json(_control_state(self._state))


def _control_state(server: ServerState) -> dict[str, Any]:
    settings = server.settings
    configure = server.configure
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
        "in_flight": server.in_flight,
        "answered": server.lengths.rows(),
    }
    if server.core is not None and server.ready is not None:
        core = server.core.state
        state |= asdict(core)
        state["max_model_tokens"] = server.ready.max_model_tokens
        state["startup_seconds"] = server.startup_s
        state["tokenizer"] = TOKENIZER_EMULATED
        state |= load_of(server.core, draining=server.draining)
    return state


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
