"""The client over a real socket: calls time out, and rejections become values."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_operator.kube.client import Client, FailedCall
from goodput_operator.kube.objects import CHILDREN, LLMSERVICE, SECRET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

(DEPLOYMENT,) = (kind for kind in CHILDREN if kind.name == "Deployment")
BODY = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u"},
    "spec": {"replicas": 1},
}


@contextlib.asynccontextmanager
async def client_of(
    bench: Any,
    handler: Callable[[web.Request], Awaitable[web.Response]],
    counted: list[Any],
    timeout_ns: int = 60 * NS_PER_S,
) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server:
        configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
        configuration.api_key = {"BearerToken": "Bearer secret"}
        async with ApiClient(configuration) as api:
            yield Client(
                api,
                fence=bench.fence,
                timeout_ns=timeout_ns,
                count=lambda *call: counted.append(call),
            )


async def test_an_apply_is_the_documented_request(bench: Any) -> None:
    received: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        received.append((request.method, request.path_qs, request.headers, await request.read()))
        return web.json_response(BODY)

    counted: list[Any] = []
    async with client_of(bench, handler, counted) as client:
        assert await client.apply(DEPLOYMENT, BODY, force=True) == BODY
        body = {**BODY, "metadata": {"name": "chat", "namespace": "ns"}}
        await client.apply(LLMSERVICE, body, force=False, subresource="status")
    method, path, headers, content = received[0]
    assert (method, path) == (
        "PATCH",
        "/apis/apps/v1/namespaces/ns/deployments/chat?fieldManager=goodput-operator&force=true",
    )
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert headers["Authorization"] == "Bearer secret"
    assert json.loads(content) == BODY
    assert received[1][1].startswith(
        "/apis/goodput.dev/v1alpha1/namespaces/ns/llmservices/chat/status?"
    )
    assert received[1][1].endswith("force=false")
    assert counted == [("patch", "Deployment", 200), ("patch", "LLMService", 200)]


async def test_a_deletion_has_its_precondition(bench: Any) -> None:
    received: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        received.append((request.method, request.path, await request.json()))
        return web.json_response({"kind": "Status"})

    async with client_of(bench, handler, []) as client:
        await client.delete(DEPLOYMENT, "ns", "chat", "u")
    assert received[0][:2] == ("DELETE", "/apis/apps/v1/namespaces/ns/deployments/chat")
    assert received[0][2]["preconditions"] == {"uid": "u"}


async def test_a_hanging_call_times_out(bench: Any) -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    counted: list[Any] = []
    async with client_of(bench, handler, counted, timeout_ns=100 * NS_PER_MS) as client:
        response = await client.read(DEPLOYMENT, "ns", "chat")
    assert isinstance(response, FailedCall)
    assert (response.reason, response.transient) == ("Timeout", True)
    assert counted == [("get", "Deployment", 0)]


async def test_a_write_is_cancelled_when_the_lease_expires(bench: Any) -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with client_of(bench, handler, []) as client:
        bench.fence.extend(bench.clock.ns + 20 * NS_PER_MS)
        response = await client.apply(DEPLOYMENT, BODY, force=False)
    assert isinstance(response, FailedCall)
    assert response.message == "the API server did not respond within 0.02 s"


async def test_an_unreachable_server_is_a_failed_call(bench: Any) -> None:
    configuration = Configuration(host="http://127.0.0.1:9")
    async with ApiClient(configuration) as api:
        client = Client(api, fence=bench.fence, timeout_ns=NS_PER_S, count=lambda *_: None)
        response = await client.read(DEPLOYMENT, "ns", "chat")
    assert isinstance(response, FailedCall)
    assert (response.reason, response.transient) == ("Unreachable", True)


@pytest.mark.parametrize(
    ("status", "transient"), [(403, False), (409, False), (422, False), (429, True), (503, True)]
)
async def test_a_failed_call_has_the_servers_message(
    bench: Any, status: int, transient: bool
) -> None:
    async def handler(_: web.Request) -> web.Response:
        body = {"kind": "Status", "reason": "Why", "message": "because of a quota"}
        return web.json_response(body, status=status)

    counted: list[Any] = []
    async with client_of(bench, handler, counted) as client:
        response = await client.create(SECRET, "ns", {"metadata": {"name": "s"}})
    assert isinstance(response, FailedCall)
    assert (response.status, response.message, response.transient) == (
        status,
        "because of a quota",
        transient,
    )
    assert counted == [("create", "Secret", status)], "the client does not retry"
