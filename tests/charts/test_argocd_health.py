"""The health that Argo CD's script derives from an LLMService."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lupa import LuaRuntime

SCRIPT = Path(__file__).resolve().parents[2] / "charts/goodput/argocd/health.lua"


def health(service: dict[str, Any]) -> tuple[str, str]:
    lua = LuaRuntime()
    lua.globals().obj = lua.table_from(service, recursive=True)
    table = lua.execute(SCRIPT.read_text(encoding="utf-8"))
    return table.status, table.message


def service(
    conditions: dict[str, str], *, observed: int = 3, suspend: bool = False
) -> dict[str, Any]:
    written = [
        {"type": name, "status": status, "message": f"{name} is {status}"}
        for name, status in conditions.items()
    ]
    return {
        "metadata": {"generation": 3},
        "spec": {"suspend": suspend},
        "status": {"observedGeneration": observed, "conditions": written},
    }


@pytest.mark.parametrize(
    ("resource", "status", "message"),
    [
        ({"metadata": {"generation": 1}, "spec": {}}, "Progressing", "Waiting for the operator"),
        (service({"Ready": "True"}, observed=2), "Progressing", "Waiting for the operator"),
        (service({"Ready": "True"}), "Healthy", "Ready is True"),
        (service({"Ready": "False"}), "Progressing", "Ready is False"),
        (
            service({"Ready": "True", "Reconciling": "True"}),
            "Progressing",
            "Reconciling is True",
        ),
        (service({"Ready": "False", "Stalled": "True"}), "Degraded", "Stalled is True"),
        (service({"Ready": "False"}, suspend=True), "Suspended", "spec.suspend is set"),
    ],
    ids=["new", "older than the spec", "ready", "not ready", "rolling", "stalled", "suspended"],
)
def test_health_follows_from_the_conditions(
    resource: dict[str, Any], status: str, message: str
) -> None:
    assert health(resource) == (status, message)
