"""Planned requests, HTTP responses, and the types of scripted servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from goodput_core.slo.targets import Targets
from goodput_replay.plan import PlannedRequest, PromptKey
from goodput_replay.sending.body import PreparedRequest

__all__ = [
    "Planned",
    "Prepared",
    "Script",
    "Serve",
    "WriteTrace",
    "http_response",
    "make_planned",
]

Script = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[Script], Awaitable[str]]
WriteTrace = Callable[..., Path]
Planned = Callable[..., PlannedRequest]
Prepared = Callable[..., PreparedRequest]


def http_response(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """Return a response with this body; `status` may contain more header lines."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def make_planned(number: int = 0, scheduled_ns: int = 0, **changes: object) -> PlannedRequest:
    """Make a small planned request; `changes` replace its fields."""
    values: dict[str, object] = {
        "request_id": f"row-{number}",
        "scheduled_ns": scheduled_ns,
        "slo_class": "",
        "targets": Targets(),
        "priority": None,
        "prompt": PromptKey(request_id=f"row-{number}", input_tokens=8),
        "output_tokens": 3,
        "max_output_tokens": None,
        "cancel_after_ns": None,
    }
    return PlannedRequest(**(values | changes))  # type: ignore[arg-type]  # any field may change
