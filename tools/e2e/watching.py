"""Watches of objects, for tests that must not miss a state between two reads."""

from __future__ import annotations

import json
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tools.e2e.installation import conditions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.e2e.installation import ChartRelease

__all__ = ["ServingEngines", "watching"]


@contextmanager
def watching(
    installation: ChartRelease, *words: str, on_event: Callable[[str, dict[str, Any]], None]
) -> Iterator[None]:
    """Call a function for each event of some objects during the block, in a thread.

    Args:
        installation: the namespace.
        words: kind and selector of the objects, as for `kubectl get`.
        on_event: receives the type of the event, such as `DELETED`, and the object.
    """
    options = ("--watch", "--output-watch-events", "-o", "json", "-n", installation.namespace)
    process = subprocess.Popen(
        [installation.cluster.binaries / "kubectl", "get", *words, *options],
        env=installation.cluster.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout

    def read() -> None:
        for line in output:  # one event each
            event = json.loads(line)
            on_event(event["type"], event["object"])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
        assert process.poll() is None, f"kubectl get {' '.join(words)} ended"
    finally:
        process.terminate()
        process.wait(timeout=30)
        reader.join()
        output.close()


class ServingEngines:
    """Counts the serving engines of services: pods that are ready and not being deleted.

    Attributes:
        least: smallest number of each service since its first engine served.
    """

    def __init__(self) -> None:
        self.least: dict[str, int] = {}
        self._serving: dict[str, set[str]] = {}

    def on_event(self, kind: str, pod: dict[str, Any]) -> None:
        """Count after an event of an engine's pod."""
        metadata = pod["metadata"]
        service = metadata["labels"]["goodput.dev/llmservice"]
        names = self._serving.setdefault(service, set())
        names.discard(metadata["name"])
        gone = kind == "DELETED" or "deletionTimestamp" in metadata
        if not gone and conditions_of(pod).get("Ready") == "True":
            names.add(metadata["name"])
        if names or service in self.least:
            self.least[service] = min(self.least.get(service, len(names)), len(names))
