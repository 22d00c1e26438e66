"""Serves the admin ports of many pods that do not run, from one process.

    python benchmarks/stand_ins/fake_pods.py states.json --port 9000

Every address of this machine under 127.1 is an engine, every one under 127.2 a router. Their states
were recorded from real pods (`recorded_pods`), and their counters grow as under a constant load
that meets its objectives. The responses are rendered once a second for all pods, so a request costs
little. `GET /asked` returns the number of state requests.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import uvloop

from goodput_core.contract import PATH_CONTROL_STATE, ROLE_ENGINE, ROLE_ROUTER

ADDRESSES = {ROLE_ENGINE: "127.1", ROLE_ROUTER: "127.2"}
"""Prefix of the pods' addresses, by role."""
PATH_ASKED = "/asked"
_OF_ADDRESS = {address: role for role, address in ADDRESSES.items()}
_STATE = f"GET {PATH_CONTROL_STATE}".encode()
_ASKED = f"GET {PATH_ASKED} ".encode()
_PER_S = {ROLE_ENGINE: 0.01, ROLE_ROUTER: 0.005}
"""Increase per second, as a share of the recorded counts.

Two routers share the load that was recorded with one."""
_GOLDEN = 0.618
"""Spreads the increments of many counters evenly over the seconds."""


def grown(role: str, recorded: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return a recorded state some seconds later."""
    share = seconds * _PER_S[role]
    state = copy.deepcopy(recorded)
    if role == ROLE_ENGINE:
        state["answered"] = [
            _more(bin_, share, number * _GOLDEN % 1)
            for number, bin_ in enumerate(recorded["answered"])
        ]
        return state
    state["uptime_seconds"] += seconds
    state["arrivals"] += int(recorded["arrivals"] * share)
    # Repeat the recorded seconds, as each reader adds only those that it has not read.
    for bound in ("first_s", "end_s"):
        state["seconds"][bound] += int(seconds)
    for outcomes in state["outcomes"].values():
        outcomes["attained"] += int(outcomes.get("attained", 0) * share)
    for metrics in state["promises"].values():
        for counts in metrics.values():
            counts["judged"] += int(counts["judged"] * share)
    return state


def _more(bin_: list[int], share: float, phase: float) -> list[int]:
    """Add requests of the mean lengths of a bin, so that its means do not change."""
    requests, *tokens = bin_
    more = int(requests * share + phase)
    return [requests + more, *(count + more * (count // requests) for count in tokens)]


class Fleet:
    """Current responses of all pods."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self._recorded = recorded
        self._begun = time.monotonic()
        self.asked = 0
        self._responses: dict[str, bytes] = {}
        self.grow()

    def grow(self) -> None:
        seconds = time.monotonic() - self._begun
        for role in ADDRESSES:
            self._responses[role] = _http(200, grown(role, self._recorded[role], seconds))
        asyncio.get_running_loop().call_later(1, self.grow)

    def respond(self, request: bytes, role: str | None) -> bytes:
        if request.startswith(_ASKED):
            return _http(200, {"asked": self.asked})
        if role is None or not request.startswith(_STATE):
            return _http(404, {"error": {"message": "this stand-in only serves its state"}})
        self.asked += 1
        return self._responses[role]


def _http(status: int, body: dict[str, Any]) -> bytes:
    content = json.dumps(body, separators=(",", ":")).encode()
    return (
        b"HTTP/1.1 %d -\r\nContent-Type: application/json; charset=utf-8\r\n"
        b"Content-Length: %d\r\nServer: stand-in\r\n\r\n%s" % (status, len(content), content)
    )


class Connection(asyncio.Protocol):
    """One connection; its requests are sequential and have no bodies."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._transport: asyncio.Transport | None = None
        self._role: str | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement asyncio.Transport without being subclasses.
        self._transport = cast("asyncio.Transport", transport)
        address: str = transport.get_extra_info("sockname")[0]
        self._role = _OF_ADDRESS.get(".".join(address.split(".")[:2]))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._buffer.endswith(b"\r\n\r\n"):
            return
        request, self._buffer = self._buffer, b""
        assert self._transport is not None
        self._transport.write(self._fleet.respond(request, self._role))


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    fleet = Fleet(json.loads(options.states.read_text()))
    # Only 0.0.0.0 accepts connections to all addresses under 127.1 and 127.2.
    server = await loop.create_server(
        lambda: Connection(fleet),
        "0.0.0.0",
        options.port,
        backlog=4096,
    )
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    print("listening", flush=True)
    await stopped.wait()
    server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("states", type=Path, help="recorded states, by role")
    parser.add_argument("--port", type=int, required=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each pod
    uvloop.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
