"""A Hugging Face Hub on this machine: the part of its API that downloads need."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["COMMIT", "REPO", "LocalHub", "open_hub"]

REPO: Final = "tiny/chat"
COMMIT: Final = "c0" * 20
_LFS_BYTES: Final = 1 << 20
_CHUNK: Final = 256 << 10


class LocalHub:
    """The state of a hub with one model, whose branch `main` is `COMMIT`.

    Attributes:
        url: its address.
        files: content of the model's files by path.
        altered: content that is sent in place of a file's own.
        token: token that requests need; None for a public model.
        gated: True to refuse all requests as for a gated model.
        closes_after: bytes of each large response after which the connection closes; None to send
            all. It holds for the next response only.
        stalls_after: bytes of each large response after which nothing is sent any more; None to
            send all.
        ranges: the Range headers of the requests for large files.
        requests: number of all requests.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.url = ""
        self.files = files
        self.altered: dict[str, bytes] = {}
        self.token: str | None = None
        self.gated = False
        self.status: int | None = None
        self.closes_after: int | None = None
        self.stalls_after: int | None = None
        self.ranges: list[str | None] = []
        self.requests = 0

    def app(self) -> web.Application:
        """Return the hub's application."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/api/models/{org}/{name}/revision/{revision}", self._revision)
        app.router.add_get("/api/models/{org}/{name}/tree/{revision}", self._tree)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{path}", self._file)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: object) -> web.StreamResponse:
        self.requests += 1
        if self.status is not None:
            return web.Response(status=self.status)
        if self.gated:
            return _refuse(403, "GatedRepo")
        given = request.headers.get("Authorization")
        named = "/".join(request.match_info.get(key, "") for key in ("org", "name"))
        if named != REPO or (self.token is not None and given != f"Bearer {self.token}"):
            return _refuse(404 if given else 401, "RepoNotFound")
        if request.match_info["revision"] not in {"main", COMMIT}:
            return _refuse(404, "RevisionNotFound")
        assert callable(handler)
        response: web.StreamResponse = await handler(request)
        return response

    async def _revision(self, _: web.Request) -> web.Response:
        return web.json_response({"id": REPO, "sha": COMMIT, "siblings": []})

    async def _tree(self, _: web.Request) -> web.Response:
        tree = []
        for path, content in self.files.items():
            entry = {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
            if len(content) >= _LFS_BYTES:
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
            tree.append(entry)
        return web.json_response(tree)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        if path not in self.files:
            return _refuse(404, "EntryNotFound")
        content = self.files[path]
        large = len(content) >= _LFS_BYTES
        etag = hashlib.sha256(content).hexdigest() if large else _blob_id(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        content = self.altered.get(path, content)
        start = 0
        if request.method == "GET" and large:
            asked = request.headers.get("Range")
            self.ranges.append(asked)
            if asked is not None:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
        response = web.StreamResponse(status=206 if start else 200, headers=headers)
        response.content_length = len(content) - start
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        for at in range(start, len(content), _CHUNK):
            if large and self.closes_after is not None and at - start >= self.closes_after:
                self.closes_after = None
                assert request.transport is not None
                request.transport.close()
                return response
            if large and self.stalls_after is not None and at - start >= self.stalls_after:
                await asyncio.Event().wait()
            await response.write(content[at : at + _CHUNK])
        return response


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _refuse(status: int, code: str) -> web.Response:
    return web.Response(status=status, headers={"X-Error-Code": code})


@asynccontextmanager
async def open_hub(files: dict[str, bytes]) -> AsyncIterator[LocalHub]:
    """Serve a hub with a model on a free port."""
    hub = LocalHub(files)
    runner = web.AppRunner(hub.app(), handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield hub
    finally:
        await runner.cleanup()
