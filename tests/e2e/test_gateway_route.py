"""The example of the Gateway API is accepted by the API server with the definitions of that API."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import ClusterError
from tools.cluster.starting import ROOT
from tools.e2e.definitions import DefinitionsMissing, defined, module_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import OwnCluster

MODULE = "sigs.k8s.io/gateway-api@v1.3.0"
EXAMPLE = ROOT / "examples" / "gateway" / "route.yaml"


@pytest.fixture
def gateway_api(own_cluster: OwnCluster) -> Iterator[None]:
    """The definitions of the Gateway API, from its Go module."""
    try:
        folder = module_folder(MODULE) / "config" / "crd" / "standard"
    except DefinitionsMissing as error:
        pytest.skip(f"NOT RUN: {error}")
    kinds = ("gateways", "httproutes")
    with defined(
        own_cluster, [folder / f"gateway.networking.k8s.io_{kind}.yaml" for kind in kinds]
    ):
        yield


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
