"""As many open files as the system allows: every pod that is asked keeps a connection.

Container runtimes leave a process 1,024 files and let it have many more; whoever looks after a
hundred services needs them. Nothing of ours uses `select`, which could not count so far.
"""

from __future__ import annotations

import resource

__all__ = ["raise_open_files"]


def raise_open_files() -> int:
    """Raise this process's limit as far as it may go without privileges; returns the limit."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ValueError, OSError):  # macOS refuses "unlimited"
        return soft
    return most
