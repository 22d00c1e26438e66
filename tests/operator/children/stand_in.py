"""An engine or a router without a model, with the behaviour that a test sets.

    stand_in.py ROLE NAME BEHAVIOUR PORT ADMIN_PORT UPSTREAMS MANIFEST

A router responds with 200 to every request once its file of upstreams lists a replica. Its
readiness endpoint returns the number of ready replicas.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from goodput_core.contract import PATH_READY


def main() -> None:
    role, name, behaviour, port, admin_port, upstreams, manifest = sys.argv[1:]
    threading.Thread(target=exit_with_parent, daemon=True).start()
    slowly = finish_slowly if "drains-slowly" in behaviour else finish
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in behaviour else slowly)
    say(f"{role} {name} is starting")
    if "refuses" in behaviour:
        say(f"error: {manifest}: spec.model.source: no such device")
        sys.exit(64)
    if "crashes" in behaviour:
        say("error: the device is on fire")
        sys.exit(70)
    if "silent" in behaviour:
        time.sleep(3600)
    if "floods" in behaviour:
        threading.Thread(target=flood, daemon=True).start()
    if "forks" in behaviour:
        code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        subprocess.Popen([sys.executable, "-c", code])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            listed = json.loads(Path(upstreams).read_text())
            ready = {"ready_replicas": len(listed)}
            body = json.dumps(ready if self.path == PATH_READY else listed).encode()
            self.send_response(200 if listed else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its own name
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", int(port)), Handler) as serving,
        ThreadingHTTPServer(("127.0.0.1", int(admin_port)), Handler) as admin,
    ):
        threading.Thread(target=admin.serve_forever, daemon=True).start()
        listening = {
            "event": "listening",
            "url": f"http://127.0.0.1:{serving.server_port}",
            "admin_url": f"http://127.0.0.1:{admin.server_port}",
            "pid": os.getpid(),
        }
        sys.stdout.write(json.dumps(listening) + "\n")
        sys.stdout.flush()
        serving.serve_forever()


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def finish(*_: object) -> None:
    say("drained")
    os._exit(0)


def finish_slowly(*_: object) -> None:
    """Drain in the background until a file exists."""

    def drain() -> None:
        while not Path(os.environ["STAND_IN_RELEASE"]).exists():
            time.sleep(0.01)
        finish()

    say("draining")
    threading.Thread(target=drain, daemon=True).start()


def exit_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def flood() -> None:
    while True:
        sys.stderr.write("x" * 1000 + "\n")


if __name__ == "__main__":
    main()
