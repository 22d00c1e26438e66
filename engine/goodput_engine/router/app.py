"""The applications of the router's serving port and admin port.

A client must never reach metrics or control, neither the router's nor a replica's. So the serving
port forwards only a fixed list of paths.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

from goodput_core.contract import (
    LABEL_LLMSERVICE,
    METRIC_ROUTER_REPLICA_UP,
    PATH_CHAT_COMPLETIONS,
    PATH_COMPLETIONS,
    PATH_CONTROL_STATE,
    PATH_LIVE,
    PATH_METRICS,
    PATH_MODELS,
    PATH_READY,
    QUERY_SECONDS_SINCE,
    ROLE_ROUTER,
)
from goodput_core.units import NS_PER_S
from goodput_engine.http_server import error_response
from goodput_engine.openai.errors import APIError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from goodput_engine.router.outcomes import OutcomeCounts
    from goodput_engine.router.proxy import Proxy
    from goodput_engine.router.replicas import Replica, ReplicaPool

__all__ = ["admin_app", "serving_app"]

_SECOND: Final = re.compile(r"[0-9]{1,12}")


def serving_app(proxy: Proxy, replicas: ReplicaPool) -> web.Application:
    """Return the application of the serving port."""

    async def live(_request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def ready(_request: web.Request) -> web.Response:
        if proxy.draining:
            return _not_ready("draining")
        count = sum(replica.ready for replica in replicas)
        if not count:
            return _not_ready("no replica is ready")
        return web.json_response({"status": "ready", "ready_replicas": count})

    async def close_when_draining(_: web.Request, response: web.StreamResponse) -> None:
        if proxy.draining:
            response.force_close()
            response.headers["Connection"] = "close"

    app = web.Application()
    app.on_response_prepare.append(close_when_draining)
    app.router.add_post(PATH_COMPLETIONS, proxy.inference)
    app.router.add_post(PATH_CHAT_COMPLETIONS, proxy.inference)
    app.router.add_get(PATH_MODELS, proxy.models)
    app.router.add_get(PATH_LIVE, live)
    app.router.add_get(PATH_READY, ready)
    app.router.add_route("*", "/{path:.*}", _no_such_path)
    return app


def admin_app(
    registry: CollectorRegistry,
    *,
    llmservice: str,
    proxy: Proxy,
    replicas: ReplicaPool,
    outcomes: OutcomeCounts,
    clock: Callable[[], int],
) -> web.Application:
    """Return the application of the admin port.

    Args:
        registry: the router's metrics.
        llmservice: the service's name.
        proxy: the proxy, whose `draining` is published.
        replicas: the replicas.
        outcomes: the counts of requests.
        clock: returns monotonic nanoseconds; the router's uptime starts now.
    """
    up = Gauge(
        METRIC_ROUTER_REPLICA_UP,
        "1 if the replica may get new requests.",
        (LABEL_LLMSERVICE, "replica"),
        registry=registry,
    )

    epoch = secrets.token_hex(8)
    started_ns = clock()

    async def metrics(_request: web.Request) -> web.Response:
        up.clear()
        for replica in replicas:
            up.labels(llmservice, replica.name).set(replica.ready)
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def state(request: web.Request) -> web.Response:
        since = request.query.get(QUERY_SECONDS_SINCE)
        if since is not None and not _SECOND.fullmatch(since):
            message = f"{QUERY_SECONDS_SINCE} must be a whole number of seconds"
            return error_response(APIError(400, message, code="invalid_query"))
        body: dict[str, object] = {
            "role": ROLE_ROUTER,
            "epoch": epoch,
            "uptime_seconds": (clock() - started_ns) / NS_PER_S,
            "llmservice": llmservice,
            "policy": replicas.policy.value,
            "draining": proxy.draining,
            "arrivals": outcomes.arrivals,
            "in_flight": outcomes.in_flight,
            "replicas": [_replica_state(replica) for replica in replicas],
            "outcomes": outcomes.by_class(),
            "promises": outcomes.promises(),
            "client_errors": outcomes.client_errors,
            "judged_on_e2e_only": outcomes.e2e_only,
            "retries": outcomes.retries,
        }
        if since is not None:
            body["seconds"] = outcomes.seconds(int(since), clock())
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    app = web.Application()
    app.router.add_get(PATH_METRICS, metrics)
    app.router.add_get(PATH_CONTROL_STATE, state)
    app.router.add_route("*", "/{path:.*}", _no_such_path)
    return app


def _replica_state(replica: Replica) -> dict[str, object]:
    report = replica.report
    return {
        "name": replica.name,
        "url": replica.upstream.url,
        "admin_url": replica.upstream.admin_url,
        "ready": replica.ready,
        "detail": replica.detail,
        "draining": report.draining,
        "saturated": replica.saturated,
        "in_flight": replica.in_flight,
        "running": report.running,
        "waiting": report.waiting,
        "kv_free_blocks": report.kv_free_blocks,
        "kv_total_blocks": report.kv_total_blocks,
    }


def _not_ready(reason: str) -> web.Response:
    return web.json_response({"status": "not ready", "reason": reason}, status=503)


async def _no_such_path(request: web.Request) -> web.Response:
    message = f"no {request.method} {request.path[:200]} here"
    return error_response(APIError(404, message, code="unknown_path"))
