"""Wait for a start that a coordinator sends over HTTP, so that shards on several machines agree.

A shard is armed when its trace is read, its target has answered and its first requests are
prepared. It then serves its state, and accepts one start with the control token. The server is
closed before the first request is sent, so that it cannot disturb the sender.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from goodput_core.contract import (
    ENV_CONTROL_TOKEN,
    PATH_LIVE,
    PATH_READY,
    PATH_REPLAY_START,
    PATH_REPLAY_STATE,
)
from goodput_core.errors import UsageError
from goodput_core.replay_job import ShardState
from goodput_core.spec.codec import encode
from goodput_core.units import NS_PER_S
from goodput_replay.sending.process import wait_for_start
from goodput_replay.start_time import parse_instant, read_clock_error_ns, require_ahead

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from goodput_replay.shares import Share

__all__ = ["await_start", "read_token"]

_MAX_BODY_BYTES: Final = 1024
_BODY_S: Final = 5.0
_CLOSE_S: Final = 0.2
_MIN_AHEAD_NS: Final = NS_PER_S
"""Time before the start until which one is accepted."""


async def await_start(address: tuple[str, int], *, token: str, share: Share, requests: int) -> int:
    """Serve this shard's state until its start is near, and return the start.

    Args:
        address: IP address and port to listen on.
        token: token that a start must carry.
        share: the shard.
        requests: number of requests that the shard sends.

    Returns:
        The accepted start, nanoseconds since the Unix epoch.

    Raises:
        UsageError: the address cannot be listened on.
    """
    armed = _ArmedShard(token, share, requests)
    async with _serving(armed.app, address):
        start_at_ns = await armed.start
        # Until a second before the start, so that a start that is sent again is confirmed.
        await wait_for_start(start_at_ns)
    return start_at_ns


class _ArmedShard:
    """The HTTP application of one armed shard.

    Attributes:
        start: the accepted start, nanoseconds since the Unix epoch.
    """

    def __init__(self, token: str, share: Share, requests: int) -> None:
        self._token = token
        self._share = share
        self._requests = requests
        self.start: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.app = web.Application(client_max_size=_MAX_BODY_BYTES)
        self.app.add_routes(
            [
                web.get(PATH_LIVE, _respond_ok),
                web.get(PATH_READY, _respond_ok),
                web.get(PATH_REPLAY_STATE, self._get_state),
                web.post(PATH_REPLAY_START, self._post_start),
            ]
        )

    async def _get_state(self, _: web.Request) -> web.Response:
        return self._respond_state()

    async def _post_start(self, request: web.Request) -> web.Response:
        """Accept a start; the same start again is confirmed, and another one is rejected."""
        sent = request.headers.get("Authorization", "")
        if not hmac.compare_digest(sent.encode(), f"Bearer {self._token}".encode()):
            text = "the control token is missing or wrong; send it as `Authorization: Bearer TOKEN`"
            return _respond_error(401, text)
        try:
            async with asyncio.timeout(_BODY_S):
                start_at_ns = _parse_start(await request.read())
        except TimeoutError:
            return _respond_error(408, f"the body did not arrive within {_BODY_S:g} s; send it")
        except ValueError as error:
            return _respond_error(400, str(error))
        if self.start.done():
            if self.start.result() != start_at_ns:
                return _respond_error(409, "another start was accepted; it cannot be changed")
            return self._respond_state()
        try:
            require_ahead(start_at_ns, time.time_ns() + _MIN_AHEAD_NS, option="startAt")
        except UsageError as error:
            return _respond_error(409, str(error))
        self.start.set_result(start_at_ns)
        return self._respond_state()

    def _respond_state(self) -> web.Response:
        state = ShardState(
            shard=self._share.index + 1,
            shards=self._share.count,
            requests=self._requests,
            wall_ns=time.time_ns(),
            clock_error_ns=read_clock_error_ns(),
            start_at_ns=self.start.result() if self.start.done() else None,
        )
        return web.json_response(encode(state))


def _parse_start(body: bytes) -> int:
    """Parse `{"startAt": INSTANT}`.

    Raises:
        ValueError: the body has another form.
    """
    try:
        value: Any = json.loads(body)
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    if not isinstance(value, dict) or set(value) != {"startAt"}:
        raise ValueError('the body must be {"startAt": INSTANT}')
    return parse_instant(str(value["startAt"]))


async def _respond_ok(_: web.Request) -> web.Response:
    return web.Response(text="armed\n")


def _respond_error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)


@asynccontextmanager
async def _serving(app: web.Application, address: tuple[str, int]) -> AsyncIterator[None]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, *address).start()
        except OSError as error:
            raise UsageError(
                f"--arm: {address[0]}, port {address[1]}: cannot be listened on "
                f"({error.strerror}); choose another port"
            ) from error
        yield
    finally:
        await runner.cleanup()


def read_token(environment: Mapping[str, str]) -> str:
    """Return the control token.

    Raises:
        UsageError: it is not set.
    """
    token = environment.get(ENV_CONTROL_TOKEN, "")
    if not token:
        raise UsageError(
            f"--arm: {ENV_CONTROL_TOKEN} is not set; the start is accepted only with this token"
        )
    return token
