"""Whether a port of this machine is free, asked before anything is started."""

from __future__ import annotations

import errno
import socket
from typing import Final

from goodput_core.errors import UsageError

__all__ = ["HOST", "require_free"]

HOST: Final = "127.0.0.1"


def require_free(port: int, option: str) -> None:
    """Refuse a port that something else listens on.

    Args:
        port: 0 means any free port and always passes.
        option: the command-line option that chose it.

    Raises:
        UsageError: the port is taken, or needs rights that this user lacks.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the router itself binds: connections of an earlier run may still linger.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            problem = {
                errno.EADDRINUSE: "is in use",
                errno.EACCES: "needs more rights than this user has",
            }.get(error.errno or 0, f"cannot be used ({error.strerror})")
            raise UsageError(
                f"port {port} on {HOST} {problem}; choose another with {option}, "
                f"or {option} 0 for any free one"
            ) from error
