"""Read request bodies, bounded in size, time and memory, for server and router."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from goodput_engine.openai.errors import APIError, bad_request, overloaded

__all__ = ["MemoryLimit", "MemoryReservation", "read_body"]


class MemoryLimit:
    """Limit of the memory that all request bodies of a process use together.

    Args:
        limit_bytes: the limit.
    """

    __slots__ = ("_limit_bytes", "held_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def reserve(self) -> MemoryReservation:
        """Return an empty reservation for one body."""
        return MemoryReservation(self)

    def take(self, count: int) -> None:
        """Count bytes as held.

        Raises:
            APIError: 429 if the total would exceed the limit; no bytes are then counted.
        """
        if self.held_bytes + count > self._limit_bytes:
            raise overloaded("the bodies of running requests fill the memory limit; retry later", 1)
        self.held_bytes += count


class MemoryReservation:
    """The bytes that one body holds; `release` returns them to the limit."""

    __slots__ = ("_held_bytes", "_limit")

    def __init__(self, limit: MemoryLimit) -> None:
        self._limit = limit
        self._held_bytes = 0

    def add(self, count: int) -> None:
        """Reserve further bytes.

        Raises:
            APIError: 429 if all bodies together exceed the limit.
        """
        self._limit.take(count)
        self._held_bytes += count

    def release(self) -> None:
        """Return all bytes to the limit."""
        self._limit.held_bytes -= self._held_bytes
        self._held_bytes = 0


async def read_body(
    request: web.BaseRequest, *, limit_bytes: int, timeout_s: float, memory: MemoryReservation
) -> bytes:
    """Read the complete body of a request, bounded in size, time and memory.

    Args:
        request: a request whose body has not been read yet.
        limit_bytes: size limit of the body.
        timeout_s: time limit for receiving the complete body.
        memory: reservation that counts the body's bytes.

    Raises:
        APIError: 400 for a body that contradicts its `Content-Encoding` or `Transfer-Encoding`,
            408 for a body that is too slow, 413 for a body that is too large, 429 if `memory` is
            exhausted.
        ConnectionError: the client disconnected.
    """
    if request.content_length is not None and request.content_length > limit_bytes:
        raise _too_large(limit_bytes)
    content = request.content
    try:
        if content.is_eof():  # the usual case: the body arrived with the head
            body = content.read_nowait()
            if len(body) > limit_bytes:
                raise _too_large(limit_bytes)
            memory.add(len(body))
            return body
        parts: list[bytes] = []
        size = 0
        async with asyncio.timeout(timeout_s):
            while chunk := await content.readany():
                size += len(chunk)
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                memory.add(len(chunk))
                parts.append(chunk)
    except TimeoutError as error:
        raise APIError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body did not arrive within {timeout_s:g} s",
            code="request_timeout",
            close=True,
        ) from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        problem = bad_request("the body does not match its Content-Encoding or Transfer-Encoding")
        problem.close = True
        raise problem from error
    except APIError as error:
        error.close = True
        raise
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit_bytes: int) -> APIError:
    return APIError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body is larger than {limit_bytes / (1 << 20):.3g} MiB",
        code="request_too_large",
        close=True,
    )
