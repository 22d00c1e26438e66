"""CPU time per streamed token and per request: our router and server beside nginx and haproxy.

    python -m benchmarks.streams            # all four, three repeats
    python -m benchmarks.streams --targets router,nginx --repeats 1 --json streams.json

The proxies stand in front of the same mock replica and use one worker or thread each. Two loads are
sent to each target in turn: *requests*, an open loop of short responses, and *tokens*, concurrent
streams that each get a token per step. The server (`goodput engine`) emulates a device and streams
its own tokens; the CPU time of its core process is listed apart. The figure of *tokens* is all CPU
time of the target divided by the tokens, so it includes its share of the requests.

nginx and haproxy are Debian packages of the same names; without them, their rows are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop
from benchmarks.router_overhead import MANIFEST, REQUEST_BODY, Load, start_process, until_ready

HERE = Path(__file__).parent
TARGETS = ("router", "server", "nginx", "haproxy")
_NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr crit;
events {{ worker_connections 8000; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  upstream replica {{ server {replica}; keepalive 2000; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://replica;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""
_HAPROXY = """\
global
  nbthread 1
  maxconn 4000
defaults
  mode http
  timeout connect 2s
  timeout client 120s
  timeout server 120s
  http-reuse always
frontend serving
  bind 127.0.0.1:{port}
  default_backend replicas
backend replicas
  server replica {replica} pool-max-conn 2000
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One load.

    Args:
        name: its name.
        tokens: tokens per response.
        requests_per_s: rate of the open loop.
        seconds: time during which requests are sent.
    """

    name: str
    tokens: int
    requests_per_s: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """CPU time of one target under one load, in microseconds."""

    shape: str
    target: str
    requests: int
    tokens: int
    failed: int
    us_per_request: float
    us_per_token: float
    core_us_per_token: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the repeats, in microseconds of CPU time."""

    shape: str
    target: str
    failed: int
    us_per_request: float
    us_per_token: float
    us_per_token_min: float
    us_per_token_max: float
    core_us_per_token: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A running target.

    Args:
        url: its serving URL.
        body: body of the requests.
        cpu_s: returns the CPU time that it has used.
        core_cpu_s: returns the CPU time of the server's core; None for a proxy.
    """

    url: str
    body: bytes
    cpu_s: Callable[[], float]
    core_cpu_s: Callable[[], float] | None = None


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time of processes; unlike psutil's, it is not rounded to 10 ms."""
    tasks = [one for p in processes for one in Path(f"/proc/{p.pid}/task").glob("*/schedstat")]
    return sum(int(one.read_text().split()[0]) for one in tasks) / 1e9


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


@contextmanager
def _mock(tokens: int, gap_ms: float) -> Iterator[str]:
    process, url = start_process(
        [
            str(HERE / "stand_ins" / "mock_server.py"),
            *("--tokens", f"{tokens}", "--gap-ms", f"{gap_ms}"),
        ]
    )
    with _ended(process):
        yield url


@contextmanager
def _started(name: str, replica: str, tokens: int) -> Iterator[Target]:
    """Start a target in front of a replica, or the server, and stop it at the end."""
    goodput = ["-m", "goodput_core"]
    options = ["-f", str(MANIFEST), "--port", "0", "--json"]
    if name == "router":
        process, url = start_process(
            [*goodput, "router", *options, "--upstream", f"mock={replica}"]
        )
        with _ended(process):
            own = [psutil.Process(process.pid)]
            own += own[0].children(recursive=True)
            yield Target(url=url, body=REQUEST_BODY, cpu_s=lambda: cpu_s(own))
        return
    if name == "server":
        process, url = start_process([*goodput, "engine", *options])
        with _ended(process):
            own = [psutil.Process(process.pid)]
            body = {"model": "chat", "prompt": "word " * 200, "stream": True}
            body |= {"max_tokens": tokens, "ignore_eos": True}
            yield Target(
                url=url,
                body=json.dumps(body).encode(),
                cpu_s=lambda: cpu_s(own),
                core_cpu_s=lambda: cpu_s(own[0].children(recursive=True)),
            )
        return
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        host = replica.removeprefix("http://")
        config = Path(folder) / "config"
        text = _NGINX if name == "nginx" else _HAPROXY
        config.write_text(text.format(folder=folder, port=port, replica=host))
        command = {
            "nginx": ["nginx", "-p", folder, "-c", str(config)],
            "haproxy": ["haproxy", "-db", "-f", str(config)],
        }[name]
        process = subprocess.Popen(
            command, env=os.environ | {"PATH": _path()}, stderr=subprocess.DEVNULL, text=True
        )
        with _ended(process):
            own = [psutil.Process(process.pid)]
            yield Target(
                url=f"http://127.0.0.1:{port}",
                body=REQUEST_BODY,
                cpu_s=lambda: cpu_s([*own, *own[0].children(recursive=True)]),
            )


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _open_idle(url: str, count: int) -> list[asyncio.Transport]:
    """Open connections on which no request is sent."""
    loop = asyncio.get_running_loop()
    host, _, port = url.removeprefix("http://").partition(":")
    opened = []
    for at in range(0, count, 100):
        pairs = await asyncio.gather(
            *(
                loop.create_connection(asyncio.Protocol, host, int(port))
                for _ in range(min(100, count - at))
            )
        )
        opened += [transport for transport, _ in pairs]
    return opened


async def _measure(name: str, target: Target, shape: Shape, *, idle: int) -> Sample:
    load = Load(target.url, target.body)
    connections = await _open_idle(target.url, idle)
    # The first requests open the connections and are not measured.
    await load.run(shape.requests_per_s, max(1, shape.requests_per_s // 4))
    load.ttft.clear()
    load.e2e.clear()
    load.failed = 0
    requests = round(shape.requests_per_s * shape.seconds)
    before, core_before = target.cpu_s(), target.core_cpu_s and target.core_cpu_s()
    await load.run(shape.requests_per_s, requests)
    cpu_us = (target.cpu_s() - before) * 1e6
    tokens = requests * shape.tokens
    for connection in connections:
        connection.abort()
    core_us = None
    if target.core_cpu_s is not None and core_before is not None:
        core_us = round((target.core_cpu_s() - core_before) * 1e6 / tokens, 1)
    return Sample(
        shape=shape.name,
        target=name,
        requests=requests,
        tokens=tokens,
        failed=load.failed,
        us_per_request=round(cpu_us / requests, 1),
        us_per_token=round(cpu_us / tokens, 1),
        core_us_per_token=core_us,
    )


async def _run(
    shapes: Sequence[Shape], targets: Sequence[str], options: argparse.Namespace
) -> list[Sample]:
    samples = []
    for repeat in range(options.repeats):
        for shape in shapes:
            with _mock(shape.tokens, options.gap_ms) as replica:
                order = targets if repeat % 2 == 0 else targets[::-1]
                for name in order:
                    with _started(name, replica, shape.tokens) as target:
                        await until_ready(target.url)
                        samples.append(await _measure(name, target, shape, idle=options.idle))
    return samples


def _rows(samples: Sequence[Sample]) -> list[Row]:
    """Return the median of each target and load over the repeats."""
    rows = []
    for shape, target in dict.fromkeys((one.shape, one.target) for one in samples):
        group = [one for one in samples if (one.shape, one.target) == (shape, target)]
        core = [one.core_us_per_token for one in group if one.core_us_per_token is not None]
        per_token = sorted(one.us_per_token for one in group)
        rows.append(
            Row(
                shape=shape,
                target=target,
                failed=sum(one.failed for one in group),
                us_per_request=statistics.median(one.us_per_request for one in group),
                us_per_token=statistics.median(per_token),
                us_per_token_min=per_token[0],
                us_per_token_max=per_token[-1],
                core_us_per_token=statistics.median(core) if core else None,
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the targets and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--targets", default=",".join(TARGETS), help="targets, with commas (%(default)s)"
    )
    parser.add_argument(
        "--requests-per-s", type=int, default=200, help="of *requests* (%(default)s)"
    )
    parser.add_argument("--streams", type=int, default=100, help="of *tokens* (%(default)s)")
    parser.add_argument("--gap-ms", type=float, default=20, help="time per token (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="of *requests* (%(default)s)")
    parser.add_argument(
        "--idle", type=int, default=0, help="connections without a request (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one repeat of one second")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples as JSON")
    options = parser.parse_args(argv)
    targets = options.targets.split(",")
    for name in targets:
        if name not in TARGETS:
            parser.error(f"--targets: {name!r} is not one of {', '.join(TARGETS)}")
    if options.quick:
        options.seconds, options.repeats = 1, 1
    for name in set(targets) & {"nginx", "haproxy"}:
        if shutil.which(name, path=_path()) is None:
            print(f"{name} is left out: install the Debian package {name}", file=sys.stderr)
            targets.remove(name)
    shapes = [
        Shape(
            name="requests",
            tokens=16,
            requests_per_s=options.requests_per_s,
            seconds=options.seconds,
        ),
        # All streams start within a second and run beside each other.
        Shape(
            name="tokens",
            tokens=64 if options.quick else 384,
            requests_per_s=options.streams,
            seconds=1,
        ),
    ]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    samples = uvloop.run(_run(shapes, targets, options))
    rows = _rows(samples)
    if options.json is not None:
        document = {
            "cores": os.cpu_count(),
            "shapes": [asdict(one) for one in shapes],
            "gap_ms": options.gap_ms,
            "rows": [asdict(one) for one in rows],
            "samples": [asdict(one) for one in samples],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(
        "load      target   failed  us/request  us/token    min    max  tokens/s per core"
        "  core us/token"
    )
    for row in rows:
        core = "" if row.core_us_per_token is None else f"{row.core_us_per_token:.1f}"
        print(
            f"{row.shape:10}{row.target:9}{row.failed:6}{row.us_per_request:12.0f}"
            f"{row.us_per_token:10.1f}{row.us_per_token_min:7.1f}{row.us_per_token_max:7.1f}"
            f"{1e6 / row.us_per_token:19,.0f}{core:>15}"
        )
    return int(any(one.failed for one in samples))


if __name__ == "__main__":
    sys.exit(main())
