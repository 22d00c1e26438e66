"""Serves the admin ports of many pods that do not run, from one cheap process.

    python benchmarks/fake_pods.py states.json --port 9000

Every address of this machine under 127.1 is an engine, every one under 127.2 a router. What they
answer was recorded from real ones (`recorded_pods`) and goes on growing as it would under a load
that never changes and whose promises are kept. Made once a second for all, so that an answer
costs little more than its bytes. `GET /asked` tells how often states were asked for.
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
"""How the addresses of pods begin, by role."""
PATH_ASKED = "/asked"
_OF_ADDRESS = {address: role for role, address in ADDRESSES.items()}
_STATE = f"GET {PATH_CONTROL_STATE}".encode()
_ASKED = f"GET {PATH_ASKED} ".encode()
_PER_S = {ROLE_ENGINE: 0.01, ROLE_ROUTER: 0.005}
"""Increase per second, as a share of the recorded counts; two routers share what
one was recorded with."""
_GOLDEN = 0.618
"""Spreads evenly over the seconds when each of many counts goes up."""


def grown(role: str, recorded: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A recorded state, so much later."""
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
    # The recorded seconds once more: each reader adds those that it has not seen.
    for bound in ("first_s", "end_s"):
        state["seconds"][bound] += int(seconds)
    for outcomes in state["outcomes"].values():
        outcomes["attained"] += int(outcomes.get("attained", 0) * share)
    for promises in state["promises"].values():
        for counts in promises.values():
            counts["judged"] += int(counts["judged"] * share)
    return state


def _more(bin_: list[int], share: float, phase: float) -> list[int]:
    """More requests of the very lengths that a bin has: it stays the bin of these lengths."""
    requests, *tokens = bin_
    more = int(requests * share + phase)
    return [requests + more, *(count + more * (count // requests) for count in tokens)]


class Fleet:
    """Current responses of all pods."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self._recorded = recorded
        self._begun = time.monotonic()
        self.asked = 0
        self._answers: dict[str, bytes] = {}
        self.grow()

    def grow(self) -> None:
        seconds = time.monotonic() - self._begun
        for role in ADDRESSES:
            self._answers[role] = _http(200, grown(role, self._recorded[role], seconds))
        asyncio.get_running_loop().call_later(1, self.grow)

    def answer(self, request: bytes, role: str | None) -> bytes:
        if request.startswith(_ASKED):
            return _http(200, {"asked": self.asked})
        if role is None or not request.startswith(_STATE):
            return _http(404, {"error": {"message": "this stand-in only tells its state"}})
        self.asked += 1
        return self._answers[role]


def _http(status: int, body: dict[str, Any]) -> bytes:
    content = json.dumps(body, separators=(",", ":")).encode()
    return (
        b"HTTP/1.1 %d -\r\nContent-Type: application/json; charset=utf-8\r\n"
        b"Content-Length: %d\r\nServer: stand-in\r\n\r\n%s" % (status, len(content), content)
    )


class Connection(asyncio.Protocol):
    """One connection; requests come one after the other and have no bodies."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._transport: asyncio.Transport | None = None
        self._role: str | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's and not their class.
        self._transport = cast("asyncio.Transport", transport)
        address: str = transport.get_extra_info("sockname")[0]
        self._role = _OF_ADDRESS.get(".".join(address.split(".")[:2]))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._buffer.endswith(b"\r\n\r\n"):
            return
        request, self._buffer = self._buffer, b""
        assert self._transport is not None
        self._transport.write(self._fleet.answer(request, self._role))


async def serve(options: argparse.Namespace) -> None:
    """Answer until asked to stop."""
    loop = asyncio.get_running_loop()
    fleet = Fleet(json.loads(options.states.read_text()))
    # Only this takes connections to all of 127.1 and 127.2.
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
