"""The page of a running service, from states that are not trusted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from playwright.sync_api import expect
from tests.builders.pages import opened
from yarl import URL

from goodput_core.dispatch import run_command
from goodput_core.errors import UnreachableError
from goodput_core.slo.targets import SLOClass
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.watch.command import poll
from goodput_replay.watch.history import WINDOW_S, ServiceHistory
from goodput_replay.watch.page import WatchPage
from goodput_replay.watch.readings import (
    MAX_CLASSES,
    EngineLoad,
    ReadError,
    RouterView,
    StateReader,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e"
SLO = SLOClasses(
    classes=(SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction("0.9")),),
    default="chat",
)


def _state(**changes: Any) -> dict[str, Any]:
    return {
        "role": "router",
        "epoch": "a",
        "llmservice": "chat",
        "policy": "least-loaded",
        "draining": False,
        "in_flight": 3,
        "replicas": [
            {"name": "chat-0", "admin_url": "http://127.0.0.1:1", "ready": True, "running": 2,
             "waiting": 1, "kv_free_blocks": 75, "kv_total_blocks": 100, "in_flight": 3},
        ],
        "seconds": {"first_s": 100, "end_s": 102, "classes": {"chat": {"good": [1, 2],
                                                                      "total": [2, 2]}}},
        "a field of a later version": {},
        **changes,
    }  # fmt: skip


def _view(**changes: Any) -> RouterView:
    return msgspec.convert(_state(**changes), RouterView)


@asynccontextmanager
async def _served(respond: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/control/state", respond)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _reader(respond: Any) -> AsyncIterator[StateReader]:
    async with _served(respond) as url, aiohttp.ClientSession() as session:
        yield StateReader(session, URL(url))


async def test_a_router_is_read_from_the_requested_second_on() -> None:
    async def respond(request: web.Request) -> web.Response:
        assert request.query["seconds_since"] == "42"
        return web.json_response(_state())

    async with _reader(respond) as reader:
        view = await reader.router(42)
    assert view == _view()


async def test_the_largest_service_is_read_and_its_page_is_small() -> None:
    replicas = [{**_state()["replicas"][0], "name": f"chat-engine-{n}"} for n in range(1_000)]

    async def respond(_: web.Request) -> web.Response:
        return web.json_response(_state(replicas=replicas))

    async with _reader(respond) as reader:
        view = await reader.router(0)
    page = WatchPage(ServiceHistory(), SLO)
    page.router = view
    update = page.update()
    assert b"chat-engine-999" in update
    assert len(update) < 1 << 19


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[" * 100_000,
        json.dumps(_state(role="engine")).encode(),
        json.dumps(_state(seconds=None)).encode(),
        json.dumps(_state(replicas=[{"name": "x"}] * 2001)).encode(),
        json.dumps(_state(in_flight=-1)).encode(),
        json.dumps(_state(in_flight=10**30)).encode(),
        json.dumps(_state(seconds={"first_s": 0, "end_s": 1, "classes": {"chat": {"good": [2],
                                                                               "total": [1]}}})
                   ).encode(),
        json.dumps(_state(seconds={"first_s": 0, "end_s": 1, "classes": {"chat": {"good": [2],
                                                                               "total": []}}})
                   ).encode(),
        json.dumps(_state(seconds={"first_s": 10**9, "end_s": 1, "classes": {"chat": {"good": [1],
                                                                                   "total": [1]}}})
                   ).encode(),
        b'"' + b"x" * (100 << 20) + b'"',
    ],
    ids=["empty", "HTML", "nested", "engine", "no seconds", "replicas", "negative", "huge",
         "more good than total", "lengths", "other seconds",
         "100 MB"],
)  # fmt: skip
async def test_a_state_that_cannot_be_used_is_a_sentence(body: bytes) -> None:
    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=body)

    async with _reader(respond) as reader:
        with pytest.raises(ReadError, match=r"^http://127\.0\.0\.1:\d+: ") as raised:
            await reader.router(0)
    assert len(str(raised.value)) < 200


async def test_redirects_are_not_followed_and_engines_elsewhere_are_not_read() -> None:
    async def respond(_: web.Request) -> web.Response:
        raise web.HTTPFound("http://192.0.2.1/")

    async with _reader(respond) as reader:
        with pytest.raises(ReadError, match="status 302"):
            await reader.router(0)
        for url in ("http://192.0.2.1:80", "file:///etc/passwd", "http://[", None):
            replica = msgspec.convert({"name": "x", "admin_url": url}, type(_view().replicas[0]))
            assert await reader.engine(replica) is None


def test_the_history_keeps_a_window_and_starts_again_after_a_restart() -> None:
    history = ServiceHistory()
    for now in range(0, 4000, 400):
        seconds = {"first_s": now, "end_s": now + 400,
                   "classes": {"chat": {"good": [1] * 400, "total": [2] * 400}}}  # fmt: skip
        history.add(_view(seconds=seconds), {}, 1_000.0 + now)
    assert history.next_s == 4000
    (counts,) = history.counts().values()
    assert (len(counts.total), sum(counts.good), sum(counts.total)) == (WINDOW_S, 900, 1800)
    history.add(_view(epoch="b"), {}, 5000.0)
    assert {name: list(one.total) for name, one in history.counts().items()} == {"chat": [2, 2]}


def test_a_history_is_bounded_if_every_reading_has_other_classes_and_seconds() -> None:
    history = ServiceHistory()
    for reading in range(300):
        end_s = reading * 50 % 7_000  # the clock of the router also goes back
        counts = {"good": [1] * 50, "total": [1] * 50}
        classes = {f"c{reading}-{at}": counts for at in range(20)}
        seconds = {"first_s": end_s - 50, "end_s": end_s, "classes": classes}
        history.add(_view(seconds=seconds), {}, float(reading))
        kept = history.counts()
        assert 0 < len(kept) <= MAX_CLASSES
        assert all(len(one.total) <= WINDOW_S for one in kept.values())


def test_changes_of_replicas_and_budget_are_observed() -> None:
    history = ServiceHistory()
    load = EngineLoad(token_budget=1024)
    history.add(_view(), {"chat-0": load}, 1.0)
    two = [*_state()["replicas"], {"name": "chat-1"}]
    history.add(_view(replicas=two), {"chat-0": EngineLoad(token_budget=768)}, 2.0)
    history.add(_view(replicas=two), {}, 3.0)
    assert [change.message for change in history.changes] == [
        "token budget 1,024 → 768", "replicas 1 → 2",
    ]  # fmt: skip


def test_an_update_judges_the_window_and_escapes_hostile_texts() -> None:
    history = ServiceHistory()
    seconds = {"first_s": 0, "end_s": 600, "classes": {
        "chat": {"good": [3] * 600, "total": [3] * 600},
        HOSTILE: {"good": [0] * 600, "total": [1] * 600},
    }}  # fmt: skip
    replicas = [{**_state()["replicas"][0], "name": HOSTILE, "detail": HOSTILE}]
    page = WatchPage(history, SLO)
    page.router = _view(seconds=seconds, replicas=replicas, llmservice=HOSTILE, policy=HOSTILE)
    page.problem = HOSTILE
    history.add(page.router, {}, time.time())
    update = msgspec.json.decode(page.update())
    html = "".join(update["parts"].values())
    assert "onerror" in html
    assert "<img" not in html
    assert "PASS" in update["parts"]["promises"]
    assert update["data"]["groups"] == ["chat", HOSTILE.replace("\u202e", r"\u202e")]
    assert "\u202e" not in html
    assert "1800 of 1800" not in page.render().split("<main>")[0]
    goodput = next(one for one in update["data"]["figures"] if one["name"] == "goodput")
    assert goodput["series"][0]["values"][5:50] == [3] * 45


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, "<html>", "not the state of a Goodput"),
        (404, "", "responded with status 404"),
        (200, json.dumps(_state(role="engine")), "not the admin port of a router"),
    ],
    ids=["html", "missing", "engine"],
)
async def test_a_url_that_never_has_a_router_is_an_error(
    status: int, body: str, problem: str
) -> None:
    async def respond(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    history = ServiceHistory()
    page = WatchPage(history, SLOClasses())
    async with _served(respond) as url:
        with pytest.raises(UnreachableError, match=f"{problem}.*; give the admin URL of a router"):
            await poll(url, page, history, first_s=0.0)


async def test_a_closed_port_is_an_error() -> None:
    history = ServiceHistory()
    page = WatchPage(history, SLOClasses())
    with pytest.raises(UnreachableError, match="not reachable; give the admin URL"):
        await poll("http://127.0.0.1:1", page, history, first_s=0.0)


async def test_a_wrong_url_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    page = WatchPage(ServiceHistory(), SLOClasses())
    with pytest.raises(UnreachableError):
        await poll("http://127.0.0.1:1", page, ServiceHistory(), first_s=0.01, every_s=0.02)
    expected = "http://127.0.0.1:1: not reachable; it is tried again for 0.01 s\n"
    assert capsys.readouterr().err == expected


async def test_a_service_that_stops_is_reported_as_lost_once_and_tried_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    statuses = iter([200, 503, 503, 200])
    done = asyncio.Event()

    async def respond(_: web.Request) -> web.Response:
        status = next(statuses, None)
        if status is None:
            done.set()
        return web.json_response(_state(), status=status or 200)

    history = ServiceHistory()
    page = WatchPage(history, SLOClasses())
    async with _served(respond) as url:
        polling = asyncio.ensure_future(poll(url, page, history, first_s=0.0, every_s=0.0))
        await asyncio.wait_for(done.wait(), 20)
        polling.cancel()
        await asyncio.wait([polling])
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"lost the service, which is tried again every second: {url}: responded with status 503",
        "reading the service again",
    ]


def test_a_service_that_was_not_read_yet_has_a_page() -> None:
    page = WatchPage(ServiceHistory(), SLOClasses())
    assert "waiting for the service" in page.render()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give one of these: the URL of a router's"),
        (["http://127.0.0.1:1", "--events"], "give one of these: the URL of a router's"),
        (["file:///etc/passwd"], "is not a URL such as"),
        (["http://127.0.0.1:99999"], "Port out of range"),
        (["http://127.0.0.1:1", "-f", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_an_invalid_command_line_is_rejected(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["replay", "watch", *arguments]) == 64
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_service_started_with_ui_has_a_live_page(browser: Browser) -> None:
    command = [sys.executable, "-m", "goodput_core", "up", "-f", "examples/chat.yaml"]
    with subprocess.Popen(
        [*command, "--ui", "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stderr is not None
        address = ""
        while not address:
            address = child.stderr.readline().partition("live page: ")[2].strip()
        try:
            with opened(browser, address) as page:
                expect(page.locator("#service")).to_contain_text(
                    "2 of 2 replicas ready", timeout=30_000
                )
                expect(page.locator("#replicas")).to_contain_text("chat-1")
                # A page that was opened before the service was known has no name yet.
                page.reload()
                expect(page.locator("h1")).to_have_text("chat")
                assert page.evaluate("document.documentElement.scrollWidth") == 1200
                expect(page.locator("#load .uplot canvas")).to_be_visible()
        finally:
            child.terminate()
            child.communicate(timeout=60)
    assert child.returncode == 0
