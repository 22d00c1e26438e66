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


async def test_a_list_is_reported_before_it_is_returned_but_no_watch_and_no_refusal() -> None:
    asked: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization"))
        if "watch" in request.query:
            return web.Response(text=json.dumps({"type": "BOOKMARK"}) + "\n")
        return web.json_response(LIST, status=int(request.query.get("status", "200")))

    app = web.Application()
    app.router.add_get(PODS, handler)
    heard: list[str] = []
    listed: list[Any] = []
    async with TestServer(app) as server:
        configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
        configuration.api_key = {"BearerToken": "Bearer secret"}
        async with ApiClient(configuration) as api:
            kopfs = await watch_session(
                api, on_request=heard.append, on_list=lambda *told: listed.append(told)
            )
            async with kopfs.aiohttp_session as session:
                url = f"{kopfs.server}{PODS}"
                async with session.get(url, params={"labelSelector": "a"}) as answer:
                    assert listed == []
                    assert await answer.json() == LIST
                assert (heard, listed) == ([PODS], [(PODS, LIST)])
                async with session.get(url, params={"watch": "true"}) as answer:
                    assert [line async for line in answer.content] == [b'{"type": "BOOKMARK"}\n']
                assert heard == [PODS, PODS]
                async with session.get(url, params={"status": "403"}) as answer:
                    assert await answer.json() == LIST
    assert (heard, listed) == ([PODS, PODS], [(PODS, LIST)])
    assert asked == ["Bearer secret"] * 3
