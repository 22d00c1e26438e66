"""What a child says on stdout once it listens, read with the distrust a pipe deserves."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from goodput_core.contract import EVENT_LISTENING
from goodput_operator.local.snapshot import Address

__all__ = ["parse_listening", "port_of"]


def parse_listening(line: str) -> Address | None:
    """The address in a `listening` line; None for any other line, which is then a log line."""
    if not line.startswith("{"):
        return None
    try:
        event: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or event.get("event") != EVENT_LISTENING:
        return None
    url, admin_url = _base_url(event.get("url")), _base_url(event.get("admin_url"))
    return Address(url=url, admin_url=admin_url) if url and admin_url else None


def port_of(url: str) -> int:
    """The port of a URL that `parse_listening` let through."""
    port = urlsplit(url).port
    assert port is not None, url
    return port


def _base_url(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    try:
        parts = urlsplit(value)
        whole = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        return None
    return value.rstrip("/") if whole else None
