"""Limits of the process: open files, which a server raises when it starts, and processors."""

from __future__ import annotations

import os
import resource
import sys

__all__ = ["count_cpus", "raise_open_files"]


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
