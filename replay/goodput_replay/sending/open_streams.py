"""Limits of the number of requests in flight: each needs a file, and a port of this machine.

The number that a plan needs depends on the responses, so it is not known before the run. If common
response times would reach the limit, the user learns it before the first request and not from an
INVALID run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from goodput_replay.plan import PlanStats

__all__ = ["count_ports", "find_stream_limit"]

# Files of a process besides its connections.
_OTHER_FILES: Final = 64
# Responses that are longer than this at the peak rate are rare.
_LONG_S: Final = 60
_PORTS_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_PORTS: Final = 16_384  # of IANA's range, which macOS uses


def find_stream_limit(
    stats: PlanStats, *, files: int, senders: int, ports: int, targets: int
) -> str | None:
    """Return a warning if the plan may need more open connections than this machine allows.

    Args:
        stats: totals of the plan.
        files: limit of open files of a process.
        senders: number of sending processes.
        ports: ports for connections to one target.
        targets: number of targets.

    Returns:
        One sentence; None if the limit cannot be reached, or only by very long responses.
    """
    by_files, by_ports = max(1, files - _OTHER_FILES) * senders, ports * targets
    most = min(by_files, by_ports)
    if stats.own_rows <= most or most >= _LONG_S * stats.peak_1s:
        return None
    cause = f"a process may open {files:,} files"
    remedy = "raise the limit with `ulimit -n`, or give more --workers"
    if by_ports < by_files:
        cause = f"this machine has {ports:,} ports for connections to a target"
        remedy = "widen net.ipv4.ip_local_port_range, or send from several machines with --shard"
    reached = format_duration(most * NS_PER_S // stats.peak_1s)
    return (
        f"at most {most:,} requests can be in flight, because {cause}; in the busiest second of "
        f"the plan, which has {stats.peak_1s:,} requests, responses of {reached} reach this limit; "
        f"requests beyond it are not sent, and the run is INVALID; {remedy}"
    )


def count_ports() -> int:
    """Return the number of ports for connections to one address and port."""
    try:
        low, high = map(int, _PORTS_FILE.read_text().split())
    except (OSError, ValueError):
        return _DEFAULT_PORTS
    return high - low + 1
