"""Addresses, files and command lines of a cluster's parts, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["API_ADDRESS", "API_PORT", "CLUSTER_DNS", "NODES", "Layout", "Node", "Part"]

API_ADDRESS = "10.200.0.1"
API_PORT = 6443
CLUSTER_DNS = "10.96.0.10"
SERVICES = "10.96.0.0/16"
PODS = "10.244.0.0/16"
_ETCD = "http://127.0.0.1:2379"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One kubelet.

    Args:
        name: name of the node.
        address: address of the node and gateway of its pods.
        prefix: beginning of its pods' addresses.
    """

    name: str
    address: str
    prefix: str


NODES = tuple(
    Node(name=f"node-{n}", address=f"10.244.{n}.1", prefix=f"10.244.{n}.") for n in (1, 2)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Name and command line of a process of the cluster."""

    name: str
    command: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Files of one cluster below `state`, and its programs in `binaries`."""

    state: Path
    binaries: Path

    @property
    def control(self) -> Path:
        """The supervisor's socket."""
        return self.state / "control.sock"

    @property
    def catalogue(self) -> Path:
        """The images that the nodes can pull."""
        return self.state / "images.json"

    @property
    def audit_log(self) -> Path:
        """The audit log, one JSON object per line, without requests of the cluster's parts."""
        return self.state / "audit.log"

    @property
    def audit_policy(self) -> Path:
        """The policy of the API server's audit log."""
        return self.state / "audit-policy.yaml"

    @property
    def tokens(self) -> Path:
        """The API server's static tokens."""
        return self.state / "tokens.csv"

    @property
    def signing_key(self) -> Path:
        """The key of service account tokens."""
        return self.state / "service-accounts.key"

    @property
    def certificates(self) -> Path:
        """The folder of the API server's self-signed certificate."""
        return self.state / "certificates"

    @property
    def certificate(self) -> Path:
        """The API server's certificate, which clients trust."""
        return self.certificates / "apiserver.crt"

    @property
    def volumes(self) -> Path:
        """The folder of the volumes of the default storage class."""
        return self.state / "volumes"

    def kubeconfig(self, user: str) -> Path:
        """Return the credentials of a user for processes inside the cluster's network."""
        return self.state / "kubeconfig" / user

    @property
    def outer_kubeconfig(self) -> Path:
        """The administrator's credentials for processes in this machine's network."""
        return self.state / "kubeconfig.yaml"

    def log(self, part: str) -> Path:
        """Return the file with the output of a part."""
        return self.state / "logs" / f"{part}.log"

    def parts(self) -> list[Part]:
        """Return all processes in start order, the reverse of the stop order."""
        return [
            self._etcd(),
            self._api_server(),
            self._part(
                "kube-controller-manager",
                f"--kubeconfig={self.kubeconfig('kube-controller-manager')}",
                f"--service-account-private-key-file={self.signing_key}",
                f"--root-ca-file={self.certificate}",
                "--use-service-account-credentials",
                "--enable-hostpath-provisioner",
                "--leader-elect=false",
            ),
            self._part(
                "kube-scheduler",
                f"--kubeconfig={self.kubeconfig('kube-scheduler')}",
                "--leader-elect=false",
            ),
            # One is enough, since the nodes share their network.
            self._part(
                "kube-proxy",
                f"--kubeconfig={self.kubeconfig('kube-proxy')}",
                "--proxy-mode=nftables",
                f"--hostname-override={NODES[0].name}",
                f"--cluster-cidr={PODS}",
                "--conntrack-max-per-core=0",
            ),
            *map(self._node, NODES),
        ]

    def _part(self, name: str, *flags: str) -> Part:
        return Part(name=name, command=[str(self.binaries / name), *flags])

    def _etcd(self) -> Part:
        return self._part(
            "etcd",
            f"--data-dir={self.state / 'etcd'}",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def _api_server(self) -> Part:
        return self._part(
            "kube-apiserver",
            f"--etcd-servers={_ETCD}",
            # It listens on all addresses, so its certificate includes the name localhost.
            f"--advertise-address={API_ADDRESS}",
            f"--secure-port={API_PORT}",
            f"--cert-dir={self.certificates}",
            f"--service-cluster-ip-range={SERVICES}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={self.signing_key}",
            f"--service-account-signing-key-file={self.signing_key}",
            f"--token-auth-file={self.tokens}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged",
            # Without it, a stop waits up to a minute for watches to close.
            "--shutdown-send-retry-after",
            f"--audit-policy-file={self.audit_policy}",
            f"--audit-log-path={self.audit_log}",
        )

    def _node(self, node: Node) -> Part:
        """Return a kubelet in its own process and mount namespaces; its pods end with it."""
        kubelet = [
            str(self.binaries / "kubelet"),
            f"--name={node.name}",
            f"--kubeconfig={self.kubeconfig(node.name)}",
            f"--root={self.state / node.name}",
            f"--launcher={self.binaries / 'launcher'}",
            f"--images={self.catalogue}",
            f"--pods={node.prefix}",
            f"--address={node.address}",
            f"--cluster-dns={CLUSTER_DNS}",
            # The node's reported capacity; it does not limit its processes.
            "--cpu=32",
            "--memory=256Gi",
            "--storage=1Ti",
            "--gpus=8",
        ]
        prepare = 'mount -t tmpfs run /run && mkdir /run/netns && exec "$@"'
        spaces = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        return Part(name=node.name, command=[*spaces, "sh", "-c", prepare, "sh", *kubelet])
