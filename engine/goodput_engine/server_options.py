"""The options that `goodput engine` and `goodput router` share, and the limits that these set.

The emulator imports the router's settings, which use this module. The module therefore does not
import the HTTP server.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.cli import argument_type, parse_port, parse_whole
from goodput_core.units import NS_PER_S, parse_duration, parse_some_duration

if TYPE_CHECKING:
    import argparse

__all__ = [
    "ADMIN_CONNECTIONS",
    "CLIENT_CONNECTIONS",
    "ConnectionLimits",
    "add_server_arguments",
    "connection_limits",
]

# Open files besides the connections of the serving port: admin port, core, logs and libraries.
_OTHER_FILES: Final = 256
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one port.

    Args:
        connections: maximum number of open connections. Beyond it, the connection that has been
            idle longest is closed. If none is idle, the new connection gets 503.
        head_s: time limit from the first byte of a request's head to the last, in seconds. After
            it, the request gets 408.
        idle_s: time after which an idle connection is closed, in seconds.
    """

    connections: int = 8192
    head_s: float = 10.0
    idle_s: float = 75.0

    def within(self, open_files: int, *, files_each: int) -> ConnectionLimits:
        """Return the limits, with fewer connections if the limit of open files requires it.

        Args:
            open_files: the limit of open files of this process.
            files_each: number of files that one connection may need.
        """
        affordable = max(1, (open_files - _OTHER_FILES) // files_each)
        if affordable >= self.connections:
            return self
        _log.warning(
            "fewer connections",
            extra={
                "connections": affordable,
                "wanted": self.connections,
                "open_files": open_files,
                "remedy": "raise the hard limit of open files (ulimit -Hn)",
            },
        )
        return replace(self, connections=affordable)


CLIENT_CONNECTIONS: Final = ConnectionLimits()
ADMIN_CONNECTIONS: Final = ConnectionLimits(connections=64)
"""The admin port has its own limits, so that it stays reachable if the serving port is full."""


def add_server_arguments(parser: argparse.ArgumentParser, *, port: int, admin_port: str) -> None:
    """Add the options of a process that serves requests: ports, limits, lifecycle.

    Args:
        parser: the parser of the command.
        port: default of the serving port.
        admin_port: help text of the admin port.
    """
    defaults = CLIENT_CONNECTIONS
    port_type = argument_type(parse_port, "port")
    duration = argument_type(parse_some_duration, "duration")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of both ports; `::` is every address (%(default)s)",
    )
    parser.add_argument(
        "--port",
        type=port_type,
        default=port,
        help="serving port; 0 takes any free port (%(default)s)",
    )
    parser.add_argument(
        "--admin-port",
        type=port_type,
        default=0,
        metavar="PORT",
        help=f"{admin_port} (%(default)s: any free port)",
    )
    parser.add_argument(
        "--max-connections",
        type=argument_type(_parse_connections, "number"),
        default=defaults.connections,
        metavar="N",
        help="maximum number of client connections; fewer if the limit of open files is too low "
        "(%(default)s)",
    )
    parser.add_argument(
        "--head-timeout",
        type=duration,
        default=round(defaults.head_s * NS_PER_S),
        metavar="DURATION",
        help="time limit for the head of a request, from its first byte (10s)",
    )
    parser.add_argument(
        "--keepalive-timeout",
        type=duration,
        default=round(defaults.idle_s * NS_PER_S),
        metavar="DURATION",
        help="time after which a connection without a request is closed (75s)",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="require one of the keys in this file, one per line, as bearer token for OpenAI's "
        "API; read again after each change",
    )
    parser.add_argument(
        "--grace",
        type=argument_type(parse_duration, "duration"),
        default="30s",
        metavar="DURATION",
        help="time for running requests to finish after SIGTERM (%(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON on stdout when ready"
    )
    parser.add_argument(
        "--exit-with-parent",
        action="store_true",
        help="stop at once, without a drain, when stdin is closed",
    )


def _parse_connections(text: str) -> int:
    return parse_whole(text, 1, 1_000_000, "a number of connections")


def connection_limits(args: argparse.Namespace) -> ConnectionLimits:
    """Return the limits that the options set."""
    return ConnectionLimits(
        connections=args.max_connections,
        head_s=args.head_timeout / NS_PER_S,
        idle_s=args.keepalive_timeout / NS_PER_S,
    )
