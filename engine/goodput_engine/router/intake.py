"""What the router must know of a request before it is placed: its class, targets and bytes.

The body is kept as it came and looked into for one field only; whether it is a valid request
is the engine's to say.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.contract import (
    HEADER_SLO_CLASS,
    HEADER_SLO_E2E_MS,
    HEADER_SLO_TPOT_MS,
    HEADER_SLO_TTFT_MS,
)
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_S, ms_to_ns
from goodput_engine.router.errors import ClientFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp import web
    from multidict import CIMultiDictProxy

    from goodput_core.slo.targets import SLOClass

__all__ = ["Promise", "promise_of", "read_body"]

_MAX_TARGET_MS: Final = 86_400_000.0


class _Peek(msgspec.Struct):
    slo_class: msgspec.Raw = msgspec.Raw(b"null")


_PEEK: Final = msgspec.json.Decoder(_Peek)
_CLASS: Final[msgspec.json.Decoder[str | None]] = msgspec.json.Decoder(str | None)


@dataclass(frozen=True, slots=True)
class Promise:
    """What one request is held to.

    Args:
        slo_class: its class's name.
        targets: the class's targets, the request's own winning.
    """

    slo_class: str
    targets: Targets


def promise_of(
    headers: CIMultiDictProxy[str],
    body: bytes,
    *,
    classes: Mapping[str, SLOClass],
    default_class: str,
) -> Promise:
    """The promise of a request, from its headers and, where they name no class, its body.

    Raises:
        ClientFault: 400 for an unknown class or a target that is no positive number.
    """
    name = headers.get(HEADER_SLO_CLASS)
    if name is None and b'"slo_class"' in body and "Content-Encoding" not in headers:
        name = _class_in(body)
    name = name or default_class
    slo_class = classes.get(name)
    if slo_class is None:
        known = ", ".join(classes)
        raise ClientFault(
            400, f"unknown SLO class {name[:80]!r}; the classes are {known}", "unknown_slo_class"
        )
    ttft_ns = _target_ns(headers, HEADER_SLO_TTFT_MS)
    tpot_ns = _target_ns(headers, HEADER_SLO_TPOT_MS)
    e2e_ns = _target_ns(headers, HEADER_SLO_E2E_MS)
    targets = slo_class.targets
    if ttft_ns is not None or tpot_ns is not None or e2e_ns is not None:
        targets = targets.overridden_by(Targets(ttft_ns=ttft_ns, tpot_ns=tpot_ns, e2e_ns=e2e_ns))
    return Promise(name, targets)


async def read_body(
    request: web.BaseRequest,
    *,
    limit_bytes: int,
    timeout_ns: int,
    make_room: Callable[[int], None],
) -> bytes:
    """The whole body, bounded in size and time.

    Args:
        request: of which nothing was read.
        limit_bytes: how long it may be.
        timeout_ns: how long it may take to come.
        make_room: told of every byte that is kept; what it raises goes through.

    Raises:
        ClientFault: 413 when it is too large, 408 when it does not come.
    """
    if request.content_length is not None and request.content_length > limit_bytes:
        raise _too_large(limit_bytes)
    content = request.content
    if content.is_eof():  # the usual case: it came with the head
        body = content.read_nowait()
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        make_room(len(body))
        return body
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_ns / NS_PER_S):
            while chunk := await content.readany():
                size += len(chunk)
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                make_room(len(chunk))
                parts.append(chunk)
    except TimeoutError as error:
        seconds = timeout_ns / NS_PER_S
        raise ClientFault(
            408, f"the request's body did not arrive within {seconds:g} s", "request_timeout"
        ) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _class_in(body: bytes) -> str | None:
    try:
        raw = _PEEK.decode(body).slo_class
    except msgspec.MsgspecError:
        return None  # not a JSON object: the engine says so, better than we could
    try:
        return _CLASS.decode(raw)
    except msgspec.MsgspecError as error:
        raise ClientFault(
            400, "slo_class must be a string that names a class", "invalid_slo_class"
        ) from error


def _target_ns(headers: CIMultiDictProxy[str], header: str) -> int | None:
    text = headers.get(header)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_TARGET_MS:
        raise ClientFault(
            400,
            f"{header} must be a number of milliseconds above 0, not {text[:40]!r}",
            "invalid_slo_target",
        )
    return max(1, ms_to_ns(value))


def _too_large(limit_bytes: int) -> ClientFault:
    return ClientFault(
        413, f"the request's body is over {limit_bytes >> 20} MiB", "request_too_large"
    )
