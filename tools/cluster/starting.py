"""Start a cluster, wait until it can run pods, and stop it.

The cluster is a process tree below one `unshare`, in its own user, mount, network and process
namespaces. Its API server is reached through a loopback port of this machine, everything else by
`OwnCluster.inside`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from tools.cluster.binaries import mark_used
from tools.cluster.credentials import write_credentials
from tools.cluster.handle import ClusterError, OwnCluster
from tools.cluster.images import PYTHON, SHELL, Image, publish, python_image, shell_image
from tools.cluster.layout import NODES, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ROOT", "attach", "running", "start", "stop"]

ROOT = Path(__file__).resolve().parents[2]
_ADDONS = Path(__file__).parent / "addons"


def start(state: Path, binaries: Path, *, outlive_me: bool = False) -> OwnCluster:
    """Start a cluster.

    Args:
        state: empty folder for its files.
        binaries: folder of its programs.
        outlive_me: False to end the cluster with this process, even if that is killed.

    Raises:
        ClusterError: the cluster did not start; `state/logs` has the output of each part.
    """
    mark_used(binaries)
    layout = Layout(state=state.resolve(), binaries=binaries)
    for folder in (layout.state, layout.volumes, layout.certificates, layout.state / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    publish(layout.catalogue, _own_images(binaries))
    # Created in this machine's network and inherited; see supervisor.forward_connection.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        write_credentials(layout, outer_port=listener.getsockname()[1])
        cluster = _spawn(layout, listener, outlive_me=outlive_me)
    try:
        _bring_up(cluster)
    except BaseException:
        stop(cluster)
        raise
    return cluster


def _own_images(binaries: Path) -> dict[str, Image]:
    coredns = Image(folders=[str(binaries)], entrypoint=[str(binaries / "coredns")])
    return {
        "coredns/coredns": coredns,
        SHELL: shell_image(),
        PYTHON: python_image(),
    }


def _spawn(layout: Layout, listener: socket.socket, *, outlive_me: bool) -> OwnCluster:
    command = [
        *("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork"),
        *("--mount-proc", "--propagation=private", "--kill-child"),
        *(sys.executable, "-m", "tools.cluster.supervisor"),
        f"--state={layout.state}",
        f"--binaries={layout.binaries}",
        f"--listener={listener.fileno()}",
        *([] if outlive_me else ["--until-end-of-input"]),
    ]
    # The parts must not inherit a proxy or a kubeconfig.
    environment = {n: v for n in ("PATH", "HOME", "LANG") if (v := os.environ.get(n))}
    with layout.log("supervisor").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL if outlive_me else subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C reaches only the test, which then ends the cluster
        )
    deadline = time.monotonic() + 30
    while not layout.control.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise ClusterError(f"the supervisor did not start:\n{_tail(layout)}")
        time.sleep(0.02)
    [first] = psutil.Process(process.pid).children()
    (layout.state / "started").write_text(f"{first.pid}\n{layout.binaries}\n")
    return _handle(layout, first.pid, process)


def _handle(layout: Layout, pid: int, process: subprocess.Popen[bytes] | None) -> OwnCluster:
    return OwnCluster(
        kubeconfig=layout.outer_kubeconfig,
        binaries=layout.binaries,
        layout=layout,
        pid=pid,
        process=process,
    )


def _bring_up(cluster: OwnCluster) -> None:
    """Start the parts in order, since most exit without an API server."""
    storage, api, *others = [part.name for part in cluster.layout.parts()]
    cluster.start(storage)
    cluster.start(api)
    cluster.wait_until("get", "--raw", "/readyz")
    for name in others:
        cluster.start(name)
    cluster.kubectl("apply", "-f", str(_ADDONS))
    # Pods need the service account.
    cluster.wait_until("get", "serviceaccount", "default")
    for node in NODES:
        cluster.wait_until("get", "node", node.name)
    cluster.wait("condition=Ready", "nodes", "--all", timeout_s=30)
    cluster.wait("condition=Available", "deployment/coredns", "-n", "kube-system", timeout_s=30)


def attach(state: Path) -> OwnCluster | None:
    """Return the cluster that another process started in `state`; None if none runs there."""
    try:
        pid, binaries = (state / "started").read_text().splitlines()
        layout = Layout(state=state.resolve(), binaries=Path(binaries))
        cluster = _handle(layout, int(pid), None)
        cluster.exited()
    except OSError:
        return None
    return cluster


def stop(cluster: OwnCluster) -> None:
    """Stop a cluster and wait for the end of all its processes."""
    processes = _processes(cluster.pid)
    with contextlib.suppress(OSError, ClusterError):
        cluster.order(do="shutdown")
    _, alive = psutil.wait_procs(processes, timeout=20)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=10)
    if cluster.process is not None:
        with cluster.process:  # waits for it and closes its pipe
            pass


def _processes(pid: int) -> list[psutil.Process]:
    """Return the first process inside, whose end ends all others, and its parent `unshare`."""
    try:
        first = psutil.Process(pid)
        return [first, *([parent] if (parent := first.parent()) else [])]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def running(state: Path, binaries: Path) -> Iterator[OwnCluster]:
    """Run a cluster during the block."""
    cluster = start(state, binaries)
    try:
        yield cluster
    finally:
        stop(cluster)


def _tail(layout: Layout) -> str:
    return layout.log("supervisor").read_text(errors="replace")[-2000:]
