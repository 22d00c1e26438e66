"""Digests of tags: hostile and slow registries, token servers, and a real registry."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tools.e2e.registry import MANIFEST, push_image, registry_command
from yarl import URL

from goodput_operator.registry import RegistryClient, UnresolvedTagError, session_for_registries
from goodput_operator.render.image_names import TagName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

DIGEST = f"sha256:{'5' * 64}"
IMAGE = TagName(registry="registry.test", repository="team/engine", tag="1")
PATH = "/v2/team/engine/manifests/1"
BIG = 5 << 20


@dataclass
class Registry:
    """A registry whose responses tests set.

    Attributes:
        status, headers, body: the response to a request with a valid or without a needed token.
        challenge: value of WWW-Authenticate if a token is needed; empty if none is.
        token: status and body of the token server.
        delay_s: time before each response.
        seen: method, path and query of each request.
        url: URL of the server.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Docker-Content-Digest": DIGEST})
    body: bytes = b""
    challenge: str = ""
    token: tuple[int, bytes] = (200, b'{"token": "secret"}')
    delay_s: float = 0.0
    seen: list[str] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(f"{request.method} {request.path_qs}")
        await asyncio.sleep(self.delay_s)
        if request.path == "/token":
            return web.Response(status=self.token[0], body=self.token[1])
        if self.challenge and request.headers.get("Authorization") != "Bearer secret":
            return web.Response(status=401, headers={"WWW-Authenticate": self.challenge})
        assert "vnd.oci.image.index" in request.headers["Accept"]
        return web.Response(status=self.status, headers=self.headers, body=self.body)

    async def resolve(self, image: TagName = IMAGE, *, total_s: float = 5) -> str:
        """Start the server, resolve the tag, and stop the server."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with TestServer(app) as server, session_for_registries() as session:
            self.url = str(server.make_url("")).rstrip("/")
            self.challenge = self.challenge.replace("URL", self.url)
            client = RegistryClient(session, {"registry.test": self.url}, total_s=total_s)
            return await client.resolve(image)


async def rejected(registry: Registry, *, total_s: float = 5) -> tuple[str, bool]:
    """Return the message of the failure, and if it is temporary."""
    with pytest.raises(UnresolvedTagError) as caught:
        await registry.resolve(total_s=total_s)
    return str(caught.value), caught.value.temporary


async def test_the_registry_states_the_digest_of_a_tag() -> None:
    registry = Registry()
    assert await registry.resolve() == DIGEST
    assert registry.seen == [f"HEAD {PATH}"]


async def test_without_the_header_the_digest_is_that_of_the_manifest() -> None:
    registry = Registry(headers={}, body=b'{"schemaVersion": 2}')
    assert await registry.resolve() == f"sha256:{hashlib.sha256(registry.body).hexdigest()}"
    assert registry.seen == [f"HEAD {PATH}", f"GET {PATH}"]


async def test_an_anonymous_token_is_fetched_if_the_registry_requires_one() -> None:
    challenge = 'Bearer realm="URL/token",service="registry.test",scope="repository:x:push"'
    registry = Registry(challenge=challenge)
    assert await registry.resolve() == DIGEST
    query = "scope=repository:team/engine:pull&service=registry.test"
    assert registry.seen == [f"HEAD {PATH}", f"GET /token?{query}", f"HEAD {PATH}"]
    registry = Registry(challenge=challenge, token=(200, b'{"access_token": "secret"}'))
    assert await registry.resolve() == DIGEST


@pytest.mark.parametrize(
    ("registry", "message", "temporary"),
    [
        (Registry(status=404), "registry.test has no tag 1 of team/engine", False),
        (Registry(status=403), "registry.test denies team/engine without credentials", False),
        (Registry(status=429), "registry.test returned status 429", True),
        (Registry(status=500), "registry.test returned status 500", True),
        (
            Registry(status=307, headers={"Location": "http://169.254.169.254/"}),
            "registry.test returned status 307",
            True,
        ),
        (
            Registry(headers={"Docker-Content-Digest": "sha256:../../x"}),
            "registry.test sent an invalid digest",
            True,
        ),
        (Registry(headers={}, body=b"x" * BIG), "registry.test sent an invalid digest", True),
        (
            Registry(headers={"X-Long": "x" * 20_000}),
            "registry.test sent an invalid HTTP response",
            True,
        ),
        (
            Registry(challenge='Basic realm="x"'),
            "registry.test requires credentials, which the operator lacks",
            False,
        ),
        (
            Registry(challenge='Bearer realm="http://169.254.169.254/token"'),
            "registry.test names no token server with TLS",
            False,
        ),
        (
            Registry(challenge='Bearer realm="https://["'),
            "registry.test names no token server with TLS",
            False,
        ),
        (
            Registry(challenge='Bearer realm="URL/token"', token=(403, b"")),
            "registry.test denies team/engine without credentials",
            False,
        ),
        (
            Registry(challenge='Bearer realm="URL/token"', token=(200, b"[]")),
            "the token server of registry registry.test sent no token",
            True,
        ),
        (
            Registry(challenge='Bearer realm="URL/token"', token=(200, b'{"token": "a\\nb"}')),
            "the token server of registry registry.test sent no token",
            True,
        ),
        (
            Registry(
                challenge='Bearer realm="URL/token"',
                token=(200, json.dumps({"token": "x" * 100_000}).encode()),
            ),
            "the token server of registry registry.test sent no token",
            True,
        ),
        (
            Registry(challenge='Bearer realm="URL/token"', token=(200, b'{"token": "wrong"}')),
            "registry.test denies team/engine without credentials",
            False,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_unusable_response_is_a_problem_in_one_sentence(
    registry: Registry, message: str, temporary: bool
) -> None:
    said, passes = await rejected(registry)
    assert said.removeprefix("registry ") == message
    assert passes == temporary
    assert len(registry.seen) <= 3
    assert not any("169.254" in line for line in registry.seen)


async def test_requests_use_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", registry.answer)
    async with TestServer(app) as proxy:
        monkeypatch.setenv("HTTP_PROXY", str(proxy.make_url("")))
        async with session_for_registries() as session:
            client = RegistryClient(session, {"registry.test": "http://registry.test"})
            assert await client.resolve(IMAGE) == DIGEST
    assert len(registry.seen) == 1


async def test_a_slow_registry_is_not_waited_for() -> None:
    began = asyncio.get_running_loop().time()
    message, temporary = await rejected(Registry(delay_s=30), total_s=0.2)
    assert (message, temporary) == ("registry registry.test did not respond within 0.2 s", True)
    assert asyncio.get_running_loop().time() - began < 5


async def test_a_registry_that_does_not_listen_is_a_temporary_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with session_for_registries() as session:
        client = RegistryClient(session, {"registry.test": f"http://127.0.0.1:{port}"})
        with pytest.raises(
            UnresolvedTagError, match=r"registry\.test cannot be reached: "
        ) as caught:
            await client.resolve(IMAGE)
    assert caught.value.temporary


@asynccontextmanager
async def real_registry(folder: Path) -> AsyncIterator[URL]:
    """Run a registry with an empty storage."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        *registry_command(folder, address),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = URL(f"http://{address}")
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):
            while True:
                try:
                    async with session.get(url / "v2/") as response:
                        assert response.status == 200
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def test_a_tag_of_a_real_registry_is_resolved_and_can_move(tmp_path: Path) -> None:
    async with real_registry(tmp_path) as url, session_for_registries() as session:
        name = f"{url.host}:{url.port}"
        client = RegistryClient(session, {name: str(url).rstrip("/")})
        image = TagName(registry=name, repository="team/engine", tag="1")
        with pytest.raises(UnresolvedTagError, match="has no tag 1 of team/engine"):
            await client.resolve(image)
        first = await push_image(url, "team/engine", "1", b"first")
        assert await client.resolve(image) == first
        second = await push_image(url, "team/engine", "1", b"second")
        assert await client.resolve(image) == second != first
        async with aiohttp.ClientSession() as puller:
            path = url / f"v2/team/engine/manifests/{first}"
            assert (await puller.get(path, headers={"Accept": MANIFEST})).status == 200, (
                "kept under its digest"
            )
