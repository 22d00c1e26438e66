"""Digests of image tags, from the API of their registries.

Registries are those of the installation, but their responses are not trusted: they are bounded in
size and time, redirects are not followed, and no response is quoted in a message. A wrong digest
does no harm beyond a pod that cannot start, because container runtimes verify what they pull.

Source: https://github.com/opencontainers/distribution-spec (pulling manifests), and
https://distribution.github.io/distribution/spec/auth/token/ (tokens for anonymous pulls).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from yarl import URL

from goodput_operator.render.image_names import DIGEST
from goodput_operator.untrusted import decode_untrusted

if TYPE_CHECKING:
    from goodput_operator.render.image_names import TagName

__all__ = ["RegistryClient", "UnresolvedTagError", "session_for_registries"]

_TOTAL_S: Final = 5.0
_MAX_MANIFEST_BYTES: Final = 4 << 20
"""Size that every registry accepts, according to the specification."""
_MAX_TOKEN_BYTES: Final = 64 << 10
_MAX_CONCURRENT: Final = 8
_MANIFESTS: Final = (
    "application/vnd.oci.image.index.v1+json, "
    "application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json"
)
_CHALLENGE: Final = re.compile(r'([A-Za-z]+)="([^"]{0,2000})"')


class _PullToken(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""


_TOKEN: Final = msgspec.json.Decoder(_PullToken)


class UnresolvedTagError(Exception):
    """A tag has no digest; the message is for users.

    Args:
        message: the registry and the problem.
        temporary: True if a later attempt can succeed without a change by a person.
    """

    def __init__(self, message: str, *, temporary: bool) -> None:
        super().__init__(message)
        self.temporary = temporary


def session_for_registries() -> aiohttp.ClientSession:
    """Return a session without cookies that uses the proxies of the environment."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegistryResponse:
    """A response.

    Args:
        status: its status.
        headers: its headers.
        body: the beginning of its body; empty unless a body was requested.
        complete: True if this is all of the body.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    complete: bool = True


class RegistryClient:
    """Resolves tags anonymously.

    Args:
        session: HTTP session for registries.
        urls: base URL of each registry's API, by the registry's name in images.
        total_s: time limit of all requests for one tag.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Mapping[str, str],
        *,
        total_s: float = _TOTAL_S,
    ) -> None:
        self._session = session
        self._urls = urls
        self._total_s = total_s
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def resolve(self, image: TagName) -> str:
        """Return the digest that the tag has now.

        Raises:
            UnresolvedTagError: the registry has no such tag, denies it, or did not respond in time.
        """
        name = image.registry
        try:
            async with self._slots, asyncio.timeout(self._total_s):
                return await self._resolve(image)
        except TimeoutError as error:
            message = f"registry {name} did not respond within {self._total_s:g} s"
            raise UnresolvedTagError(message, temporary=True) from error
        except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError) as error:
            message = f"registry {name} sent an invalid HTTP response"
            raise UnresolvedTagError(message, temporary=True) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            message = f"registry {name} cannot be reached: {str(error)[:200]}"
            raise UnresolvedTagError(message, temporary=True) from error

    async def _resolve(self, image: TagName) -> str:
        url = f"{self._urls[image.registry]}/v2/{image.repository}/manifests/{image.tag}"
        headers = {"Accept": _MANIFESTS}
        answer = await self._send("HEAD", url, headers)
        if answer.status == 401:
            challenge = answer.headers.get("WWW-Authenticate", "")
            headers["Authorization"] = f"Bearer {await self._token(image, challenge)}"
            answer = await self._send("HEAD", url, headers)
        if answer.status == 200 and "Docker-Content-Digest" not in answer.headers:
            # The header is optional. The digest is that of the manifest's bytes.
            answer = await self._send("GET", url, headers, _MAX_MANIFEST_BYTES)
            if answer.status == 200 and answer.complete:
                return f"sha256:{hashlib.sha256(answer.body).hexdigest()}"
        _require_found(image, answer.status)
        digest = answer.headers.get("Docker-Content-Digest", "")
        if not DIGEST.fullmatch(digest):
            message = f"registry {image.registry} sent an invalid digest"
            raise UnresolvedTagError(message, temporary=True)
        return digest

    async def _token(self, image: TagName, challenge: str) -> str:
        """Get the token for an anonymous pull from the server that the registry names."""
        kind, _, rest = challenge.partition(" ")
        values = dict(_CHALLENGE.findall(rest))
        if kind.lower() != "bearer" or "realm" not in values:
            message = f"registry {image.registry} requires credentials, which the operator lacks"
            raise UnresolvedTagError(message, temporary=False)
        own = URL(self._urls[image.registry])
        try:
            realm = URL(values["realm"])
            safe = realm.host and (realm.scheme == "https" or realm.origin() == own.origin())
        except ValueError:
            safe = False
        if not safe:
            message = f"registry {image.registry} names no token server with TLS"
            raise UnresolvedTagError(message, temporary=False)
        query = {"scope": f"repository:{image.repository}:pull"}
        if "service" in values:
            query["service"] = values["service"]
        answer = await self._send("GET", str(realm.update_query(query)), {}, _MAX_TOKEN_BYTES)
        if answer.status != 200:
            _require_found(image, 401 if answer.status in {400, 404} else answer.status)
        try:
            found = decode_untrusted(_TOKEN, answer.body if answer.complete else b"")
        except ValueError:
            found = _PullToken()
        token = found.token or found.access_token
        if not token or not token.isascii() or not token.isprintable():
            message = f"the token server of registry {image.registry} sent no token"
            raise UnresolvedTagError(message, temporary=True)
        return token

    async def _send(
        self, method: str, url: str, headers: Mapping[str, str], max_bytes: int = 0
    ) -> _RegistryResponse:
        """Send a request and return the response, with at most so many bytes of its body."""
        async with self._session.request(
            method, URL(url), headers=headers, allow_redirects=False
        ) as response:
            body = bytearray()
            if max_bytes and response.status == 200:
                while len(body) <= max_bytes and (piece := await response.content.readany()):
                    body += piece
            return _RegistryResponse(
                status=response.status,
                headers=response.headers,
                body=bytes(body),
                complete=len(body) <= max_bytes,
            )


def _require_found(image: TagName, status: int) -> None:
    """Check the status of a response.

    Raises:
        UnresolvedTagError: the status is not 200.
    """
    name = image.registry
    if status == 200:
        return
    if status == 404:
        message = f"registry {name} has no tag {image.tag} of {image.repository}"
        raise UnresolvedTagError(message, temporary=False)
    if status in {401, 403}:
        message = f"registry {name} denies {image.repository} without credentials"
        raise UnresolvedTagError(message, temporary=False)
    raise UnresolvedTagError(f"registry {name} returned status {status}", temporary=True)
