"""The cluster that the end-to-end tests stand on does what they take for granted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.cluster.layout import NODES

if TYPE_CHECKING:
    from tests.e2e.cluster.handle import Cluster, OwnCluster


def test_two_nodes_are_ready(cluster: Cluster, own_cluster: OwnCluster) -> None:
    nodes = cluster.get("nodes")["items"]
    assert {node["metadata"]["name"] for node in nodes} == {node.name for node in NODES}
    for node in nodes:
        conditions = {c["type"]: c["status"] for c in node["status"]["conditions"]}
        assert conditions["Ready"] == "True"
    assert own_cluster.exited() == {}
