"""The Kubernetes API server as a pod reaches it: two kinds of read, bounded in size and time.

The engine's package has no client of Kubernetes, and one list and one watch need none. What is
read is bytes; what they mean is not known here.
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

__all__ = ["ApiError", "ApiServer", "in_cluster"]

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_TOKEN_BYTES: Final = 64 << 10
_MAX_ANSWER_BYTES: Final = 16 << 20
_MAX_SHOWN: Final = 300


class ApiError(GoodputError):
    """The API server gave no answer that can be used.

    Args:
        message: one sentence.
        gone: it no longer knows what was asked about (410): ask anew, from the beginning.
    """

    def __init__(self, message: str, *, gone: bool = False) -> None:
        self.gone = gone
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """Where it is and how to be let in.

    Args:
        url: its base URL.
        token_file: holds the bearer token; read for each request, as it changes.
        ca_file: holds the certificates that it may be signed by; None: no TLS.
    """

    url: str
    token_file: Path
    ca_file: Path | None

    def session(self) -> aiohttp.ClientSession:
        """A pool of connections of its own; the certificates are read now.

        Raises:
            ApiError: they cannot be.
        """
        secure: ssl.SSLContext | bool = True
        if self.ca_file is not None:
            try:
                secure = ssl.create_default_context(cafile=str(self.ca_file))
            except OSError as error:
                raise ApiError(f"{self.ca_file}: cannot be read: {error}") from error
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=secure))

    async def get(
        self,
        session: aiohttp.ClientSession,
        path: str,
        query: Mapping[str, str],
        *,
        within_s: float,
    ) -> bytes:
        """One answer, whole.

        Raises:
            ApiError: there is none, or it is a refusal.
        """
        timeout = aiohttp.ClientTimeout(total=within_s)
        try:
            async with session.get(
                self.url + path, params=query, headers=self._headers(), timeout=timeout
            ) as response:
                body = bytearray()
                while piece := await response.content.readany():
                    body += piece
                    if len(body) > _MAX_ANSWER_BYTES:
                        raise ApiError(f"{path}: over {_MAX_ANSWER_BYTES >> 20} MiB")
                _require_ok(response, bytes(body))
                return bytes(body)
        except (aiohttp.ClientError, OSError) as error:  # a time-out is an OSError
            raise ApiError(f"{path}: {_reason(error)}") from error

    async def lines(
        self,
        session: aiohttp.ClientSession,
        path: str,
        query: Mapping[str, str],
        *,
        within_s: float,
        silence_s: float,
    ) -> AsyncGenerator[bytes, None]:
        """The lines of an answer that goes on, until the other side ends it.

        Args:
            session: from `session`.
            path: what is asked.
            query: how.
            within_s: for the whole answer.
            silence_s: how long nothing may come.

        Raises:
            ApiError: it ended in any other way, or a line is longer than any should be.
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
                    *whole, rest = held.split(b"\n")
                    for line in whole:
                        yield bytes(line)
                    held = rest
                    if len(held) > _MAX_ANSWER_BYTES:
                        raise ApiError(f"{path}: a line over {_MAX_ANSWER_BYTES >> 20} MiB")
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(f"{path}: {_reason(error)}") from error

    def _headers(self) -> dict[str, str]:
        try:
            with self.token_file.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ApiError(f"{self.token_file}: cannot be read: {error}") from error
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}


def in_cluster(environment: Mapping[str, str]) -> ApiServer:
    """The API server of the cluster that this pod runs in.

    Raises:
        UsageError: this is no pod, or one without a service account.
    """
    host = environment.get("KUBERNETES_SERVICE_HOST")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise UsageError(
            "--endpoints: KUBERNETES_SERVICE_HOST is not set; it works in a pod of a cluster, "
            "elsewhere name replicas with --upstreams FILE or --upstream"
        )
    shown = f"[{host}]" if ":" in host else host
    return ApiServer(
        url=f"https://{shown}:{port}", token_file=_ACCOUNT / "token", ca_file=_ACCOUNT / "ca.crt"
    )


class _Status(msgspec.Struct):
    message: str = ""


def _require_ok(response: aiohttp.ClientResponse, body: bytes) -> None:
    if response.status == 200:
        return
    try:
        said = msgspec.json.decode(body, type=_Status).message
    except (msgspec.MsgspecError, ValueError, RecursionError):
        said = body.decode(errors="replace")
    message = f"{response.url.path}: {response.status} {' '.join(said.split())[:_MAX_SHOWN]}"
    raise ApiError(message, gone=response.status == 410)


def _reason(error: BaseException) -> str:
    return str(error)[:_MAX_SHOWN] or type(error).__name__
