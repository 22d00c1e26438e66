"""Learnt capacity of the replica law, as stored in the status of a service.

A restarted operator continues with the learnt capacity and the start-up times, as it does with the
limits in the ConfigMap. They change slowly, and no engine reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from goodput_core.control import MAX_STARTUPS, LearntCapacity
from goodput_core.spec.codec import encode
from goodput_core.spec.status import LearntStatus
from goodput_core.units import NS_PER_S
from goodput_operator.kube.objects import format_time

__all__ = ["learnt_status", "restore_learnt"]

_PERMILLE: Final = 1000
_PERCENT: Final = 100
_MAX_PER_S: Final = 10**6
"""More requests per second are stored as this."""
_MAX_SHARE: Final = 100
"""Shares, and a burstiness, above this are stored as this."""
_PROVEN_RATE: Final = "provenMilliRequestsPerSecond"
_FAILED_RATE: Final = "failedMilliRequestsPerSecond"
_MAX_STARTUP_S: Final = 24 * 3600
_SAME_TIME_S: Final = 2
"""Times closer than this are the same, because two clocks are rounded to seconds."""


def learnt_status(
    learnt: LearntCapacity,
    startups_ns: Sequence[int],
    stored: Mapping[str, Any],
    *,
    now_ns: int,
    unix_s: int,
) -> dict[str, Any] | None:
    """Return the status field; None if nothing has been learnt.

    Args:
        learnt: observed loads and burstiness; times on the monotonic clock.
        startups_ns: latest start-up times.
        stored: the stored field, whose times are kept if they are the same.
        now_ns: the current time on the monotonic clock.
        unix_s: the current time in seconds since 1970.
    """
    if learnt == LearntCapacity() and not startups_ns:
        return None

    def time_of(at_ns: int, key: str) -> str:
        at_s = unix_s - (now_ns - at_ns) // NS_PER_S
        earlier_s = _unix_s(stored.get(key))
        if earlier_s is not None and abs(earlier_s - at_s) <= _SAME_TIME_S:
            at_s = earlier_s
        return format_time(at_s)

    def stored_share(share: float, unit: int) -> int:
        return round(min(share, _MAX_SHARE) * unit)

    def stored_rate(per_s: float) -> int | None:
        return round(min(per_s, _MAX_PER_S) * _PERMILLE) or None

    shares, rates = (learnt.proven, learnt.failed), (0.0, 0.0)
    if learnt.of_requests:
        shares, rates = rates, shares
    burst_milli = stored_rate(learnt.peak_per_s)
    return encode(
        LearntStatus(
            proven_permille=stored_share(shares[0], _PERMILLE) or None,
            proven_milli_requests_per_second=stored_rate(rates[0]),
            proven_time=time_of(learnt.proven_ns, "provenTime") if learnt.proven else None,
            failed_permille=stored_share(shares[1], _PERMILLE) or None,
            failed_milli_requests_per_second=stored_rate(rates[1]),
            failed_time=time_of(learnt.failed_ns, "failedTime") if learnt.failed else None,
            burstiness_percent=stored_share(learnt.burstiness, _PERCENT),
            burst_milli_requests_per_second=burst_milli,
            burst_time=time_of(learnt.peak_ns, "burstTime") if burst_milli else None,
            startup_seconds=tuple(
                min(max(1, round(n / NS_PER_S)), _MAX_STARTUP_S)
                for n in startups_ns[-MAX_STARTUPS:]
            ),
        )
    )


def restore_learnt(
    stored: Any, *, now_ns: int, unix_s: int
) -> tuple[LearntCapacity, tuple[int, ...]]:
    """Return the learnt capacity and the start-up times of a status; invalid values are ignored.

    Args:
        stored: the stored field; other clients may have changed it.
        now_ns: the current time on the monotonic clock.
        unix_s: the current time in seconds since 1970.
    """
    values = stored if isinstance(stored, Mapping) else {}

    def observed(name: str, time: str, most: int) -> tuple[float, int]:
        """Return a value that is stored in thousandths, and the time of its observation."""
        value = _number(values.get(name), most * _PERMILLE) / _PERMILLE
        at_s = _unix_s(values.get(time))
        if not value or at_s is None:
            return 0.0, 0
        return value, now_ns - max(0, unix_s - at_s) * NS_PER_S

    proven, proven_ns = observed("provenPermille", "provenTime", _MAX_SHARE)
    failed, failed_ns = observed("failedPermille", "failedTime", _MAX_SHARE)
    of_requests = not {_PROVEN_RATE, _FAILED_RATE}.isdisjoint(values)
    if of_requests:
        proven, proven_ns = observed(_PROVEN_RATE, "provenTime", _MAX_PER_S)
        failed, failed_ns = observed(_FAILED_RATE, "failedTime", _MAX_PER_S)
    peak_per_s, peak_ns = observed("burstMilliRequestsPerSecond", "burstTime", _MAX_PER_S)
    burstiness = _number(values.get("burstinessPercent"), _MAX_SHARE * _PERCENT) / _PERCENT
    startups = values.get("startupSeconds")
    learnt = LearntCapacity(
        proven=proven,
        proven_ns=proven_ns,
        failed=failed,
        failed_ns=failed_ns,
        burstiness=burstiness or 1.0,
        peak_per_s=peak_per_s,
        peak_ns=peak_ns,
        of_requests=of_requests,
    )
    seconds = (_number(s, _MAX_STARTUP_S) for s in startups) if isinstance(startups, list) else ()
    return learnt, tuple(int(s) * NS_PER_S for s in seconds if s)[-MAX_STARTUPS:]


def _number(value: Any, most: int) -> int:
    """Return a whole number from 1 to `most`; 0 if the value is invalid."""
    return value if type(value) is int and 0 < value <= most else 0


def _unix_s(text: Any) -> int | None:
    """Return the seconds since 1970 of a time; None if the text is invalid."""
    if not isinstance(text, str):
        return None
    try:
        return round(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return None
