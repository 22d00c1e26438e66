"""Small objects for the tests of the cluster itself."""

from __future__ import annotations

from typing import Any

from tools.cluster.images import PYTHON, SHELL

__all__ = ["container", "pod", "python", "shell", "template_of", "web"]


def container(image: str, *command: str, **fields: Any) -> dict[str, Any]:
    """Return a container named main."""
    return {"name": "main", "image": image, "command": list(command), **fields}


def shell(script: str, **fields: Any) -> dict[str, Any]:
    """Return a container that runs a shell script."""
    return container(SHELL, "sh", "-ec", script, **fields)


def python(script: str, **fields: Any) -> dict[str, Any]:
    """Return a container that runs a Python script."""
    return container(PYTHON, "python", "-c", script, **fields)


def pod(name: str, main: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a pod of one container, without restarts and with a short grace period."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "containers": [main],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            **fields,
        },
    }


def template_of(pod: dict[str, Any]) -> dict[str, Any]:
    """Convert a pod to the template of a Job or a Deployment."""
    return {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]}


def web(name: str, *, replicas: int = 1) -> list[dict[str, Any]]:
    """Return a Deployment whose pods serve their name as `/hello`, and its Service."""
    script = 'cd /tmp; echo "hello from $HOSTNAME" > hello; exec python -m http.server'
    server = container(
        PYTHON,
        *("sh", "-ec", script),
        readinessProbe={"httpGet": {"path": "/hello", "port": 8000}, "periodSeconds": 1},
    )
    template = template_of(pod(name, server, restartPolicy="Always"))
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": name}},
                "template": template,
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8000}]},
        },
    ]
