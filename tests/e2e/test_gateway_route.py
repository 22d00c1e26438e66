"""The example of the Gateway API is accepted by the API server with the definitions of that API."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import ClusterError
from tools.cluster.starting import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import OwnCluster

MODULE = "sigs.k8s.io/gateway-api@v1.3.0"
EXAMPLE = ROOT / "examples" / "gateway" / "route.yaml"


@pytest.fixture
def gateway_api(own_cluster: OwnCluster) -> Iterator[None]:
    """The definitions of the Gateway API, from its Go module."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("NOT RUN: Go is missing; install it with `apt-get install golang-go`")
    try:
        downloaded = subprocess.run(
            [go, "mod", "download", "-json", MODULE],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            cwd="/",
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"NOT RUN: {MODULE} cannot be downloaded; run `go mod download {MODULE}`")
    folder = Path(json.loads(downloaded.stdout)["Dir"]) / "config" / "crd" / "standard"
    files = [
        folder / f"gateway.networking.k8s.io_{kind}.yaml" for kind in ("gateways", "httproutes")
    ]
    for file in files:
        own_cluster.kubectl("apply", "--server-side", "-f", str(file))
        own_cluster.kubectl("wait", "--for=condition=Established", "-f", str(file))
    yield
    for file in files:
        own_cluster.kubectl("delete", "-f", str(file), "--wait=false")


@pytest.mark.usefixtures("gateway_api")
def test_the_example_is_valid_and_a_mistake_in_it_is_not(
    own_cluster: OwnCluster, namespace: str
) -> None:
    words = ("apply", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-")
    text = EXAMPLE.read_text(encoding="utf-8")
    applied = own_cluster.kubectl(*words, stdin=text)
    assert "httproute.gateway.networking.k8s.io/chat created" in applied
    with pytest.raises(ClusterError, match="type"):
        own_cluster.kubectl(*words, stdin=text.replace("PathPrefix", "Prefix"))
