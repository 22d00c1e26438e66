from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING

import pytest
from tests.replay.sending.builders import http_response

from goodput_core.errors import UnreachableError, UsageError
from goodput_replay.sending import preflight
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.preflight import ServedModels, choose_models, list_models
from goodput_replay.sending.target import parse_target

if TYPE_CHECKING:
    from tests.replay.sending.builders import Script, Serve


def says(body: bytes, status: str = "200 OK", kind: str = "application/json") -> Script:
    async def script(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(http_response(body, status, kind))

    return script


def models(*owned: tuple[str, str]) -> bytes:
    return json.dumps(
        {"data": [{"id": i, "owned_by": o, "object": "model"} for i, o in owned]}
    ).encode()


async def served_by(url: str) -> ServedModels:
    async with open_session({}) as session:
        return await list_models(session, parse_target(url))


async def test_a_goodput_engine_is_recognised_by_the_owner_of_its_models(serve: Serve) -> None:
    url = await serve(says(models(("llama", "goodput"))))
    assert await served_by(url) == ServedModels(models=("llama",), goodput=True)


async def test_one_foreign_model_makes_a_target_foreign(serve: Serve) -> None:
    url = await serve(says(models(("a", "goodput"), ("b", "vllm"))))
    assert await served_by(url) == ServedModels(models=("a", "b"), goodput=False)


async def test_a_target_may_be_written_with_v1_and_a_slash(serve: Serve) -> None:
    url = await serve(says(models(("llama", ""))))
    assert (await served_by(f"{url}/v1/")).models == ("llama",)


BAD = {
    "a redirect": (
        says(b"", "308 Moved\r\nLocation: https://llm.example/v1/models"),
        "HTTP 308, a redirect to https://llm.example/v1/models; give the address it leads to",
    ),
    "500": (says(b"boom", "500 No"), "HTTP 500 (boom); is this an OpenAI-compatible server?"),
    "404": (says(b"", "404 Not Found"), "HTTP 404; is this an OpenAI-compatible server?"),
    "401": (says(b"", "401 No"), "HTTP 401, access denied; give a key with --api-key-env"),
    "HTML": (says(b"<html>", kind="text/html"), "the response (text/html) is not a list of models"),
    "other JSON": (
        says(b'{"status":"ok"}'),
        "the response (application/json) is not a list of models",
    ),
    "no model": (says(b'{"data":[]}'), "the target serves no model"),
    "endless": (says(b"[" * 3_000_000), "is not a list of models"),
}


@pytest.mark.parametrize(("script", "sentence"), BAD.values(), ids=BAD)
async def test_a_wrong_target_is_reported_before_a_request_is_sent(
    serve: Serve, script: Script, sentence: str
) -> None:
    with pytest.raises(UnreachableError) as caught:
        await served_by(await serve(script))
    assert sentence in str(caught.value)
    assert "/v1/models: " in str(caught.value)
    assert caught.value.exit_code == 64


async def test_a_refused_connection_names_the_target() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(
        UnreachableError, match=r"could not connect .*; is the server running there"
    ):
        await served_by(f"http://127.0.0.1:{port}")


async def test_a_target_without_a_response_times_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_request: bytes, _writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(preflight, "_TIMEOUT_S", 0.05)
    with pytest.raises(UnreachableError, match="no response within"):
        await served_by(await serve(hang))


async def test_a_closed_connection_names_the_target(serve: Serve) -> None:
    async def close(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with pytest.raises(UnreachableError, match="not an HTTP response"):
        await served_by(await serve(close))


ONE, TWO = ServedModels(models=("m",), goodput=True), ServedModels(models=("m", "n"), goodput=False)


@pytest.mark.parametrize(
    ("served", "mapping", "default", "in_trace", "expected"),
    [
        (ONE, {}, None, ["", "gpt-4"], {"": "m", "gpt-4": "m"}),
        (TWO, {}, None, ["n", "m"], {"n": "n", "m": "m"}),
        (TWO, {}, "n", ["", "m"], {"": "n", "m": "n"}),
        (TWO, {"gpt": "m"}, "n", ["gpt", "x"], {"gpt": "m", "x": "n"}),
        (TWO, {"gpt": "m"}, None, ["gpt", "n"], {"gpt": "m", "n": "n"}),
    ],
    ids=[
        "one is served",
        "names match",
        "one for all",
        "mapped, rest to one",
        "mapped and matching",
    ],
)
def test_every_row_gets_a_served_model(
    served: ServedModels,
    mapping: dict[str, str],
    default: str | None,
    in_trace: list[str],
    expected: dict[str, str],
) -> None:
    names = choose_models(served, mapping=mapping, default=default, in_trace=in_trace)
    assert {name: names(name) for name in in_trace} == expected


@pytest.mark.parametrize(
    ("mapping", "default", "in_trace", "sentence"),
    [
        ({}, "x", [""], "--model: the target does not serve 'x'; its models: m, n"),
        ({"a": "x"}, None, ["a"], "--model: the target does not serve 'x'; its models: m, n"),
        (
            {},
            None,
            ["gpt"],
            "the trace has requests with the model 'gpt', and the target serves m, n",
        ),
        ({}, None, [""], "the trace has requests without a model, and the target serves m, n"),
    ],
    ids=["unknown", "mapped to unknown", "trace's is not served", "trace names none"],
)
def test_a_model_that_is_not_served_is_rejected(
    mapping: dict[str, str], default: str | None, in_trace: list[str], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        choose_models(TWO, mapping=mapping, default=default, in_trace=in_trace)
    assert str(caught.value).startswith(sentence)
