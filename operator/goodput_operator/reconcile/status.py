"""The status of a service, and when it is worth writing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["due_ns"]

_VOLATILE: Final = ("classes", "goodput")
"""What changes with every request; the rest changes when something happened."""
_VOLATILE_SUMMARY: Final = ("attainment", "goodput")
_REST_NS: Final = 60 * NS_PER_S


def due_ns(
    status: Mapping[str, Any],
    stored: Mapping[str, Any],
    *,
    written_ns: int | None,
    now_ns: int,
) -> int | None:
    """When a status is to be written; None: it says what is stored.

    Args:
        status: as it is to be.
        stored: as it is.
        written_ns: when it was last written; None: not by this operator.
        now_ns: now.
    """
    if status == stored:
        return None
    if _settled(status) != _settled(stored) or written_ns is None:
        return now_ns
    return max(now_ns, written_ns + _REST_NS)


def _settled(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status without what changes all the time, messages with counts in them included."""
    kept = {key: value for key, value in status.items() if key not in _VOLATILE}
    summary = status.get("summary") or {}
    kept["summary"] = {k: v for k, v in summary.items() if k not in _VOLATILE_SUMMARY}
    kept["conditions"] = [
        {key: value for key, value in one.items() if key != "message"}
        for one in status.get("conditions") or ()
    ]
    return kept
