"""An operator as a process beside the cluster, with a service account of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import signal

    from tools.cluster.handle import ClusterHandle

__all__ = ["OperatorProcess", "operator_options"]

_PROGRAM = Path(__file__).with_name("predictable_operator.py")


def operator_options(folder: Path, namespace: str, kubeconfig: Path) -> list[str]:
    """Return options of an operator that manages a namespace and holds its Lease there.

    Args:
        folder: folder for the operator's key.
        namespace: the managed namespace.
        kubeconfig: the operator's credentials.
    """
    key = folder / "key"
    key.write_bytes(b"0123456789abcdef" * 2)
    return [
        *("--engine-image", "engine:1", "--router-image", "router:1"),
        *("--key-file", str(key), "--kubeconfig", str(kubeconfig)),
        *("--namespace", namespace, "--lease-namespace", namespace, "--probe-port", "0"),
    ]


@dataclass(frozen=True, kw_only=True)
class OperatorProcess:
    """A running `predictable_operator.py`.

    Args:
        process: the process.
        user: its user name in the cluster.
        log_file: its stderr.
    """

    process: subprocess.Popen[bytes]
    user: str
    log_file: Path

    @classmethod
    def start(
        cls, cluster: ClusterHandle, namespace: str, name: str, folder: Path
    ) -> OperatorProcess:
        """Start an operator that manages a namespace.

        Args:
            cluster: the cluster.
            namespace: the managed namespace.
            name: name of the operator's service account.
            folder: folder for credentials and the log.
        """
        kubeconfig = _kubeconfig(cluster, namespace, name, folder)
        log_file = folder / f"{name}.log"
        with log_file.open("wb") as stderr:
            process = subprocess.Popen(
                [
                    *(sys.executable, _PROGRAM, "--verbose"),
                    *operator_options(folder, namespace, kubeconfig),
                ],
                stderr=stderr,
                env=os.environ,
            )
        user = f"system:serviceaccount:{namespace}:{name}"
        return cls(process=process, user=user, log_file=log_file)

    def log(self) -> list[dict[str, Any]]:
        """Return the logged events, without a line that is still being written."""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def has_logged(self, event: str) -> bool:
        return any(line["event"] == event for line in self.log())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 120) -> int:
        return self.process.wait(timeout=timeout_s)


def _kubeconfig(cluster: ClusterHandle, namespace: str, name: str, folder: Path) -> Path:
    """Create a service account with all permissions in a namespace; return its credentials."""
    words = ("-n", namespace)
    cluster.kubectl("create", "serviceaccount", name, *words)
    account = f"--serviceaccount={namespace}:{name}"
    cluster.kubectl("create", "rolebinding", name, "--clusterrole=cluster-admin", account, *words)
    token = cluster.kubectl("create", "token", name, *words).strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text(encoding="utf-8"))
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    path = folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path
