"""The admin port: metrics, the engine's state, and changes of its limits.

It is a port of its own, so that no client can read or change the engine through the serving port.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from goodput_core.contract import (
    PATH_CONTROL_LIMITS,
    PATH_CONTROL_STATE,
    PATH_METRICS,
    TOKENIZER_EMULATED,
)
from goodput_engine.request_bodies import MemoryLimit, read_body
from goodput_engine.server.app import error_middleware
from goodput_engine.server.limits import LimitsGate
from goodput_engine.server.metrics import CONTENT_TYPE, load_of

if TYPE_CHECKING:
    from goodput_engine.server.metrics import EngineMetrics
    from goodput_engine.server.state import ServerState

__all__ = ["admin_app"]

_MAX_BODY_BYTES: Final = 64 * 1024
_ALL_BODIES_BYTES: Final = 4 << 20
_BODY_S: Final = 10.0


def admin_app(state: ServerState, metrics: EngineMetrics) -> web.Application:
    """Return the application of the admin port.

    Args:
        state: of the HTTP process.
        metrics: of this replica.
    """
    app = web.Application(middlewares=[error_middleware(state)])
    admin = _Admin(state, metrics)
    app.router.add_get(PATH_METRICS, admin.metrics)
    app.router.add_get(PATH_CONTROL_STATE, admin.state)
    app.router.add_patch(PATH_CONTROL_LIMITS, admin.limits)
    return app


class _Admin:
    def __init__(self, state: ServerState, metrics: EngineMetrics) -> None:
        self._state = state
        self._metrics = metrics
        self._bodies = MemoryLimit(_ALL_BODIES_BYTES)
        settings = state.settings
        self._gate = LimitsGate(
            token=settings.control_token,
            # Only this process raises the core's revision, which starts at 0.
            revision=0 if settings.limits is None else settings.limits.revision,
            unix_ns=time.time_ns,
        )

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def state(self, _: web.Request) -> web.Response:
        return _json(_control_state(self._state))

    async def limits(self, request: web.Request) -> web.Response:
        self._gate.authorise(request.headers.get("Authorization"))
        core = self._state.serving()
        memory = self._bodies.reserve()
        try:
            body = await read_body(
                request, limit_bytes=_MAX_BODY_BYTES, timeout_s=_BODY_S, memory=memory
            )
        finally:
            memory.release()
        change = self._gate.read(body, self._state.configure)
        core.set_limits(change)
        return _json({"revision": change.revision})


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
