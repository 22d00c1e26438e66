"""Target server: parse its URL and headers, and check the permission for a remote host."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from goodput_core.contract import PATH_METRICS
from goodput_core.errors import InputError, UnreachableError, UsageError

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

__all__ = [
    "Target",
    "parse_header",
    "parse_page_url",
    "parse_target",
    "require_permission",
    "tls_context",
]

_HEADER: re.Pattern[str] = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}):[ \t]*([ -~]{0,8000})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server with an OpenAI-compatible API.

    Args:
        url: scheme, host, port and optional prefix, without `/v1` and without a trailing slash.
        host: host name or address.
    """

    url: str
    host: str


def parse_target(text: str) -> Target:
    """Parse a URL such as `http://127.0.0.1:8000`, with or without `/v1`.

    Raises:
        ValueError: the text is not an HTTP URL, or has a user, a query or a fragment.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{text!r} is not an HTTP URL ({error})") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ValueError(f"{text!r} is not an HTTP URL; write for example http://127.0.0.1:8000")
    if "@" in parts.netloc:
        raise ValueError("the URL contains a user or a password; use --api-key-env or --header")
    if parts.query or parts.fragment:
        raise ValueError(f"{text!r} has a query or a fragment; leave it out")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Target(url=f"{parts.scheme}://{parts.netloc}{path}", host=parts.hostname)


def parse_page_url(text: str) -> str:
    """Parse the URL of a metrics page; the default path is `/metrics`.

    Raises:
        ValueError: as for `parse_target`.
    """
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise ValueError("the URL contains a user or a password; use --scrape-key-env")
    target = parse_target(text)
    path = urlsplit(target.url).path
    return target.url if path else f"{target.url}{PATH_METRICS}"


def parse_header(text: str) -> tuple[str, str]:
    """Parse a header such as `X-Tenant: blue`.

    Raises:
        ValueError: the text has no colon, or has characters that HTTP does not allow in a header.
    """
    match = _HEADER.fullmatch(text.strip())
    if match is None:
        # The value may be a secret, so only the name is printed.
        name = text.partition(":")[0][:40]
        raise ValueError(f"{name!r} is not a header; write NAME: VALUE in printable ASCII")
    return match[1], match[2]


def require_permission(target: Target, *, granted: bool) -> None:
    """Reject a target on another machine, unless `--yes` granted permission.

    Raises:
        UnreachableError: the host has no address.
        UsageError: the target is on another machine, and permission was not granted.
    """
    try:
        addresses = socket.getaddrinfo(target.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnreachableError(
            f"{target.url}: host {target.host!r} was not found ({error.strerror}); check --target"
        ) from error
    remote = [a for *_, (a, *_) in addresses if not _is_loopback(str(a))]
    if remote and not granted:
        raise UsageError(
            f"{target.url} is on another machine ({remote[0]}), which a replay would put under "
            "load; add --yes if this is allowed"
        )


def tls_context(ca_file: Path | None) -> ssl.SSLContext | None:
    """Return the TLS settings of `--ca-file`; None for those of the system.

    Raises:
        InputError: the file cannot be read, or has no certificates.
    """
    if ca_file is None:
        return None
    import ssl  # noqa: PLC0415 - the arguments need this module, and few runs need TLS

    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise InputError(f"{ca_file}: no PEM certificates; give the file of a CA") from error
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise InputError(f"{ca_file}: {why}; check --ca-file") from error


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
