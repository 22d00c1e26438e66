"""`python -m tools.cluster`: build the programs, start a cluster and keep it, or stop it."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from tools.cache import cache_folder
from tools.cluster import binaries, installing, starting
from tools.cluster.handle import ClusterError
from tools.cluster.host import lacks_for_running
from tools.cluster.images import EMULATED_VLLM, emulated_vllm_image, kubectl_image

_KEPT = "kept"
_SAMPLE = starting.ROOT / "examples" / "chat.yaml"


def _kept() -> Path:
    """Return the folder of the cluster that `up` keeps running."""
    return cache_folder() / "cluster" / _KEPT


def _require_fit_machine() -> None:
    if lacks := lacks_for_running():
        raise ClusterError("no cluster can run here: " + "; ".join(lacks))


def build() -> None:
    """Build the programs unless the cache has them, after a check of the machine."""
    _require_fit_machine()
    print(binaries.build())


def up() -> None:
    """Start a cluster that outlives this command, unless it runs, and apply the example."""
    _require_fit_machine()
    cluster = starting.attach(_kept())
    if cluster is None:
        shutil.rmtree(_kept(), ignore_errors=True)
        cluster = starting.start(_kept(), binaries.build(), outlive_me=True)
    installing.publish_ours(cluster)
    cluster.publish(
        {
            EMULATED_VLLM: emulated_vllm_image(starting.ROOT),
            # The image of examples/trace-replay/nightly-replay.yaml.
            f"registry.k8s.io/kubectl:{binaries.version_of('k8s.io/kubernetes')}": kubectl_image(
                cluster.binaries
            ),
        }
    )
    installing.install_chart(cluster)
    cluster.kubectl("apply", "-f", str(_SAMPLE))
    cluster.wait("condition=Ready", "llmservice/chat", timeout_s=120)
    print(cluster.kubectl("get", "nodes"))
    print(cluster.kubectl("get", "-f", str(_SAMPLE)))
    print("In another terminal:\n")
    print(f"  export KUBECONFIG={cluster.kubeconfig}")
    programs = Path(sys.executable).parent
    print(f"  export PATH={cluster.binaries}:{programs}:$PATH    # kubectl, helm, goodput")
    print("  kubectl get llmservices,pods\n")
    address = cluster.get("service", "chat")["spec"]["clusterIP"]
    print("Services and pods are reachable inside the cluster's network, so replay from there:\n")
    replay = ("--trace", "sample", "--slo", str(_SAMPLE), "--target", f"http://{address}", "--yes")
    print(f"  {' '.join(cluster.inside(str(programs / 'replay'), *replay))}\n")
    print("Stop the cluster with: make cluster-down")


def down() -> None:
    """Stop the cluster that `up` started."""
    cluster = starting.attach(_kept())
    if cluster is not None:
        starting.stop(cluster)
    shutil.rmtree(_kept(), ignore_errors=True)


def main() -> int:
    """Run a command."""
    commands = {"build": build, "up": up, "down": down}
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description=__doc__)
    parser.add_argument("command", choices=commands)
    try:
        commands[parser.parse_args().command]()
    except (ClusterError, binaries.Unbuildable) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
