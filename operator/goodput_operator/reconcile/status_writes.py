"""The time at which to write a changed status.

Each write of a status wakes all its watchers, so measurements alone are written rarely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["write_due_ns"]

_VOLATILE: Final = ("classes", "goodput", "learnt")
"""Status fields that may change in each interval."""
_VOLATILE_SUMMARY: Final = ("attainment", "goodput")
_VOLATILE_WRITE_NS: Final = 60 * NS_PER_S


def write_due_ns(
    status: Mapping[str, Any],
    stored: Mapping[str, Any],
    *,
    written_ns: int | None,
    now_ns: int,
) -> int | None:
    """Return the time at which to write a status; None if it equals the stored one.

    A change of volatile fields alone is written at most once a minute.

    Args:
        status: the new status.
        stored: the stored status.
        written_ns: time of the last write; None before this operator's first.
        now_ns: the current time.
    """
    if status == stored:
        return None
    if _without_volatile(status) != _without_volatile(stored) or written_ns is None:
        return now_ns
    return max(now_ns, written_ns + _VOLATILE_WRITE_NS)


def _without_volatile(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status without counts and without messages, which contain counts."""
    kept = {key: value for key, value in status.items() if key not in _VOLATILE}
    summary = status.get("summary") or {}
    kept["summary"] = {k: v for k, v in summary.items() if k not in _VOLATILE_SUMMARY}
    kept["conditions"] = [
        {key: value for key, value in condition.items() if key != "message"}
        for condition in status.get("conditions") or ()
    ]
    return kept
