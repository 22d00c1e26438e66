"""Ways into any cluster's network: ports of this machine that lead to services, by `kubectl`."""

from __future__ import annotations

import re
import subprocess
import threading
from typing import TYPE_CHECKING
from urllib.request import urlopen

from goodput_core.contract import PATH_MODELS

if TYPE_CHECKING:
    from tools.cluster.handle import Cluster

__all__ = ["Forward", "Forwards"]


class Forward:
    """A port of this machine that leads to one pod of a service, for as long as the pod is there.

    Args:
        cluster: where the service is.
        namespace: of the service.
        service: its name; requests go to port 80.

    Raises:
        AssertionError: with kubectl's own words, when there is no pod to lead to.
    """

    def __init__(self, cluster: Cluster, namespace: str, service: str) -> None:
        words = ("port-forward", "-n", namespace, f"service/{service}", ":80")
        self._process = subprocess.Popen(
            [cluster.binaries / "kubectl", *words],
            env=cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        self._words = self._process.stdout
        said = self._words.readline()
        # It says a line for each connection, and stops where nobody reads them.
        self._reader = threading.Thread(target=self._words.read)
        self._reader.start()
        address = re.search(r"127\.0\.0\.1:\d+", said)
        if address is None:
            self.close()
            raise AssertionError(said)
        self.url = f"http://{address[0]}"

    def leads_there(self) -> bool:
        """Whether a request is answered; it may outlive the pod, and answer nothing."""
        try:
            with urlopen(f"{self.url}{PATH_MODELS}", timeout=5):
                return True
        except OSError:
            return False

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(timeout=30)
        self._reader.join()
        self._words.close()


class Forwards:
    """One way to each service that was asked for.

    Args:
        cluster: where the services are.
        namespace: of the services.
    """

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self._kept: dict[str, Forward] = {}

    def url(self, service: str) -> str:
        """Where a service is reached from this machine."""
        kept = self._kept.get(service)
        if kept is not None and not kept.leads_there():
            self._kept.pop(service).close()
        if service not in self._kept:
            self._kept[service] = Forward(self._cluster, self._namespace, service)
        return self._kept[service].url

    def close(self) -> None:
        """End them all."""
        for forward in self._kept.values():
            forward.close()
        self._kept.clear()
