"""The first process in the cluster's namespaces: starts and stops the parts.

`starting.start` runs it as `python -m tools.cluster.supervisor`. It receives orders on a socket,
one JSON object per connection, and responds with one. It also forwards connections to the API
server. When this process ends, the kernel ends all other processes of its process namespace.

It manages processes only; `starting` installs objects in the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from tools.cluster.layout import API_ADDRESS, API_PORT, NODES, Layout, Part

_STOP_GRACE_S = 30.0
# These parts get SIGTERM; the others lose no data when they are killed.
_STATEFUL = ("kube-apiserver", "etcd")


def prepare_network(layout: Layout) -> None:
    """Create the network of the control plane and the nodes.

    One bridge has the API server's address, since EndpointSlices reject loopback addresses. The
    other one has the nodes' addresses and the default route, which service addresses need.
    """
    commands = [
        "mount -t tmpfs run /run",
        "ip link set lo up",
        "ip link add management type bridge",
        f"ip addr add {API_ADDRESS}/32 dev management",
        "ip link set management up",
        "ip link add nodes type bridge",
        *(f"ip addr add {node.address}/32 dev nodes" for node in NODES),
        "ip link set nodes up",
        "ip route add default dev nodes",
        "sysctl -qw net.ipv4.ip_forward=1",
        # The provisioner of host-path volumes uses this folder only.
        f"mkdir -p /tmp/hostpath_pv {layout.volumes}",
        f"mount --bind {layout.volumes} /tmp/hostpath_pv",
    ]
    subprocess.run(["sh", "-ec", "\n".join(commands)], check=True)


class ClusterSupervisor:
    """Owner of the cluster's processes."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._parts = {part.name: part for part in layout.parts()}
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._starts: Counter[str] = Counter()
        self.ended = asyncio.Event()

    async def start(self, name: str) -> None:
        """Start a part that does not run."""
        part = self._part(name)
        if self._exit_code(name) is None and name in self._running:
            raise ValueError(f"{name} runs already")
        self._starts[name] += 1
        path = self._layout.log(name)
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as log:
            self._running[name] = await asyncio.create_subprocess_exec(
                *part.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def stop(self, name: str, *, kill: bool = False) -> None:
        """Send SIGTERM or SIGKILL to a part and wait for its end."""
        self._part(name)
        process = self._running.get(name)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def stop_all(self) -> None:
        """Stop all parts, the API server before etcd, without which it would not end."""
        for name in reversed(self._parts):
            await self.stop(name, kill=name not in _STATEFUL)

    def _part(self, name: str) -> Part:
        if name not in self._parts:
            raise ValueError(f"no part {name!r}; there are {', '.join(self._parts)}")
        return self._parts[name]

    def _exit_code(self, name: str) -> int | None:
        process = self._running.get(name)
        return None if process is None else process.returncode

    async def execute(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute one order and return the response."""
        match order:
            case {"do": "status"}:
                codes = {name: self._exit_code(name) for name in self._running}
                exited = {n: code for n, code in codes.items() if code is not None}
                return {"exited": exited, "starts": self._starts}
            case {"do": "start", "part": str(name)}:
                await self.start(name)
            case {"do": "stop", "part": str(name)}:
                await self.stop(name)
            case {"do": "kill", "part": str(name)}:
                await self.stop(name, kill=True)
            case {"do": "shutdown"}:
                self.ended.set()
            case _:
                raise ValueError(f"no such order: {order}")
        return {}

    async def serve_order(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Respond to the order of a connection."""
        try:
            response = await self.execute(json.loads(await reader.readline()))
        except (ValueError, OSError) as error:
            response = {"error": str(error)}
        with contextlib.suppress(OSError):
            writer.write(json.dumps(response).encode() + b"\n")
            await writer.drain()
        writer.close()


async def forward_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward a connection from the machine's network to the API server.

    The listening socket was created before the namespace. A socket stays in the network in which it
    was created, while this process connects from inside the namespace.
    """
    try:
        inner_reader, inner_writer = await asyncio.open_connection(API_ADDRESS, API_PORT)
    except OSError:
        writer.close()
        return
    await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one side has closed; the other side is closed below
    finally:
        writer.close()


async def run(layout: Layout, listener: socket.socket, *, until_end_of_input: bool) -> None:
    """Serve until a stop request."""
    supervisor = ClusterSupervisor(layout)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.ended.set)
    if until_end_of_input:
        # The starter never writes, so stdin becomes readable only when the starter has ended.
        loop.add_reader(0, supervisor.ended.set)
    prepare_network(layout)
    await asyncio.start_server(forward_connection, sock=listener)
    await asyncio.start_unix_server(supervisor.serve_order, layout.control)
    await supervisor.ended.wait()
    await supervisor.stop_all()


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--binaries", type=Path, required=True)
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--until-end-of-input", action="store_true")
    args = parser.parse_args()
    layout = Layout(state=args.state, binaries=args.binaries)
    listener = socket.socket(fileno=args.listener)
    asyncio.run(run(layout, listener, until_end_of_input=args.until_end_of_input))


if __name__ == "__main__":
    main()
