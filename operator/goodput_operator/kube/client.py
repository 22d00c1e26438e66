"""The operator's calls to the API server, each with a time limit, and their responses.

A failed call is a value and not an exception, because failures are ordinary here: they become
conditions. No call is retried; the work queue decides when to reconcile again.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from goodput_core.units import NS_PER_S
from goodput_operator.kube.managed_fields import Conflict
from goodput_operator.kube.objects import LEASE, MANAGER, Object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kubernetes.aio.client import ApiClient

    from goodput_operator.kube.fence import Fence
    from goodput_operator.kube.objects import Kind

__all__ = [
    "UNREACHABLE",
    "ApiResponse",
    "Client",
    "FailedCall",
    "LeaseClient",
    "ReadClient",
    "parse_response",
]

UNREACHABLE: Final = 0
"""Status of a call that got no HTTP response."""
_JSON: Final = "application/json"
_MERGE_PATCH: Final = "application/merge-patch+json"
_JSON_PATCH: Final = "application/json-patch+json"
_APPLY: Final = "application/apply-patch+yaml"
_METHODS: Final = {
    "get": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}
_CONFLICTING_MANAGER: Final = re.compile(r'conflict with "([^"]*)"')
_MAX_MESSAGE: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A call that the API server rejected, or that got no response.

    Args:
        status: HTTP status, or `UNREACHABLE`.
        reason: the API server's CamelCase reason, such as `AlreadyExists`.
        message: the API server's message, or a description of the failure.
        conflicts: conflicts of a server-side apply.
    """

    status: int
    reason: str
    message: str
    conflicts: tuple[Conflict, ...] = ()

    @property
    def transient(self) -> bool:
        """True if the same call may succeed later without a change of the cluster."""
        # 401 is transient: an API server that has just started cannot verify tokens yet, and tokens
        # are rotated.
        return self.status in {UNREACHABLE, 401, 408, 429} or self.status >= 500

    @property
    def stale(self) -> bool:
        """True if the cached object was out of date: another uid or resourceVersion."""
        return self.status == 409 and self.reason == "Conflict" and not self.conflicts

    @property
    def invalid(self) -> bool:
        """True if the resulting object would violate its schema."""
        return self.status == 422

    @property
    def not_found(self) -> bool:
        """True if the object does not exist."""
        return self.status == 404


ApiResponse = Object | FailedCall


def parse_response(status: int, body: bytes) -> ApiResponse:
    """Return the object or the failure in a response of the API server or a proxy.

    Args:
        status: HTTP status.
        body: body of the response.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):  # a proxy may send anything
        content = None
    if status < 300 and isinstance(content, dict):
        return content
    status_body: dict[str, Any] = content if isinstance(content, dict) else {}
    details = status_body.get("details")
    details = details if isinstance(details, dict) else {}
    message = status_body.get("message") or body[:_MAX_MESSAGE].decode(errors="replace").strip()
    return FailedCall(
        status=status,
        reason=str(status_body.get("reason") or "Unknown"),
        message=str(message)[:_MAX_MESSAGE] or f"HTTP status {status} without a message",
        conflicts=tuple(_conflicts(details.get("causes"))),
    )


def _conflicts(causes: Any) -> list[Conflict]:
    conflicts = []
    for cause in causes if isinstance(causes, list) else ():
        if isinstance(cause, dict) and cause.get("reason") == "FieldManagerConflict":
            manager = _CONFLICTING_MANAGER.search(str(cause.get("message")))
            conflicts.append(
                Conflict(
                    manager=manager[1] if manager else "unknown", field=str(cause.get("field"))
                )
            )
    return conflicts


class _BoundedClient:
    """Calls with a time limit, whose outcome is always an `ApiResponse`.

    Args:
        api: connection to the API server with its credentials.
        timeout_ns: time limit of one call.
        count: called after each call with verb, kind and status.
    """

    def __init__(
        self, api: ApiClient, *, timeout_ns: int, count: Callable[[str, str, int], None]
    ) -> None:
        self._api = api
        self._timeout_ns = timeout_ns
        self._count = count

    async def read(self, kind: Kind, namespace: str, name: str) -> ApiResponse:
        """Read one object from the API server, not from the cache."""
        return await self._call("get", kind, kind.path(namespace, name))

    async def _call(
        self,
        verb: str,
        kind: Kind,
        path: str,
        body: Object | Sequence[Object] | None = None,
        *,
        content_type: str = _JSON,
        query: Mapping[str, str] | None = None,
        timeout_ns: int | None = None,
    ) -> ApiResponse:
        seconds = (timeout_ns or self._timeout_ns) / NS_PER_S
        response: ApiResponse
        try:
            response = await self._send(
                verb, path, body, content_type=content_type, query=query or {}, seconds=seconds
            )
        except TimeoutError:
            response = FailedCall(
                status=UNREACHABLE,
                reason="Timeout",
                message=f"the API server did not respond within {seconds:g} s",
            )
        except (aiohttp.ClientError, OSError) as error:
            response = FailedCall(
                status=UNREACHABLE,
                reason="Unreachable",
                message=f"the API server cannot be reached: {error}",
            )
        self._count(verb, kind.name, response.status if isinstance(response, FailedCall) else 200)
        return response

    async def _send(
        self,
        verb: str,
        path: str,
        body: Object | Sequence[Object] | None,
        *,
        content_type: str,
        query: Mapping[str, str],
        seconds: float,
    ) -> ApiResponse:
        method, url, headers, _, _ = await self._api.param_serialize(
            method=_METHODS[verb],
            resource_path=path,
            query_params=list(query.items()),
            header_params={"Accept": _JSON, "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        # One limit for connecting, sending and reading.
        async with asyncio.timeout(seconds):
            response = await self._api.call_api(
                method,
                url,
                header_params=headers,
                body=body,
                _request_timeout=aiohttp.ClientTimeout(total=seconds),
            )
            content = await response.read()
        return parse_response(response.status, content)


class ReadClient(_BoundedClient):
    """Calls that only read."""


class LeaseClient(_BoundedClient):
    """Calls of the leader election. They are not fenced, because they extend the fence."""

    async def create_lease(self, namespace: str, body: Object) -> ApiResponse:
        """Create the Lease."""
        return await self._call("create", LEASE, LEASE.path(namespace), body)

    async def replace_lease(self, namespace: str, name: str, body: Object) -> ApiResponse:
        """Replace the Lease unless it changed since the body's `resourceVersion`."""
        return await self._call("update", LEASE, LEASE.path(namespace, name), body)


class Client(_BoundedClient):
    """The calls of reconciliations.

    Args:
        api: connection to the API server with its credentials.
        fence: admits every write, and bounds its duration.
        timeout_ns: time limit of one call.
        count: called after each call with verb, kind and status.

    Every method that writes raises `LeaseLostError` if the Lease is no longer held.
    """

    def __init__(
        self,
        api: ApiClient,
        *,
        fence: Fence,
        timeout_ns: int,
        count: Callable[[str, str, int], None],
    ) -> None:
        super().__init__(api, timeout_ns=timeout_ns, count=count)
        self._fence = fence

    async def discover(self, kind: Kind) -> ApiResponse:
        """Read the discovery document of the kind's group and version."""
        root = "apis" if kind.group else "api"
        return await self._call("get", kind, f"/{root}/{kind.api_version}")

    async def apply(
        self, kind: Kind, body: Object, *, force: bool, subresource: str = ""
    ) -> ApiResponse:
        """Server-side apply under our field manager.

        Args:
            kind: kind of the object.
            body: all fields that we own. If `metadata.uid` is set, the API server reports a
                conflict if the object has another uid or does not exist.
            force: take over fields that other managers set to other values.
            subresource: subresource to apply to, such as `status`.
        """
        metadata = body["metadata"]
        return await self._write(
            "patch",
            kind,
            kind.path(metadata["namespace"], metadata["name"], subresource),
            body,
            content_type=_APPLY,
            query={"fieldManager": MANAGER, "force": "true" if force else "false"},
        )

    async def create(self, kind: Kind, namespace: str, body: Object) -> ApiResponse:
        """Create an object."""
        query = {"fieldManager": MANAGER}
        return await self._write("create", kind, kind.path(namespace), body, query=query)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Object) -> ApiResponse:
        """Apply a JSON merge patch."""
        query = {"fieldManager": MANAGER}
        path = kind.path(namespace, name)
        return await self._write("patch", kind, path, patch, content_type=_MERGE_PATCH, query=query)

    async def replace_managed_fields(
        self, kind: Kind, live: Object, managed_fields: Sequence[Mapping[str, Any]]
    ) -> ApiResponse:
        """Replace `metadata.managedFields` unless the object changed since it was read.

        Args:
            kind: kind of the object.
            live: the object as it was read.
            managed_fields: the new value.
        """
        metadata = live["metadata"]
        steps = [
            {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
            {"op": "replace", "path": "/metadata/managedFields", "value": managed_fields},
            # The API server rejects a resourceVersion other than the latest.
            {
                "op": "replace",
                "path": "/metadata/resourceVersion",
                "value": metadata["resourceVersion"],
            },
        ]
        path = kind.path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": MANAGER}
        return await self._write("patch", kind, path, steps, content_type=_JSON_PATCH, query=query)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> ApiResponse:
        """Delete the object with this uid, and in the background its dependents."""
        options = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        return await self._write("delete", kind, kind.path(namespace, name), options)

    async def _write(
        self,
        verb: str,
        kind: Kind,
        path: str,
        body: Object | Sequence[Object],
        *,
        content_type: str = _JSON,
        query: Mapping[str, str] | None = None,
    ) -> ApiResponse:
        remaining_ns = self._fence.admit(kind.name)
        # A write still in flight when the Lease expires is cancelled.
        return await self._call(
            verb,
            kind,
            path,
            body,
            content_type=content_type,
            query=query,
            timeout_ns=min(remaining_ns, self._timeout_ns),
        )
