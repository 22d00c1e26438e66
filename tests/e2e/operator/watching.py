"""Which pods of a service serve, from one change to the next, as the API server tells them.

A watch misses nothing between two looks, as asking again and again would. It judges nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.operator.installed import Installed

__all__ = ["PARTS", "Serving", "watching"]

PARTS = ("engine", "router")
Serving = Mapping[str, frozenset[str]]
"""Names of the pods that are ready and not going, by part."""


@contextmanager
def watching(installed: Installed, name: str, file: Path) -> Iterator[Callable[[], list[Serving]]]:
    """Follow the pods of a service for the length of the block.

    It gives what serves after each change so far; the first ones tell the pods that there are.

    Args:
        installed: where the service is.
        name: of the service.
        file: for what the API server tells.
    """
    pods = f"/api/v1/namespaces/{installed.namespace}/pods"
    path = f"{pods}?watch=true&labelSelector=goodput.dev/llmservice={name}"
    with file.open("wb") as told:
        process = subprocess.Popen(
            [installed.cluster.binaries / "kubectl", "get", "--raw", path],
            env=installed.cluster.environment,
            stdout=told,
        )
    try:
        yield lambda: list(_serving(file))
        assert process.poll() is None, "it was told everything"
    finally:
        process.kill()
        process.wait()


def _serving(file: Path) -> Iterator[Serving]:
    now: dict[str, frozenset[str]] = dict.fromkeys(PARTS, frozenset())
    for line in file.read_bytes().split(b"\n")[:-1]:  # the last one may be half written
        change = json.loads(line)
        metadata = change["object"]["metadata"]
        part, pod = metadata["labels"]["app.kubernetes.io/component"], {metadata["name"]}
        serves = change["type"] != "DELETED" and _serves(change["object"])
        now = {**now, part: now[part] | pod if serves else now[part] - pod}
        yield now


def _serves(pod: dict[str, Any]) -> bool:
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
