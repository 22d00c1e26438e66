"""An HTTP server that lists and watches EndpointSlices as Kubernetes does, with failures."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"


def endpoint(name: str, address: str, **conditions: bool) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": name},
        "zone": "a",
    }


def slice_of(
    name: str, *endpoints: dict[str, Any], family: str = "IPv4", ports: bool = True
) -> dict[str, Any]:
    listed = [{"name": "http", "port": 8000}, {"name": "admin", "port": 9000}]
    return {
        "metadata": {"name": name},
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": listed if ports else None,
    }


@dataclass
class SlicesServer:
    """An API server of EndpointSlices with resource versions, pages and watches."""

    token: str = "first"
    version: int = 10
    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    oldest: int = 0
    page: int = 500
    failing: int = 0
    raw: bytes = b""
    silent: bool = False
    requests: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    watching: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, one: dict[str, Any], kind: str = "MODIFIED") -> None:
        self.version += 1
        one = {**one, "metadata": {**one["metadata"], "resourceVersion": str(self.version)}}
        self.slices[one["metadata"]["name"]] = one
        self.history.append((self.version, kind, one))
        self._wake()

    def drop(self, name: str) -> None:
        self.version += 1
        self.history.append((self.version, "DELETED", self.slices.pop(name)))
        self._wake()

    def send_raw(self, line: bytes) -> None:
        """Send a line of any content in the watch."""
        self.raw = line
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        watch = "watch" in request.query
        self.requests.append("watch" if watch else "list")
        assert request.query["labelSelector"] == "kubernetes.io/service-name=chat-engines"
        if request.headers["Authorization"] != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        if self.failing:
            return web.json_response({"kind": "Status", "message": "no"}, status=self.failing)
        return await self._watch(request) if watch else self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        begin = int(request.query.get("continue", "0"))
        size = min(self.page, int(request.query["limit"]))
        items = list(self.slices.values())
        metadata = {"resourceVersion": str(self.version)}
        if begin + size < len(items):
            metadata["continue"] = str(begin + size)
        return web.json_response({"metadata": metadata, "items": items[begin : begin + size]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.watching.set()
        if seen < self.oldest:
            gone = {"kind": "Status", "code": 410, "message": "too old"}
            await response.write(line("ERROR", gone))
            return response
        until = time.monotonic() + int(request.query["timeoutSeconds"])
        while time.monotonic() < until:
            waiter = self.changed
            if not self.silent:
                for version, kind, one in self.history:
                    if version > seen:
                        await response.write(line(kind, one))
                        seen = version
            if self.raw:
                raw, self.raw = self.raw, b""
                await response.write(raw)
            try:
                await asyncio.wait_for(waiter.wait(), until - time.monotonic())
            except TimeoutError:
                break
        return response


def line(kind: str, one: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": one}).encode() + b"\n"


async def serve(cluster: SlicesServer, port: int = 0) -> tuple[web.AppRunner, int]:
    app = web.Application()
    app.router.add_get(PATH, cluster.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    return runner, runner.addresses[0][1]
