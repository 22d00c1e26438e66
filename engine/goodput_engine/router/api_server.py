"""Client of the Kubernetes API server for a pod: one list and one watch, bounded in size and time.

The engine's package does not depend on a Kubernetes client, which these two requests do not need.
This module returns bytes and does not interpret them.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from goodput_core.errors import GoodputError, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

__all__ = ["APIServer", "APIServerError", "in_cluster"]

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_TOKEN_BYTES: Final = 64 << 10
_MAX_RESPONSE_BYTES: Final = 16 << 20
_MAX_SHOWN: Final = 300


class APIServerError(GoodputError):
    """The API server sent no usable response.

    Args:
        message: one sentence.
        gone: the resource version expired (410), so a new list is needed.
    """

    def __init__(self, message: str, *, gone: bool = False) -> None:
        self.gone = gone
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class APIServer:
    """Address and credentials of the API server.

    Args:
        url: base URL of the API server.
        token_file: file with the bearer token, read for each request because the token changes.
        ca_file: file with the certificate authorities; None for the system's authorities.
    """

    url: str
    token_file: Path
    ca_file: Path | None

    def session(self) -> aiohttp.ClientSession:
        """Return a new pool of connections with the current certificates.

        Raises:
            APIServerError: the certificates cannot be read.
        """
        secure: ssl.SSLContext | bool = True
        if self.ca_file is not None:
            try:
                secure = ssl.create_default_context(cafile=str(self.ca_file))
            except OSError as error:
                raise APIServerError(f"{self.ca_file}: cannot be read: {error}") from error
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=secure))

    async def get(
        self,
        session: aiohttp.ClientSession,
        path: str,
        query: Mapping[str, str],
        *,
        within_s: float,
    ) -> bytes:
        """Return the body of one response.

        Raises:
            APIServerError: no response, or an error status.
        """
        timeout = aiohttp.ClientTimeout(total=within_s)
        try:
            async with session.get(
                self.url + path, params=query, headers=self._headers(), timeout=timeout
            ) as response:
                body = bytearray()
                while piece := await response.content.readany():
                    body += piece
                    if len(body) > _MAX_RESPONSE_BYTES:
                        raise APIServerError(f"{path}: over {_MAX_RESPONSE_BYTES >> 20} MiB")
                _require_ok(response, bytes(body))
                return bytes(body)
        except (aiohttp.ClientError, OSError) as error:  # a time-out is an OSError
            raise APIServerError(f"{path}: {_reason(error)}") from error

    async def lines(
        self,
        session: aiohttp.ClientSession,
        path: str,
        query: Mapping[str, str],
        *,
        within_s: float,
        silence_s: float,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch until the server ends it.

        Args:
            session: a pool of connections, made by `session`.
            path: path of the request.
            query: query of the request.
            within_s: time limit of the complete response.
            silence_s: longest time without data.

        Raises:
            APIServerError: the watch failed, or a line exceeds the limit.
        """
        timeout = aiohttp.ClientTimeout(total=within_s, sock_read=silence_s)
        try:
            async with session.get(
                self.url + path, params=query, headers=self._headers(), timeout=timeout
            ) as response:
                if response.status != 200:
                    _require_ok(response, await response.content.read(_MAX_SHOWN * 10))
                held = bytearray()
                while piece := await response.content.readany():
                    held += piece
                    *complete, rest = held.split(b"\n")
                    for line in complete:
                        yield bytes(line)
                    held = rest
                    if len(held) > _MAX_RESPONSE_BYTES:
                        raise APIServerError(f"{path}: a line over {_MAX_RESPONSE_BYTES >> 20} MiB")
        except (aiohttp.ClientError, OSError) as error:
            raise APIServerError(f"{path}: {_reason(error)}") from error

    def _headers(self) -> dict[str, str]:
        try:
            with self.token_file.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise APIServerError(f"{self.token_file}: cannot be read: {error}") from error
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}


def in_cluster(environment: Mapping[str, str]) -> APIServer:
    """Return the API server of the cluster that this pod runs in.

    Raises:
        UsageError: this process does not run in a pod.
    """
    host = environment.get("KUBERNETES_SERVICE_HOST")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise UsageError(
            "--endpoints: KUBERNETES_SERVICE_HOST is not set; it works in a pod of a cluster, "
            "elsewhere name replicas with --upstreams FILE or --upstream"
        )
    shown = f"[{host}]" if ":" in host else host
    return APIServer(
        url=f"https://{shown}:{port}", token_file=_ACCOUNT / "token", ca_file=_ACCOUNT / "ca.crt"
    )


class _Status(msgspec.Struct):
    message: str = ""


def _require_ok(response: aiohttp.ClientResponse, body: bytes) -> None:
    if response.status == 200:
        return
    try:
        detail = msgspec.json.decode(body, type=_Status).message
    except (msgspec.MsgspecError, ValueError, RecursionError):
        detail = body.decode(errors="replace")
    message = f"{response.url.path}: {response.status} {' '.join(detail.split())[:_MAX_SHOWN]}"
    raise APIServerError(message, gone=response.status == 410)


def _reason(error: BaseException) -> str:
    return str(error)[:_MAX_SHOWN] or type(error).__name__
