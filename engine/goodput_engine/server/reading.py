"""Reads the bodies of requests: bounded in size and in time, each by itself and all together."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from goodput_engine.server.refusals import Refusal, bad_request, overloaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from goodput_engine.server.settings import ClientLimits

__all__ = ["Reading"]

T = TypeVar("T")


class Reading:
    """Where bodies are while they are read.

    Args:
        limits: what clients may take.
        readers: where long bodies are looked into.
    """

    def __init__(self, limits: ClientLimits, readers: Executor) -> None:
        self._limits = limits
        self._readers = readers
        self._held_bytes = 0

    async def look(self, request: web.Request, into: Callable[[bytes | bytearray], T]) -> T:
        """Read a body and return what is found in it.

        Args:
            request: of which nothing but the head was read.
            into: finds it; for a long body it is called in a thread.

        Raises:
            Refusal: 400, 408, 413 or 429 for a body that cannot be read, and what `into` raises.
        """
        if (request.content_length or 0) > self._limits.body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self._limits.body_s):
                    while chunk := await request.content.readany():
                        self._hold(len(body), len(chunk))
                        body += chunk
            except TimeoutError as error:
                raise Refusal(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"the body did not arrive within {self._limits.body_s:g} s",
                    code="request_timeout",
                ) from error
            except (web.RequestPayloadError, HttpProcessingError) as error:
                raise bad_request("the body cannot be decoded as its headers say") from error
            if len(body) <= self._limits.inline_bytes:
                return into(body)
            return await asyncio.get_running_loop().run_in_executor(self._readers, into, body)
        finally:
            self._held_bytes -= len(body)

    def _hold(self, have: int, more: int) -> None:
        if have + more > self._limits.body_bytes:
            raise self._too_large()
        if self._held_bytes + more > self._limits.all_bodies_bytes:
            raise overloaded("the engine is reading too many long requests; try again later", 1)
        self._held_bytes += more

    def _too_large(self) -> Refusal:
        return Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._limits.body_bytes >> 20} MiB",
            code="request_too_large",
        )
