"""API keys: which requests pass, what others get, and the replacement of the file."""

from __future__ import annotations

import json
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import aiohttp
import pytest
from multidict import CIMultiDict
from tests.builders.serving import server_state

from goodput_core.contract import PATH_LIVE, PATH_METRICS, PATH_MODELS, PATH_READY
from goodput_core.errors import InputError
from goodput_core.units import NS_PER_S
from goodput_engine.api_keys import ApiKeys
from goodput_engine.http_server import listen
from goodput_engine.openai.errors import APIError
from goodput_engine.server.app import serving_app
from goodput_engine.server.parsers import Parsers
from goodput_engine.server.state import ServerState

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import RunEngine, StartEngine

OLD, NEW = "old-key-1234", "new-key-5678"


def is_accepted(keys: ApiKeys, *values: str) -> bool:
    try:
        keys.require(CIMultiDict(("authorization", value) for value in values))
    except APIError as error:
        return (error.status, error.headers) != (401, {"WWW-Authenticate": "Bearer"})
    return True


@pytest.mark.parametrize(
    ("values", "accepted"),
    [
        pytest.param([f"Bearer {OLD}"], True, id="a key"),
        pytest.param([f"bearer  {NEW} "], True, id="scheme in lower case, spaces"),
        pytest.param([], False, id="no header"),
        pytest.param([OLD], False, id="no scheme"),
        pytest.param([f"Basic {OLD}"], False, id="another scheme"),
        pytest.param(["Bearer "], False, id="no key"),
        pytest.param([f"Bearer {OLD}x"], False, id="a longer key"),
        pytest.param([f"Bearer {OLD[:-1]}"], False, id="a shorter key"),
        pytest.param(["Bearer # comment"], False, id="a comment"),
        pytest.param(["Bearer \udcff\u00e9"], False, id="not ASCII"),
        pytest.param(["Bearer " + "x" * 100_000], False, id="a very long key"),
        pytest.param([f"Bearer {OLD}", f"Bearer {OLD}"], False, id="two headers"),
    ],
)
def test_a_request_needs_a_key_of_the_file(
    tmp_path: Path, values: list[str], accepted: bool
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# comment\n\n  {OLD}\n{NEW}\r\n")
    assert is_accepted(ApiKeys(file, lambda: 0), *values) is accepted


def test_a_changed_file_is_read_within_a_second_and_an_invalid_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, now_ns = tmp_path / "keys", 0
    file.write_text(OLD)
    keys = ApiKeys(file, lambda: now_ns)
    caplog.set_level(logging.INFO)
    contents: list[tuple[str | None, str, str]] = [
        (NEW, NEW, OLD),
        ("short", NEW, OLD),
        (None, NEW, OLD),
        (f"{OLD}\n# {NEW}", OLD, NEW),
    ]
    for content, valid, invalid in contents:
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        now_ns += NS_PER_S
        assert is_accepted(keys, f"Bearer {valid}")
        assert not is_accepted(keys, f"Bearer {invalid}")
    assert [record.message for record in caplog.records] == [
        "API keys replaced",
        "API keys not replaced",
        "API keys not replaced",
        "API keys replaced",
    ]
    assert not any(key in str(vars(record)) for record in caplog.records for key in (OLD, NEW))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param("", "0 API keys", id="empty"),
        pytest.param("# none\n", "0 API keys", id="only a comment"),
        pytest.param("valid-key\nsecret key\n", "line 2: a key must be 8 to 1024", id="space"),
        pytest.param("secret\n", "line 1: a key must be 8", id="short"),
        pytest.param("long-key\n" * 257, "257 API keys", id="too many"),
        pytest.param("x" * 65_537, "larger than 64 KiB", id="too large"),
    ],
)
def test_an_invalid_file_is_rejected_without_quoting_it(
    tmp_path: Path, content: str, problem: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(InputError) as caught:
        ApiKeys(file, lambda: 0)
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file or directory; name a file"):
        ApiKeys(tmp_path / "none", lambda: 0)


async def test_the_engine_requires_a_key_except_for_health_checks(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(OLD)
    state = ServerState(replace(server_state().settings, api_key_file=file))
    async with AsyncExitStack() as stack:
        parsers = Parsers.start(stack)
        url, _ = await listen(stack, serving_app(state, parsers), ("127.0.0.1", 0))
        client = await stack.enter_async_context(aiohttp.ClientSession(url))
        for method, path in (
            ("GET", PATH_MODELS),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/unknown"),
        ):
            async with client.request(method, path, data=b"x" * 1000) as response:
                assert response.status == 401
                assert json.loads(await response.read())["error"]["code"] == "invalid_api_key"
        async with client.get(PATH_LIVE) as response:
            assert response.status == 200
        # With a key, the request gets as far as the engine, which has not started here.
        key = {"Authorization": f"Bearer {OLD}"}
        async with client.get(PATH_MODELS, headers=key) as response:
            assert response.status == 503


async def test_the_option_of_the_command_closes_the_serving_port_to_others(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the tests\n{OLD}\n")
    engine = start_engine("--api-key-file", str(file))
    url, body = "/v1/completions", {"model": "chat", "prompt": "hello", "max_tokens": 2}
    async with aiohttp.ClientSession(engine.url) as client:
        for name, key in (
            ("Accept", "*/*"),
            ("Authorization", f"Bearer {NEW}"),
            ("X-API-Key", OLD),
        ):
            async with client.post(url, json=body, headers={name: key}) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        headers = {"Authorization": f"Bearer {OLD}"}
        async with client.post(url, json=body, headers=headers) as response:
            assert response.status == 200
            assert (await response.json())["usage"]["completion_tokens"] == 2
        for path in (PATH_LIVE, PATH_READY):
            async with client.get(path) as response:
                assert response.status == 200
    async with (
        aiohttp.ClientSession(engine.admin_url) as admin,
        admin.get(PATH_METRICS) as response,
    ):
        assert response.status == 200


def test_an_engine_does_not_start_without_its_file_of_keys(
    run_engine: RunEngine, tmp_path: Path
) -> None:
    ended = run_engine("--api-key-file", str(tmp_path / "none"))
    assert ended.returncode == 64
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert f"{tmp_path}/none" in line
    assert "Traceback" not in ended.stderr
