"""The progress of `replay ab`, served over HTTP while it records, and the result of a gate.

The operator reads both. The recording process only waits for its child processes, so a thread
answers one request after the other. Everything it reads is bounded in size and time.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import AF_INET6, SO_REUSEADDR, SOL_SOCKET, socket
from typing import TYPE_CHECKING, Final

from goodput_core.contract import PATH_GATE_STATE
from goodput_core.errors import UsageError
from goodput_core.replay_job import ABResult, ABState
from goodput_core.slo.gate import GateRule, cut_points
from goodput_core.spec.codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from goodput_replay.compare.gate import GateResult

__all__ = ["describe_interval", "result_message", "serving_progress"]

_REQUEST_S: Final = 2.0


def describe_interval(result: GateResult) -> str | None:
    """Return the difference to the baseline in the class that decided, with its bounds.

    None if no class has a difference.
    """
    for with_verdict in (True, False):
        for one in result.classes:
            decided = any(
                check.rule is GateRule.DIFFERENCE
                and (check.verdict is result.verdict or not with_verdict)
                for check in one.checks
            )
            bounds = one.difference, one.difference_lower, one.difference_upper
            if decided and None not in bounds:
                middle, lower, upper = (
                    cut_points(bound or 0.0, up=up)
                    for bound, up in zip(bounds, (False, False, True), strict=True)
                )
                return f"{one.name}: {middle} points ({lower} … {upper})"
    return None


def result_message(result: GateResult) -> ABResult:
    """Return the result of a gate for `--result-file`."""
    return ABResult(
        verdict=result.verdict,
        reason=result.reason.value,
        message=result.sentence,
        pairs=len(result.candidates),
        interval=describe_interval(result),
    )


@contextmanager
def serving_progress(
    address: tuple[str, int] | None, planned: int
) -> Iterator[Callable[[ABState], None] | None]:
    """Serve the latest state during the block; yield the function that replaces it.

    Args:
        address: host and port; None to serve nothing, which yields None.
        planned: pairs before the first look.

    Raises:
        UsageError: the port cannot be opened.
    """
    if address is None:
        yield None
        return
    host, port = address
    current = [ABState(pairs=0, planned=planned)]

    class StateHandler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S

        def do_GET(self) -> None:
            body = json.dumps(encode(current[0])).encode()
            if self.path != PATH_GATE_STATE:
                self.send_error(404, f"the state is at {PATH_GATE_STATE}")
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass  # the terminal shows the pairs

    class StateServer(HTTPServer):
        address_family = AF_INET6 if ":" in host else HTTPServer.address_family

        def handle_error(self, *_: object) -> None:
            pass  # a client that ended the connection

        def server_bind(self) -> None:
            # The base class looks up the name of the host, which can take long.
            self.socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            socket.bind(self.socket, self.server_address)
            self.server_address = self.socket.getsockname()
            self.server_name, self.server_port = host, self.server_address[1]

    try:
        server = StateServer((host, port), StateHandler)
    except OSError as error:
        raise UsageError(
            f"--progress {host}:{port}: cannot be listened on ({error.strerror}); name "
            "an address of this machine and a free port"
        ) from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield lambda state: current.__setitem__(0, state)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
