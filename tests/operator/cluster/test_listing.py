"""The operator lists its services with the addresses of their ready pods."""

from __future__ import annotations

from typing import Any

from goodput_operator.kube.cache import Cache
from goodput_operator.manager.listing import list_services


def pod(
    name: str, role: str, address: str | None, *, ready: bool = True, service: str = "u"
) -> dict[str, Any]:
    labels = {"goodput.dev/llmservice": "chat", "goodput.dev/role": role}
    metadata: dict[str, Any] = {"name": name, "namespace": "team", "uid": name, "labels": labels}
    metadata["annotations"] = {"goodput.dev/llmservice-uid": service}
    condition = {"type": "Ready", "status": str(ready)}
    status = {"phase": "Running", "conditions": [condition]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "resourceVersion": "1"},
        "status": status if address is None else {**status, "podIP": address},
    }


def test_only_ready_routers_and_engines_are_listed() -> None:
    cache = Cache((kind, "") for kind in ("LLMService", "Pod"))
    slo = {"classes": [{"name": "a", "ttftMs": 1, "tpotMs": 1}]}
    decision = {"at": "t", "knob": "Replicas", "reason": "Demand", "message": "m", "applied": True}
    summary = {"phase": "Serving", "budget": "2048"}
    service = {
        "apiVersion": "goodput.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "chat", "namespace": "team", "uid": "u", "resourceVersion": "1"},
        "spec": {"slo": slo},
        "status": {"summary": summary, "decisions": [decision]},
    }
    listed = {"apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
    pods = [
        pod("chat-router", "router", "10.0.0.1"),
        pod("chat-router-of-earlier-chat", "router", "10.0.0.2", service="earlier"),
        pod("chat-0", "engine", "fd00::1"),
        pod("chat-1", "engine", "10.0.0.3", ready=False),
        pod("chat-2", "engine", None),
        pod("chat-gate", "candidate", "10.0.0.5"),
    ]
    cache.replace("LLMService", "", {**listed, "items": [service]})
    cache.replace("Pod", "", {**listed, "items": pods})
    assert list_services(cache) == {
        "services": [
            {
                "namespace": "team",
                "name": "chat",
                "uid": "u",
                "slo": slo,
                "summary": {"phase": "Serving"},
                "decisions": [decision],
                "routers": {"chat-router": "http://10.0.0.1:9000"},
                "engines": {"chat-0": "http://[fd00::1]:9000"},
            }
        ]
    }
