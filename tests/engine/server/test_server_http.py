"""The serving port over real sockets: error forms, headers, bounds, and what it does not serve."""

from __future__ import annotations

import asyncio
import json
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
from tests.builders.http import PATIENCE_S, connect, post_bytes

from goodput_engine.tokens import answer_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.engine.conftest import RunningEngine

COMPLETION = {"model": "chat", "prompt": "hello", "max_tokens": 4}


@pytest.fixture
async def http(engine: RunningEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(engine.url) as session:
        yield session


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    assert response.content_type == "application/json"
    body = await response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


async def test_a_response_that_is_not_streamed_has_the_replica_and_timings(
    http: aiohttp.ClientSession,
) -> None:
    async with http.post(
        "/v1/completions", json=COMPLETION, headers={"X-Request-Id": "mine-1"}
    ) as response:
        assert response.status == 200
        headers, body = response.headers, await response.json()
    assert headers["X-Goodput-Replica"] == "replica-7"
    assert headers["X-Goodput-Revision"] == "r1"
    assert headers["X-Request-Id"] == "mine-1"
    timings = json.loads(headers["X-Goodput-Timings"])
    assert 0 <= timings["queue_ms"] <= timings["ttft_ms"] <= timings["e2e_ms"]
    # Three gaps of one step of one millisecond each.
    assert timings["tpot_ms"] >= 1
    assert timings["output_tokens"] == body["usage"]["completion_tokens"] == 4
    assert timings["prompt_tokens"] == body["usage"]["prompt_tokens"] == 1


async def test_a_single_token_has_no_time_per_output_token(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json={**COMPLETION, "max_tokens": 1}) as response:
        assert json.loads(response.headers["X-Goodput-Timings"])["tpot_ms"] is None


async def test_a_request_without_an_id_gets_one(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json={**COMPLETION, "stream": True}) as response:
        first = response.headers["X-Request-Id"]
        assert response.headers["X-Goodput-Replica"] == "replica-7"
        assert response.content_type == "text/event-stream"
        await response.read()
    async with http.post("/v1/completions", json=COMPLETION) as response:
        assert response.headers["X-Request-Id"] not in {"", first}


async def test_the_output_has_the_length_of_the_header(http: aiohttp.ClientSession) -> None:
    async with http.post(
        "/v1/completions",
        json={"model": "chat", "prompt": "x"},
        headers={"X-Goodput-Output-Tokens": "17"},
    ) as response:
        body = await response.json()
    assert body["usage"]["completion_tokens"] == 17
    assert body["choices"][0] == {
        "index": 0,
        "text": answer_text(0, 17),
        "logprobs": None,
        "finish_reason": "stop",
    }


async def test_events_have_openais_form(http: aiohttp.ClientSession) -> None:
    body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/completions", json=body) as response:
        text = (await response.read()).decode()
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 1, 0]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["total_tokens"] == 5


@pytest.mark.parametrize(
    ("path", "data", "headers", "status", "param"),
    [
        pytest.param("/v1/completions", b"{", {}, 400, None, id="malformed JSON"),
        pytest.param(
            "/v1/completions", b'{"model":"chat"}', {}, 400, "prompt", id="no prompt"
        ),
        pytest.param(
            "/v1/chat/completions", b'{"model":"chat","messages":5}', {}, 400, "messages",
            id="a wrong type",
        ),
        pytest.param(
            "/v1/completions", b'{"model":"m","prompt":"x"}', {}, 404, "model", id="a model"
        ),
        pytest.param(
            "/v1/completions", b'{"model":"chat","prompt":"x"}', {"X-SLO-Class": "gold"}, 400,
            "X-SLO-Class", id="a class",
        ),
        pytest.param(
            "/v1/completions", b'{"model":"chat","prompt":"x"}', {"X-Priority": "high"}, 400,
            "X-Priority", id="a header",
        ),
        pytest.param(
            "/v1/completions", b"garbage", {"Content-Encoding": "gzip"}, 400, None, id="no gzip"
        ),
        pytest.param("/v1/embeddings", b"{}", {}, 404, None, id="an unknown path"),
    ],
)  # fmt: skip
async def test_invalid_input_gets_an_error_in_openais_form(
    *,
    http: aiohttp.ClientSession,
    path: str,
    data: bytes,
    headers: dict[str, str],
    status: int,
    param: str | None,
) -> None:
    async with http.post(path, data=data, headers=headers) as response:
        assert response.status == status
        assert (await error_of(response))["param"] == param
        assert response.headers["X-Goodput-Replica"] == "replica-7"


async def test_a_wrong_method_is_405_with_the_right_one(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        error = await error_of(response)
        assert error["message"] == "/v1/completions has no method GET; use POST"
        assert response.headers["X-Goodput-Replica"] == "replica-7"


async def test_a_wrong_path_gets_the_right_ones(http: aiohttp.ClientSession) -> None:
    async with http.post("/chat/completions") as response:  # the base URL lacks /v1
        assert response.status == 404
        error = await error_of(response)
        assert error["code"] == "unknown_path"
        assert error["message"] == (
            "no POST /chat/completions here; the paths of this port are /v1/completions, "
            "/v1/chat/completions, /v1/models, /v1/models/{name}, /health/live, /health/ready"
        )


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/metrics"), ("GET", "/control/state"), ("PATCH", "/control/limits")],
)
async def test_the_serving_port_has_no_admin_paths(
    http: aiohttp.ClientSession, method: str, path: str
) -> None:
    async with http.request(method, path) as response:
        assert response.status == 404


async def test_a_body_announced_too_large_is_413_before_it_is_read(engine: RunningEngine) -> None:
    async with connect(engine.url) as (reader, writer):
        writer.write(post_bytes(b"", length=999_999_999))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")


async def test_a_body_that_exceeds_the_limit_while_it_arrives_is_413(
    engine: RunningEngine,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with connect(engine.url) as (reader, writer), asyncio.timeout(PATIENCE_S):
        response = asyncio.ensure_future(reader.readuntil(b"}}"))
        writer.write(head)
        with suppress(ConnectionError):  # the engine does not read the rest of the body
            for _ in range(33):
                writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
                await writer.drain()
        head, _, body = (await response).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "request_too_large"


async def test_the_rest_of_a_compressed_body_that_is_too_large_is_not_decompressed(
    http: aiohttp.ClientSession, engine: RunningEngine
) -> None:
    compressor = zlib.compressobj(wbits=31)
    body = b"".join(compressor.compress(b" " * (1 << 20)) for _ in range(256)) + compressor.flush()
    process = psutil.Process(engine.process.pid)
    before_s = sum(process.cpu_times()[:2])
    for _ in range(4):
        async with http.post(
            "/v1/completions", data=body, headers={"Content-Encoding": "gzip"}
        ) as response:
            assert response.status == 413
            assert (await error_of(response))["code"] == "request_too_large"
        # The event loop serves this request after it has dealt with the rest of the body.
        async with http.get("/health/live") as response:
            assert response.status == 200
    # 1 GiB in all takes 3 s.
    spent_s = sum(process.cpu_times()[:2]) - before_s
    assert spent_s < 1.5


async def test_headers_are_bounded(http: aiohttp.ClientSession) -> None:
    async with http.post(
        "/v1/completions", json=COMPLETION, headers={"X-Long": "x" * 20_000}
    ) as response:
        assert response.status == 400


async def test_liveness_and_readiness(http: aiohttp.ClientSession) -> None:
    for path in ("/health/live", "/health/ready"):
        async with http.get(path) as response:
            assert response.status == 200


async def test_a_long_prompt_is_counted_to_the_token(http: aiohttp.ClientSession) -> None:
    async with http.post(
        "/v1/completions", json={**COMPLETION, "prompt": "word " * 60_000}
    ) as response:
        assert (await response.json())["usage"]["prompt_tokens"] == 60_000


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        pytest.param("/v1/completions", {"prompt": "x"}, id="completion"),
        pytest.param(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, id="chat"
        ),
    ],
)
async def test_a_token_whose_text_is_held_back_is_an_event_without_text(
    http: aiohttp.ClientSession, path: str, prompt: dict[str, Any]
) -> None:
    # The first tokens may be the beginning of the stop string, so their text is held back.
    stop = answer_text(0, 3) + " and so on"
    body = {"model": "chat", "max_tokens": 8, "stream": True, "stop": [stop], **prompt}
    body["stream_options"] = {"include_usage": True}
    async with http.post(path, json=body) as response:
        assert response.status == 200
        lines = [line async for line in response.content]
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [one["text"] if "text" in one else one["delta"]["content"] for one in choices]
    assert "".join(pieces) == answer_text(0, 8)
    assert pieces[:3] == ["", "", ""]
    assert len(pieces) == events[-1]["usage"]["completion_tokens"] == 8
