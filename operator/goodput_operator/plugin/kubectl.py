"""Runs kubectl and decodes its output."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Final

from goodput_core.contract import (
    CRD_GROUP,
    OBJECT_LABEL_LLMSERVICE,
    OBJECT_LABEL_ROLE,
    PATH_CONTROL_STATE,
    PLURAL_LLMSERVICE,
    ROLE_ENGINE,
    ROLE_ROUTER,
)
from goodput_core.errors import InputError, UnreachableError, UsageError

__all__ = ["Kubectl", "KubectlError"]

_RESOURCE: Final = f"{PLURAL_LLMSERVICE}.{CRD_GROUP}"
_ADMIN_PORT: Final = 9000
_TIMEOUT_S: Final = 30
_MAX_LOG_BYTES: Final = 64 << 20
_MAX_LOG_LINES: Final = 200_000
_OPERATOR: Final = "app.kubernetes.io/name=goodput-operator"
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class KubectlError(UnreachableError):
    """kubectl failed; the text is its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """kubectl with the options of the user.

    Args:
        program: path of kubectl.
        options: options of every call, such as `--context`.
    """

    program: str
    options: tuple[str, ...]

    @classmethod
    def find(cls, *, context: str | None, kubeconfig: str | None) -> Kubectl:
        """Return the kubectl of this machine.

        Raises:
            UsageError: it is not installed.
        """
        program = shutil.which("kubectl")
        if program is None:
            raise UsageError("kubectl is missing: install it, or add its folder to PATH")
        options = [f"--request-timeout={_TIMEOUT_S - 10}s"]
        options += [] if context is None else [f"--context={context}"]
        options += [] if kubeconfig is None else [f"--kubeconfig={kubeconfig}"]
        return cls(program=program, options=tuple(options))

    def services(self, namespace: str | None, *, everywhere: bool = False) -> list[dict[str, Any]]:
        """Return the LLMServices of a namespace (None for kubectl's own), or of all."""
        where = ("--all-namespaces",) if everywhere else _in(namespace)
        items: list[dict[str, Any]] = self._json("get", _RESOURCE, *where)["items"]
        return items

    def service(self, name: str, namespace: str | None) -> dict[str, Any]:
        """Return one LLMService.

        Raises:
            InputError: it does not exist.
        """
        _check_name(name)
        try:
            return self._json("get", f"{_RESOURCE}/{name}", *_in(namespace))
        except KubectlError as error:
            if "(NotFound)" in str(error):
                raise InputError(
                    f"LLMService {name} does not exist; list those of all namespaces with "
                    "`kubectl goodput status -A`"
                ) from error
            raise

    def pods(self, name: str, namespace: str) -> list[dict[str, Any]]:
        """Return the pods of a service's engines and routers."""
        roles = f"{OBJECT_LABEL_ROLE} in ({ROLE_ENGINE},{ROLE_ROUTER})"
        selector = f"{OBJECT_LABEL_LLMSERVICE}={name},{roles}"
        items: list[dict[str, Any]] = self._json("get", "pods", "-n", namespace, "-l", selector)[
            "items"
        ]
        return items

    def state(self, pod: str, namespace: str) -> dict[str, Any]:
        """Return `/control/state` of an engine or a router, through the API server."""
        return _decode(self.page(pod, namespace, f":{_ADMIN_PORT}{PATH_CONTROL_STATE}"))

    def page(self, pod: str, namespace: str, place: str) -> str:
        """Return a page of a pod, through the API server.

        Args:
            pod: name of the pod.
            namespace: its namespace.
            place: port and path, such as `:8000/metrics`.
        """
        port, slash, path = place.partition("/")
        proxy = f"/api/v1/namespaces/{namespace}/pods/{pod}{port}/proxy"
        return self._run("get", "--raw", f"{proxy}{slash}{path}")

    def operator_log(self, namespace: str | None, *, since: str) -> list[dict[str, Any]]:
        """Return the events of the operators' logs since a time.

        Args:
            namespace: namespace of the operator; None to search for it.
            since: the time, in the format of RFC 3339.
        """
        if namespace is None:
            found = self._json("get", "deployments", "--all-namespaces", "-l", _OPERATOR)["items"]
            namespaces = sorted({one["metadata"]["namespace"] for one in found})
            if not namespaces:
                raise KubectlError("no operator of the chart was found in any namespace")
        else:
            namespaces = [namespace]
        events = []
        for one in namespaces:
            # A limit of bytes keeps the oldest ones, so it only bounds the memory.
            text = self._run(
                *("logs", "-n", one, "-l", _OPERATOR, "--prefix=false", "--container=operator"),
                f"--since-time={since}",
                f"--tail={_MAX_LOG_LINES}",
                f"--limit-bytes={_MAX_LOG_BYTES}",
            )
            events += [event for line in text.splitlines() if (event := _event(line)) is not None]
        return events

    def _json(self, *words: str) -> dict[str, Any]:
        return _decode(self._run(*words, "-o", "json"))

    def _run(self, *words: str) -> str:
        try:
            done = subprocess.run(
                [self.program, *self.options, *words],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl did not answer within {_TIMEOUT_S} s") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise KubectlError(f"kubectl: {lines[-1] if lines else 'failed without a message'}")
        return done.stdout


def _in(namespace: str | None) -> tuple[str, ...]:
    return () if namespace is None else ("-n", namespace)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not the name of an LLMService")


def _decode(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KubectlError("kubectl printed something else than JSON") from error
    if not isinstance(found, dict):
        raise KubectlError("kubectl printed something else than a JSON object")
    return found


def _event(line: str) -> dict[str, Any] | None:
    """Return a line of the log as an event; None for other lines."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
