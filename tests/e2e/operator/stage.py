"""Services under load in a cluster: who sends them requests, and what the laws made of it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tests.e2e.operator.installed import Installed

__all__ = ["Stage"]


@dataclass(kw_only=True)
class Stage:
    """The services, and who sends them requests: a process of `offering.py`."""

    installed: Installed
    client: subprocess.Popen[str]
    urls: dict[str, str] = field(default_factory=dict)

    def offer(self, name: str, per_s: float) -> dict[str, int]:
        """Send so many requests per second from now on; how those before have ended so far."""
        if name not in self.urls:
            self.urls[name] = self.installed.url(name)
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        asked = {"name": name, "url": self.urls[name], "per_s": per_s}
        self.client.stdin.write(json.dumps(asked) + "\n")
        self.client.stdin.flush()
        told: dict[str, int] = json.loads(self.client.stdout.readline())
        return told

    def engines(self, name: str) -> dict[str, Any]:
        """The Deployment of a service's engines."""
        (found,) = self.installed.get("deployments", "-l", _of_engines(name))["items"]
        deployment: dict[str, Any] = found
        return deployment

    def until_replicas(self, name: str, replicas: int, timeout_s: int) -> None:
        """Wait until the engines' Deployment is asked for so many and has them, ready."""
        for field_ in ("spec.replicas", "status.readyReplicas", "status.replicas"):
            condition = f"jsonpath={{.{field_}}}={replicas}"
            words = ("deployments", "-l", _of_engines(name))
            self.installed.wait(condition, *words, timeout_s=timeout_s)

    def decisions(self, name: str) -> list[dict[str, Any]]:
        """Of the status, the oldest first."""
        found: list[dict[str, Any]] = self.installed.status(name).get("decisions", [])
        return found[::-1]

    def in_force(self, name: str) -> dict[str, Any]:
        """All that the laws turn, and that tells of it; it changes when any of it does."""
        deployment, config = self.engines(name), self.installed.get("configmap", f"{name}-config")
        return {
            "decisions": self.decisions(name),
            "budget": self.installed.status(name)["tokenBudget"],
            "replicas": deployment["spec"]["replicas"],
            "limits": config["data"]["limits.json"],
            "pods": {pod["metadata"]["uid"] for pod in self.installed.pods(name, "engine")},
        }

    def events(self, name: str, *reasons: str) -> list[dict[str, Any]]:
        """Events on a service, or on its Deployment of engines, of these reasons."""
        names = {name, self.engines(name)["metadata"]["name"]}
        return [
            event
            for event in self.installed.get("events")["items"]
            if event["involvedObject"]["name"] in names and event["reason"] in reasons
        ]

    def engine_budgets(self, name: str) -> list[int]:
        """What each engine says its token budget is."""
        pods = self.installed.pods(name, "engine")
        states = (
            subprocess.run(
                self.installed.own.inside("curl", "-sf", f"http://{address}:9000/control/state"),
                capture_output=True,
                check=True,
            )
            for address in (pod["status"]["podIP"] for pod in pods)
        )
        return [json.loads(state.stdout)["token_budget"] for state in states]

    def turns(self, name: str) -> list[tuple[datetime, datetime]]:
        """When each turn of a service began and ended, by the operator's log."""
        found, begun = [], None
        for line in self.installed.operator_log():
            if line["event"] == "phase" and line["llmservice"] == name:
                if line["phase"] == "observe":
                    begun = datetime.fromisoformat(line["time"])
                elif line["phase"] == "done" and begun is not None:
                    found.append((begun, datetime.fromisoformat(line["time"])))
        return found

    def rounds(self, name: str, since: datetime) -> int:
        """How many intervals of a second have been measured since then.

        A turn measures when the interval is over, and there are turns between.
        """
        count = 0
        for begun, _ in self.turns(name):
            if begun - since >= timedelta(seconds=1):
                since, count = begun, count + 1
        return count


def _of_engines(name: str) -> str:
    return f"goodput.dev/llmservice={name},app.kubernetes.io/component=engine"
