"""Telling an engine its limits, over real sockets: whatever it answers becomes one sentence."""

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
    """Push limits to an engine with this answer; return the result and the request."""
    sent = []

    async def answer(request: web.Request) -> web.Response:
        sent.append((await request.json(), request.headers["Authorization"]))
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_patch(PATH_CONTROL_LIMITS, answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        words = await push_limits(session, str(server.make_url("/")), token="t", limits=LIMITS)
    return words, sent


async def test_limits_arrive_with_the_token() -> None:
    assert await pushed(200, b"{}") == ("", [(LIMITS, "Bearer t")])


async def test_a_rejection_quotes_the_engine() -> None:
    error = {"error": {"message": "an older revision", "type": "conflict"}}
    words, _ = await pushed(409, json.dumps(error).encode())
    assert words == "limits rejected: an older revision"


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[" * 4096, b'{"error": ' * 400, b'{"error": "no"}', b"\xff", b"[1]"],
    ids=["nothing", "a page", "brackets", "braces", "a word", "no text", "a list"],
)
async def test_an_unreadable_answer_is_reported_by_its_status(body: bytes) -> None:
    words, _ = await pushed(500, body)
    assert words == "limits rejected: HTTP status 500"


async def test_an_engine_that_is_gone_is_a_sentence_too() -> None:
    async with aiohttp.ClientSession() as session:
        words = await push_limits(session, "http://127.0.0.1:1", token="t", limits=LIMITS)
    assert words.startswith("limits not pushed: ")
