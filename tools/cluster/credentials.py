"""Write the tokens, kubeconfigs and keys of a cluster; each cluster gets new ones."""

from __future__ import annotations

import json
import secrets
import subprocess
from typing import TYPE_CHECKING

from tools.cluster.layout import API_ADDRESS, API_PORT, NODES

if TYPE_CHECKING:
    from pathlib import Path

    from tools.cluster.layout import Layout

__all__ = ["write_credentials"]

_OWN_PARTS = ("kube-controller-manager", "kube-scheduler", "kube-proxy")

# Requests of the cluster's own parts would be most of the log.
_AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  userGroups: ["system:nodes", "system:serviceaccounts:kube-system"]
- level: None
  users: ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler",
          "system:kube-proxy"]
- level: Metadata
"""


def write_credentials(layout: Layout, *, outer_port: int) -> None:
    """Write keys, tokens and kubeconfigs.

    Args:
        layout: files of the cluster.
        outer_port: port of this machine that is forwarded to the API server.
    """
    users = {"admin": ("admin", "system:masters")}
    users |= {part: (f"system:{part}", "") for part in _OWN_PARTS}
    users |= {node.name: (f"system:node:{node.name}", "system:nodes") for node in NODES}
    lines = []
    inside = f"https://{API_ADDRESS}:{API_PORT}"
    for number, (name, (user, group)) in enumerate(users.items()):
        token = secrets.token_hex(16)
        lines.append(f'{token},{user},{number},"{group}"\n')
        _write_kubeconfig(layout.kubeconfig(name), inside, layout.certificate, token)
        if name == "admin":
            outside = f"https://localhost:{outer_port}"
            _write_kubeconfig(layout.outer_kubeconfig, outside, layout.certificate, token)
    _write(layout.tokens, "".join(lines))
    _write(layout.audit_policy, _AUDIT_POLICY)
    key = subprocess.run(
        [layout.binaries / "new-key"], capture_output=True, text=True, check=True
    ).stdout
    _write(layout.signing_key, key)


def _write_kubeconfig(path: Path, server: str, certificate: Path, token: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "goodput",
                "cluster": {"server": server, "certificate-authority": str(certificate)},
            }
        ],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "goodput", "context": {"cluster": "goodput", "user": "user"}}],
        "current-context": "goodput",
    }
    _write(path, json.dumps(config, indent=1))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
