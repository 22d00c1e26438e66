"""An etcd and a Kubernetes API server as two processes, for benchmarks without a full cluster.

There are no controllers and no nodes; the benchmark writes their objects. The programs are those
of `make e2e`.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import yaml
from tools.cluster import binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADMIN, OPERATOR = "admin", "operator"


@contextmanager
def api_server(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Run etcd and an API server; yield the administrator's and the operator's kubeconfig."""
    programs = binaries.folder()
    ports = [free_port() for _ in range(3)]
    (folder / "audit.yaml").write_text(
        "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\n"
        f"rules: [{{level: Metadata, users: [{OPERATOR}]}}]\n"
    )
    (folder / "tokens.csv").write_text(
        f'{ADMIN}-token,{ADMIN},1,"system:masters"\n'
        f'{OPERATOR}-token,{OPERATOR},2,"system:masters"\n'
    )
    key = subprocess.run([programs / "new-key"], capture_output=True, text=True, check=True)
    (folder / "key.pem").write_text(key.stdout)
    etcd = f"http://127.0.0.1:{ports[0]}"
    commands = [
        [
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{ports[1]}",
            "--unsafe-no-fsync",
            "--log-level=error",
        ],
        [
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--secure-port={ports[2]}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'key.pem'}",
            f"--service-account-signing-key-file={folder / 'key.pem'}",
            f"--audit-policy-file={folder / 'audit.yaml'}",
            f"--audit-log-path={folder / 'audit.log'}",
        ],
    ]
    running = []
    try:
        for name, *flags in commands:
            with (folder / f"{name}.log").open("wb") as log:
                running.append(subprocess.Popen([programs / name, *flags], stdout=log, stderr=log))
        for user in (ADMIN, OPERATOR):
            _write_kubeconfig(folder / user, ports[2], f"{user}-token")
        _wait_ready(folder / ADMIN)
        yield folder / ADMIN, folder / OPERATOR
    finally:
        for process in reversed(running):  # etcd last: the API server does not stop without it
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _write_kubeconfig(path: Path, port: int, token: str) -> None:
    server = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(content))


def kubectl(kubeconfig: Path, *words: str, stdin: str | None = None) -> None:
    subprocess.run(
        [binaries.folder() / "kubectl", f"--kubeconfig={kubeconfig}", *words],
        input=stdin,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _wait_ready(kubeconfig: Path) -> None:
    deadline = time.monotonic() + 180
    while True:
        try:
            kubectl(kubeconfig, "get", "--raw", "/readyz")
            return
        except subprocess.CalledProcessError as error:
            if time.monotonic() > deadline:
                sys.exit(f"the API server did not start: {error.stderr}")
            time.sleep(0.2)
