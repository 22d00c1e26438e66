"""What the API server answers to a call: the object, or a refusal in the server's own words.

Values instead of exceptions, because a refusal is an ordinary outcome here: it becomes a
condition that a user reads.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from goodput_operator.kube.objects import Object

__all__ = ["UNREACHABLE", "Answer", "Conflict", "Refusal", "read_answer"]

UNREACHABLE: Final = 0
"""In place of an HTTP status where none came."""
_MANAGER: Final = re.compile(r'conflict with "([^"]*)"')
_MOST_WORDS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """One field that another manager owns with another value.

    Args:
        manager: who, as the server names them.
        field: its path.
    """

    manager: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A call that did not do what it asked.

    Args:
        status: of HTTP, or `UNREACHABLE`.
        reason: the server's CamelCase reason, such as `AlreadyExists`.
        message: the server's sentence.
        conflicts: of a server-side apply.
    """

    status: int
    reason: str
    message: str
    conflicts: tuple[Conflict, ...] = ()

    @property
    def transient(self) -> bool:
        """Whether the same call may pass a little later although nobody changes anything."""
        # An API server that has just started knows nobody yet; and tokens change by the hour.
        return self.status in {UNREACHABLE, 401, 408, 429} or self.status >= 500

    @property
    def stale(self) -> bool:
        """Whether what we knew of the object was out of date: another uid, another version."""
        return self.status == 409 and self.reason == "Conflict" and not self.conflicts

    @property
    def invalid(self) -> bool:
        """Whether the object, as it would be after the call, breaks a rule of its kind."""
        return self.status == 422

    @property
    def gone(self) -> bool:
        """Whether there is no such object."""
        return self.status == 404


Answer = Object | Refusal


def read_answer(status: int, body: bytes) -> Answer:
    """Make sense of what the API server, or a proxy before it, sent.

    Args:
        status: of HTTP.
        body: of the answer.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):  # a proxy may send anything
        content = None
    if status < 300 and isinstance(content, dict):
        return content
    known: dict[str, Any] = content if isinstance(content, dict) else {}
    details = known.get("details")
    details = details if isinstance(details, dict) else {}
    message = known.get("message") or body[:_MOST_WORDS].decode(errors="replace").strip()
    return Refusal(
        status=status,
        reason=str(known.get("reason") or "Unknown"),
        message=str(message)[:_MOST_WORDS] or f"HTTP status {status} without a word",
        conflicts=tuple(_conflicts(details.get("causes"))),
    )


def _conflicts(causes: Any) -> list[Conflict]:
    found = []
    for cause in causes if isinstance(causes, list) else ():
        if isinstance(cause, dict) and cause.get("reason") == "FieldManagerConflict":
            manager = _MANAGER.search(str(cause.get("message")))
            found.append(
                Conflict(
                    manager=manager[1] if manager else "unknown", field=str(cause.get("field"))
                )
            )
    return found
