"""Install, render, test and uninstall the chart in a cluster.

The default images of the chart stand for this checkout.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import yaml
from tools.cluster.handle import ClusterError, ClusterHandle, OwnCluster
from tools.cluster.images import checkout_image
from tools.cluster.starting import ROOT
from tools.torch_packages import is_installed, packages_folder

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "CHART",
    "NAMESPACE",
    "install_chart",
    "publish_ours",
    "rendered_chart",
    "run_chart_tests",
    "uninstall_chart",
]

CHART = ROOT / "charts" / "goodput"
NAMESPACE = "goodput-system"


def publish_ours(cluster: OwnCluster) -> None:
    """Publish this checkout under the names of the chart's default images.

    As by the Dockerfiles, the image of engines and routers has torch, if `make torch` installed it.
    """
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    engine = checkout_image(
        ROOT, "engine", "--help", packages=packages_folder() if is_installed() else None
    )
    images = {
        "image": checkout_image(ROOT, "operator"),
        "engine": engine,
        "router": engine,
        "replay": checkout_image(ROOT, "replay", "--help"),
    }
    cluster.publish(
        {
            f"{values[part]['repository']}:{values[part]['tag'] or version}": image
            for part, image in images.items()
        }
    )


def install_chart(
    cluster: ClusterHandle, *flags: str, chart: Path = CHART, namespace: str = NAMESPACE
) -> None:
    """Install the chart, or upgrade it, and wait until the operator is ready.

    Raises:
        ClusterError: Helm failed; the text is its message.
    """
    where = ["--create-namespace", "--wait", "--timeout=120s"]
    _helm(cluster, namespace, "upgrade", "--install", "goodput", str(chart), *where, *flags)


def rendered_chart(cluster: ClusterHandle, *flags: str, namespace: str = NAMESPACE) -> str:
    """Render the chart as YAML.

    Raises:
        ClusterError: Helm failed; the text is its message.
    """
    return _helm(cluster, namespace, "template", "goodput", str(CHART), *flags)


def run_chart_tests(cluster: ClusterHandle, *, namespace: str = NAMESPACE) -> str:
    """Run the tests in the chart and return Helm's output.

    Raises:
        ClusterError: a test failed; the text is Helm's message.
    """
    return _helm(cluster, namespace, "test", "goodput", "--timeout=60s")


def uninstall_chart(cluster: ClusterHandle, *, namespace: str = NAMESPACE) -> None:
    """Uninstall the chart; the custom resource definition remains."""
    _helm(cluster, namespace, "uninstall", "goodput", "--wait")


def _helm(cluster: ClusterHandle, namespace: str, *words: str) -> str:
    try:
        ended = subprocess.run(
            ["helm", *words, "--namespace", namespace],
            env=cluster.environment,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:  # on another cluster
        raise ClusterError("helm is missing: install it, or build it with make e2e") from error
    if ended.returncode != 0:
        raise ClusterError(f"helm: {ended.stderr.strip()}")
    return ended.stdout
