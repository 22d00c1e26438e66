"""The session of Kopf's watches reports accepted requests and lists."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from goodput_operator.kube.watch import watch_session

PODS = "/api/v1/pods"
LIST = {"kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": []}


async def test_lists_are_reported_before_kopf_reads_them_but_watches_and_rejections_are_not() -> (
    None
):
    tokens: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        tokens.append(request.headers.get("Authorization"))
        if "watch" in request.query:
            return web.Response(text=json.dumps({"type": "BOOKMARK"}) + "\n")
        return web.json_response(LIST, status=int(request.query.get("status", "200")))

    app = web.Application()
    app.router.add_get(PODS, handler)
    requested: list[str] = []
    listed: list[Any] = []
    async with TestServer(app) as server:
        configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
        configuration.api_key = {"BearerToken": "Bearer secret"}
        async with ApiClient(configuration) as api:
            kopf_session = await watch_session(
                api, on_request=requested.append, on_list=lambda *call: listed.append(call)
            )
            async with kopf_session.aiohttp_session as session:
                url = f"{kopf_session.server}{PODS}"
                async with session.get(url, params={"labelSelector": "a"}) as response:
                    assert listed == []
                    assert await response.json() == LIST
                assert (requested, listed) == ([PODS], [(PODS, LIST)])
                async with session.get(url, params={"watch": "true"}) as response:
                    assert [line async for line in response.content] == [b'{"type": "BOOKMARK"}\n']
                assert requested == [PODS, PODS]
                async with session.get(url, params={"status": "403"}) as response:
                    assert await response.json() == LIST
    assert (requested, listed) == ([PODS, PODS], [(PODS, LIST)])
    assert tokens == ["Bearer secret"] * 3
