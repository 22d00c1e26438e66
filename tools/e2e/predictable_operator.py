"""An operator with predictable decisions: each service gets one ConfigMap.

The ConfigMap contains the text of the service's annotation `text`. Kopf, work queue, Lease and
client are those of the real operator.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from goodput_core.errors import GoodputError
from goodput_core.units import NS_PER_S
from goodput_operator.kube.fence import SystemClock
from goodput_operator.manager.cli import run_operator
from goodput_operator.manager.options import parse_options
from goodput_operator.manager.runtime import Operator
from goodput_operator.reconcile.actions import Action, Apply, Decision, WriteStatus
from goodput_operator.render.metadata import Owner

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_operator.manager.options import Options
    from goodput_operator.reconcile.snapshot import Snapshot

_WAKE_AFTER_NS = NS_PER_S


class NoMeasures:
    async def measure(self, service: Any, pods: Any, now_ns: int) -> None:
        return None

    def forget(self, uid: str) -> None:
        pass


def decide(snapshot: Snapshot) -> Decision:
    metadata = snapshot.service["metadata"]
    name = f"{metadata['name']}-config"
    owner = Owner(name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])
    data = {"text": metadata.get("annotations", {}).get("text", "")}
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owner.metadata(name),
        "data": data,
    }
    objects = {(one["kind"], one["metadata"]["name"]): one for one in snapshot.objects}
    live = objects.get(("ConfigMap", name))
    actions: list[Action] = []
    if live is None or live["data"] != data:
        actions.append(Apply(body=body))
    status = {"observedGeneration": metadata["generation"], "replicas": 0}
    if snapshot.service.get("status") != status:
        actions.append(WriteStatus(status=status))
    return Decision(
        actions=tuple(actions), memory=snapshot.memory, wake_at_ns=snapshot.now_ns + _WAKE_AFTER_NS
    )


def make(options: Options, on_failure: Callable[[], None]) -> Operator:
    return Operator(
        options,
        decide=decide,
        measure=lambda _: NoMeasures(),
        clock=SystemClock(),
        on_failure=on_failure,
    )


if __name__ == "__main__":
    try:
        sys.exit(run_operator(parse_options(sys.argv[1:]), make))
    except GoodputError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
