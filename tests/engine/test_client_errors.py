"""Server and router answer every error of a client with 4xx and count it as no miss.

`GOODPUT_FUZZ_CASES` sets the number of cases (default 300) and lifts the time limit of the test.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import runpy
import socket
import threading
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.http import PATIENCE_S
from tests.builders.serving import server_state, serving
from tests.engine.router.conftest import SETTINGS, until

from goodput_core.slo.targets import SLOClass
from goodput_core.units import NS_PER_S
from goodput_engine.router.service import RouterService
from goodput_engine.router.settings import ProbeSettings, Timeouts
from goodput_engine.router.upstreams import Upstream
from goodput_engine.server.settings import ClientLimits
from goodput_engine.server.state import ServerState
from goodput_engine.server_options import ConnectionLimits

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

T = TypeVar("T")
CASES: Final = int(os.environ.get("GOODPUT_FUZZ_CASES", examples(300)))
BODY_S: Final = 0.25
AGAINST_THE_SERVICE: Final = ("missed", "shed", "error", "timeout")
CLASSES: Final = tuple(
    SLOClass(name=name, ttft_ms=60_000, tpot_ms=60_000) for name in ("interactive", "batch")
)


@dataclass
class RunningStack:
    """An engine behind a router, in the event loop of another thread.

    As the clients of the product do, a test sends while the server runs: the first bytes may
    arrive together with the connection.
    """

    loop: asyncio.AbstractEventLoop
    server: ServerState
    engine_url: str
    router: RouterService

    def responses(self, request: bytes, *, through_router: bool, leaves: bool = False) -> list[int]:
        """Send bytes and return the statuses of the responses; disconnect at once if `leaves`."""
        url = self.router.url if through_router else self.engine_url
        return _exchange(url, request, leaves=leaves)

    def settled(self) -> dict[str, int]:
        """Return the outcomes since the start, once no request is in flight."""
        return _run(self._settled(), self.loop)

    async def _settled(self) -> dict[str, int]:
        async with asyncio.timeout(PATIENCE_S):
            await self.router.outcomes.idle.wait()
            await self.server.idle.wait()
        totals: dict[str, int] = {}
        for counts in self.router.outcomes.by_class().values():
            for outcome, count in counts.items():
                totals[outcome] = totals.get(outcome, 0) + count
        return totals


def _run(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(2 * PATIENCE_S)


def _exchange(url: str, request: bytes, *, leaves: bool) -> list[int]:
    data = b""
    address = urlsplit(url)
    client = socket.create_connection((address.hostname, address.port), PATIENCE_S)
    with client, suppress(ConnectionError):
        client.sendall(request)
        while not leaves and not _complete(data):
            piece = client.recv(1 << 16)
            if not piece:
                break
            data += piece
    lines = [line for line in data.split(b"\r\n") if line.startswith((b"HTTP/1.1 ", b"HTTP/1.0 "))]
    statuses = [status for line in lines if (status := int(line.split()[1])) != 100]
    if statuses and statuses[0] >= 400:
        assert b'{"error":{"message":' in data, "errors are in OpenAI's form"
    return statuses


def _complete(data: bytes) -> bool:
    """True once the first response is complete."""
    head, end, body = data.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        return _complete(body)
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    if length is not None:
        return len(body) >= int(length[1])
    return bool(end) and body.endswith(b"0\r\n\r\n")


async def _start(stack: AsyncExitStack) -> tuple[ServerState, str, RouterService]:
    server = server_state(
        classes=CLASSES, clients=ClientLimits(body_s=BODY_S), max_num_seqs=64, max_waiting=1024
    )
    limits = ConnectionLimits(head_s=BODY_S, idle_s=5)
    url = await stack.enter_async_context(serving(server, connections=limits))
    router_settings = replace(
        SETTINGS,
        classes={one.name: one for one in CLASSES},
        timeouts=Timeouts(body_ns=round(BODY_S * NS_PER_S)),
        probe=ProbeSettings(),
        connections=limits,
    )
    router = await stack.enter_async_context(
        RouterService(
            router_settings, clock=time.monotonic_ns, upstreams=[Upstream("r", url, None)]
        )
    )
    await until(lambda: all(replica.ready for replica in router.replicas))
    return server, url, router


@pytest.fixture(scope="module")
def running() -> Iterator[RunningStack]:
    loop = uvloop.new_event_loop()  # as in the commands
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = AsyncExitStack()
    try:
        yield RunningStack(loop, *_run(_start(stack), loop))
        _run(stack.aclose(), loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


JSON_VALUES: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=True)
    | st.text(max_size=20)
    | st.just("chat"),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS: Final = st.sampled_from([
    "model", "prompt", "messages", "max_tokens", "min_tokens", "stop", "stream", "stream_options",
    "slo_class", "temperature", "top_p", "n", "logprobs", "logit_bias", "metadata", "tools",
    "response_format", "echo", "user", "seed", "unknown",
])  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A body that is close to valid, or not at all."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.binary(max_size=300))
    if kind == 1:
        return b"[" * draw(st.sampled_from([10, 2_000, 100_000]))
    if kind == 2:
        return b'{"model":"chat","slo_class":' + b"[" * draw(st.sampled_from([10, 100_000]))
    fields: dict[str, Any] = {"model": "chat", "prompt": "hello", "max_tokens": 1}
    for name in draw(st.lists(FIELDS, max_size=3)):
        fields[name] = draw(JSON_VALUES)
    data = json.dumps(fields, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if kind == 3:  # duplicate keys
        data = data[:-1] + b',"model":"chat","prompt":[1,2],"max_tokens":1}'
    elif kind in {4, 5}:  # a damaged byte
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + 1 :]
    elif kind == 6:
        lists = draw(st.sampled_from(["[70000]", "[-1]", "[4294967296]", "[1e400]", "[NaN]", "[]"]))
        data = b'{"model":"chat","prompt":%s,"max_tokens":1}' % lists.encode()
    elif kind == 7:
        data = b'{"model":"chat","prompt":"%s"}' % (b"w " * 70_000)
    return data


HEADERS: Final = st.sampled_from([
    b"X-SLO-Class: gold", b"X-SLO-Class: batch", b"X-SLO-Class: \xff\xfe", b"X-SLO-Class:",
    b"X-SLO-TTFT-Ms: nan", b"X-SLO-TTFT-Ms: -1", b"X-SLO-E2E-Ms: 1e999",
    b"X-Priority: 9" + b"9" * 99,
    b"X-Goodput-Output-Tokens: -3", b"X-Request-Id: \x80", b"Content-Type: text/html; charset=\xff",
    b"Content-Type: multipart/form-data", b"Content-Encoding: gzip", b"Content-Encoding: rot13",
    b"Content-Encoding: br", b"Content-Encoding: deflate", b"Expect: 100-continue", b"Expect: tea",
    b"Connection: close, x-slo-class", b"TE: trailers",
    b"Connection: upgrade\r\nUpgrade: websocket",
    b"X-Long: " + b"x" * 20_000, b"No colon", b": no name", b"X Y: space", b"Cookie: \x00",
    b"Accept: \xc3\x28", b"Host: \xff", b"Authorization: Bearer \xff", b"Trailer: X",
])  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A whole request in bytes."""
    body = draw(bodies())
    headers = draw(st.lists(HEADERS, max_size=3))
    if draw(st.booleans()) and b"Content-Encoding: gzip" in headers:
        body = gzip.compress(body, 1)
    path = draw(st.sampled_from([
        b"/v1/completions", b"/v1/completions", b"/v1/chat/completions",
        b"/v1/completions?\xff=%zz",
        b"http://other.host/v1/completions", b"//v1/completions", b"/v1/\xff", b"*",
        b"/v1/models/\xff",
    ]))  # fmt: skip
    method = draw(st.sampled_from([b"POST"] * 8 + [b"GET", b"PUT", b"P\xffST", b"CONNECT"]))
    framing = draw(st.integers(0, 9))
    if framing <= 4:
        headers.append(b"Content-Length: %d" % len(body))
    elif framing == 5:
        length = draw(
            st.sampled_from([b"-1", b"abc", b"+5", b"99999999999999999999", b"3", b"1, 2"])
        )
        headers.append(b"Content-Length: " + length)
    elif framing == 6:
        headers += [b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked"]
    elif framing == 7:
        headers.append(
            b"Transfer-Encoding: " + draw(st.sampled_from([b"gzip", b"chunked, x", b""]))
        )
    else:
        headers.append(b"Transfer-Encoding: chunked")
        size = draw(st.integers(1, max(1, len(body))))
        parts = [body[at : at + size] for at in range(0, min(len(body), 20 * size), size)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        body += draw(
            st.sampled_from([b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"zz\r\n", b"-1\r\n", b""])
        )
    version = draw(st.sampled_from([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/9.9", b"HTTQ/1.1"]))
    head = b"\r\n".join([b"%s %s %s" % (method, path, version), b"Host: x", *headers, b"", b""])
    whole = head + body
    return whole[: draw(st.integers(1, len(whole)))] if draw(st.integers(0, 9)) == 0 else whole


@pytest.mark.slow
# A count given by the user may take hours; the default takes seconds.
@pytest.mark.timeout(0 if "GOODPUT_FUZZ_CASES" in os.environ else 120)
@given(request=requests(), through_router=st.booleans(), leaves=st.booleans())
@settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_no_request_of_a_client_is_answered_5xx_or_counted_against_the_service(
    running: RunningStack, request: bytes, through_router: bool, leaves: bool
) -> None:
    statuses = running.responses(request, through_router=through_router, leaves=leaves)
    assert not [status for status in statuses if status >= 500], (statuses, request[:500])
    assert leaves or statuses, request[:500]
    outcomes = running.settled()
    assert not [name for name in AGAINST_THE_SERVICE if outcomes[name]], (outcomes, request[:500])
    assert running.router.outcomes.retries.keys() <= {"stale_connection"}


def test_a_given_number_of_cases_has_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOODPUT_FUZZ_CASES", "100000")
    (fuzz,) = (
        value
        for name, value in runpy.run_path(__file__).items()
        if name.startswith("test_no_request")
    )
    assert [mark.args for mark in fuzz.pytestmark if mark.name == "timeout"] == [(0,)]


UPLOADS: Final = [
    pytest.param(b"\xff", id="a byte that is not UTF-8"),
    pytest.param(b'{"model":"chat","prompt":"\xff","slo_class":"batch"}', id="not UTF-8 in a text"),
    pytest.param(b'{"slo_class":' + b"[" * 100_000, id="nested brackets"),
    pytest.param(b'{"model":"chat","prompt":' + b"[" * 100_000, id="nested brackets as prompt"),
    pytest.param(b'{"model":"chat","prompt":[[["a"]]],"slo_class":"batch"}', id="nested prompts"),
]


@pytest.mark.parametrize("through_router", [False, True], ids=["engine", "router"])
@pytest.mark.parametrize("body", UPLOADS)
def test_a_damaged_body_is_400(running: RunningStack, body: bytes, through_router: bool) -> None:
    before = running.settled()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert running.responses(request, through_router=through_router) == [400]
    assert running.settled() == before


def test_bad_chunks_are_400_and_end_the_connection(running: RunningStack) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    before = running.settled()
    for through_router in (False, True):
        statuses = running.responses(head + b'3\r\n{"m\r\nzz\r\n', through_router=through_router)
        assert set(statuses) == {400}
    assert running.settled() == before


def test_an_unknown_content_encoding_is_415(running: RunningStack) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: rot13\r\n"
    request = head + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"
    assert running.responses(request, through_router=False) == [415]
    assert running.responses(request, through_router=True) == [415]
