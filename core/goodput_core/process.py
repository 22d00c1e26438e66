"""Open files, processors and scheduling priority of a process."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path
from typing import Final

__all__ = ["count_cpus", "raise_open_files", "share_session_priority"]

_NICE: Final = re.compile(r"nice (-?\d+)\s*$")
_PROC: Final = Path("/proc")


def raise_open_files() -> int:
    """Raise the limit of open files to the highest allowed without privileges; return it.

    Container runtimes and shells start a process with a limit of 1,024 files and allow many
    more. The low default exists for `select`, which cannot watch a higher descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS refuses "unlimited"
        hard = soft
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def count_cpus() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not available on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def share_session_priority(pid: int, proc: Path = _PROC) -> None:
    """Give a process in a session of its own the priority of this session.

    Linux can divide the processors among sessions before it divides them among their processes
    (*autogroups*). A new session has the default priority, whatever that of its starter is.
    Without this function, a service that a replay of low priority starts would run before the
    client that measures it. If the system does not have such groups, or does not allow the change,
    nothing is changed.

    Args:
        pid: the process.
        proc: the folder of the system's processes.
    """
    try:
        nice = _NICE.search((proc / "self/autogroup").read_text(encoding="ascii"))
        # Without privileges, the kernel accepts only some changes in a second.
        if nice is not None and int(nice[1]):
            (proc / f"{pid}/autogroup").write_text(nice[1], encoding="ascii")
    except OSError:
        return
