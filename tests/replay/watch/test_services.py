"""The pages of all services of an operator, in a browser and from states that are not trusted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from playwright.sync_api import expect
from tests.builders.pages import opened
from yarl import URL

from goodput_core.dispatch import run_command
from goodput_replay.watch.readings import MAX_REPLICAS, RouterView
from goodput_replay.watch.services import CombinedHistory, ServicePages, merge_routers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

HOSTILE = "</script><img src=x onerror=alert(1)>"
CLASSES = [{"name": "chat", "ttftMs": 500, "tpotMs": 50, "objective": "90%"}]
DECISION = {
    "at": "2026-11-27T02:40:10Z",
    "knob": "Replicas",
    "reason": "Demand",
    "message": f"replicas 1 → 2: {HOSTILE}",
    "applied": True,
}


def router_state(good: list[int], total: list[int], end_s: int, **changes: Any) -> dict[str, Any]:
    counts = {"chat": {"good": good, "total": total}}
    return {
        "role": "router",
        "epoch": "a",
        "llmservice": "chat",
        "in_flight": 3,
        "replicas": [
            {"name": "chat-0", "ready": True, "running": 2, "waiting": 1, "in_flight": 3,
             "kv_free_blocks": 75, "kv_total_blocks": 100},
        ],
        "seconds": {"first_s": end_s - len(total), "end_s": end_s, "classes": counts},
        **changes,
    }  # fmt: skip


def view(*arguments: Any, **changes: Any) -> RouterView:
    return msgspec.convert(router_state(*arguments, **changes), RouterView)


def test_counts_of_routers_are_added_up_from_the_latest_second_back() -> None:
    history = CombinedHistory()
    # The clocks of the routers differ, and the second one started later.
    history.add_readings(
        {"r0": view([1, 1, 2], [1, 2, 2], 103), "r1": view([5], [6], 5_000)}, {}, 100.0
    )
    counts = history.counts()["chat"]
    assert (counts.good, counts.total) == ([1, 1, 7], [1, 2, 8])
    history.add_readings({"r0": view([2, 4], [2, 4], 104)}, {}, 101.0)
    counts = history.counts()["chat"]
    assert (counts.good, counts.total) == ([1, 1, 2, 4], [1, 2, 2, 4]), "r1 is gone"


def test_a_replica_is_ready_if_all_routers_send_it_requests() -> None:
    replica = {"name": "chat-0", "ready": False, "in_flight": 1}
    merged = merge_routers(
        [view([], [], 1), view([], [], 9, replicas=[replica, {"name": "chat-1", "ready": True}])]
    )
    assert [(one.name, one.ready, one.in_flight) for one in merged.replicas] == [
        ("chat-0", False, 4),
        ("chat-1", True, 0),
    ]
    assert merged.in_flight == 6


def test_merged_routers_have_a_limited_number_of_replicas() -> None:
    views = [
        view([], [], 1, replicas=[{"name": f"{router}-{n}"} for n in range(MAX_REPLICAS)])
        for router in range(3)
    ]
    assert len(merge_routers(views).replicas) == MAX_REPLICAS


@contextmanager
def operator(answers: dict[str, bytes]) -> Iterator[str]:
    """Serve an operator's list, and the states of its pods, from one address."""

    class OperatorAnswers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path.partition("?")[0])
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), OperatorAnswers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def listed(url: str, **changes: Any) -> dict[str, Any]:
    return {
        "namespace": "team",
        "name": "chat",
        "slo": {"classes": CLASSES},
        "summary": {"phase": "Serving", "replicas": "1/1", "attainment": "99% ≥ 90%"},
        "decisions": [DECISION],
        "routers": {"chat-router": url},
        "engines": {"chat-0": url},
        **changes,
    }


@contextmanager
def pages(url: str, *options: str) -> Iterator[str]:
    """Run `replay watch --services` and return the address of its pages."""
    replay = str(Path(sys.executable).parent / "replay")
    process = subprocess.Popen(
        [replay, "watch", "--services", url, *options], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+/", line)
        assert found is not None, line
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=20)


async def _with_pages(
    url: str, *paths: str, host: str = "localhost", method: str = "GET", **names: Any
) -> list[Any]:
    async with aiohttp.ClientSession() as session:
        served = ServicePages(session, URL(url), **names)
        runner = aiohttp.web.AppRunner(served.app, shutdown_timeout=0.1)
        await runner.setup()
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        found = []
        for path in paths:
            async with session.request(
                method, URL(f"http://127.0.0.1:{port}{path}", encoded=True), headers={"Host": host}
            ) as response:
                found.append((response.status, await response.text()))
        await served.close()
        await runner.cleanup()
        return found


async def test_a_foreign_host_is_rejected_unless_it_is_named() -> None:
    with operator({"/services": b'{"services":[]}'}) as url:
        ((status, text),) = await _with_pages(url, "/", host="evil.example")
        assert (status, "only for this machine" in text) == (403, True)
        ((status, text),) = await _with_pages(url, "/", host="g.example", hosts=["g.example"])
        assert (status, "no LLMService" in text) == (200, True)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_the_pages_are_only_read(method: str) -> None:
    with operator({"/services": b'{"services":[]}'}) as url:
        found = await _with_pages(url, "/", "/team/chat/", "/nowhere", method=method)
    assert [status for status, _ in found] == [405, 405, 404]


async def test_a_service_that_is_unknown_or_without_router_is_named() -> None:
    listing = json.dumps({"services": [listed("", routers={}, slo={"classes": 7})]}).encode()
    with operator({"/services": listing}) as url:
        missing, empty = await _with_pages(url, "/team/other/", "/team/chat/")
    assert missing == (404, "the operator has no service of this name\n")
    assert empty[0] == 200
    assert "no router of the service is ready" in empty[1]


@pytest.mark.parametrize(
    "listing",
    [None, b"[]", b'{"services":7}', b'{"services":[{"name":"a"}]}', b"{" * 100_000],
    ids=["none", "a list", "a number", "no namespace", "nested"],
)
async def test_a_list_that_is_missing_or_invalid_is_a_sentence(listing: bytes | None) -> None:
    with operator({} if listing is None else {"/services": listing}) as url:
        ((status, text),) = await _with_pages(url, "/")
    assert status == 200
    assert "responded with status 404" in text or "not the services of an operator" in text


@pytest.mark.parametrize("address", ["ftp://x", "nonsense", "http://127.0.0.1:1"])
async def test_an_address_of_a_pod_that_is_invalid_is_a_sentence(address: str) -> None:
    routers = {"chat-router": address}
    listing = {"services": [listed(address, routers=routers, engines={"chat-0": address})]}
    with operator({"/services": json.dumps(listing).encode()}) as url:
        ((status, text),) = await _with_pages(url, "/team/chat/")
    assert status == 200
    assert 'class="verdict FAIL"' in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["http://a", "--services", "http://b"], "give one of these"),
        (["--events", "--services", "http://b"], "give one of these"),
        (["http://a", "--listen", "::"], "need --services"),
        (["--services", "b"], "is not a URL"),
    ],
)
def test_options_that_exclude_each_other_are_rejected(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["replay", "watch", *arguments]) == 64
    assert sentence in capsys.readouterr().err


def test_a_browser_shows_the_services_and_the_live_page_of_one(browser: Browser) -> None:
    answers: dict[str, bytes] = {}
    with operator(answers) as url, pages(url) as address:
        answers["/services"] = json.dumps(
            {"services": [listed(url), listed(url, name=HOSTILE, routers={})]}
        ).encode()
        answers["/control/state"] = json.dumps(
            router_state([9] * 60, [10] * 60, 1_000) | {"token_budget": 1536}
        ).encode()
        with opened(browser, address) as page:
            row = page.locator("#services tbody tr").first
            expect(row).to_contain_text("99% ≥ 90%")
            expect(page.locator("#services")).to_contain_text(HOSTILE)
            row.get_by_role("link").click()
            expect(page.locator("h1")).to_have_text("chat")
            expect(page.locator("#promises")).to_contain_text("540")
            expect(page.locator("#decisions")).to_contain_text(HOSTILE)
            expect(page.locator("#decisions")).to_contain_text("Demand")
            expect(page.locator("#connection")).to_have_text("live")
            state = router_state([5] * 5, [5] * 5, 1_005, in_flight=77)
            answers["/control/state"] = json.dumps(state | {"token_budget": 64}).encode()
            expect(page.locator("#service")).to_contain_text("77", timeout=10_000)
            expect(page.locator("#promises")).to_contain_text("565")
            # Another service of this name has no counts before its routers are ready.
            answers["/services"] = json.dumps(
                {"services": [listed(url, uid="later", routers={})]}
            ).encode()
            expect(page.locator("#promises")).not_to_contain_text("565", timeout=10_000)
            expect(page.locator("#service")).to_contain_text("no router of the service is ready")
