"""Pushes of limits to an engine over real sockets; any failure is reported in one sentence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from goodput_core.contract import PATH_CONTROL_LIMITS
from goodput_operator.control.admin_ports import push_limits

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMITS = {"revision": 7, "token_budget": 512}


async def pushed(status: int, body: bytes) -> tuple[str, list[tuple[Mapping[str, int], str]]]:
    """Push limits to an engine with this response; return the result and the requests."""
    sent = []

    async def handle(request: web.Request) -> web.Response:
        sent.append((await request.json(), request.headers["Authorization"]))
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_patch(PATH_CONTROL_LIMITS, handle)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        message = await push_limits(session, str(server.make_url("/")), token="t", limits=LIMITS)
    return message, sent


async def test_limits_are_sent_with_the_token() -> None:
    assert await pushed(200, b"{}") == ("", [(LIMITS, "Bearer t")])


async def test_a_rejection_quotes_the_engine() -> None:
    error = {"error": {"message": "an older revision", "type": "conflict"}}
    message, _ = await pushed(409, json.dumps(error).encode())
    assert message == "limits rejected: an older revision"


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[" * 4096, b'{"error": ' * 400, b'{"error": "no"}', b"\xff", b"[1]"],
    ids=["nothing", "a page", "brackets", "braces", "a word", "no text", "a list"],
)
async def test_an_invalid_error_response_is_reported_by_its_status(body: bytes) -> None:
    message, _ = await pushed(500, body)
    assert message == "limits rejected: HTTP status 500"


async def test_an_unreachable_engine_is_reported() -> None:
    async with aiohttp.ClientSession() as session:
        message = await push_limits(session, "http://127.0.0.1:1", token="t", limits=LIMITS)
    assert message.startswith("limits not pushed: ")
