"""The calls that the operator makes to the API server, each with its own time-out.

Plain dictionaries in and out: typed models cost thirty times as much to decode. A refusal is a
value (`answers`), and nothing is tried twice here: the queue decides when.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from goodput_core.units import NS_PER_S
from goodput_operator.kube.answers import UNREACHABLE, Refusal, read_answer
from goodput_operator.kube.kinds import LEASE
from goodput_operator.kube.objects import MANAGER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kubernetes.aio.client import ApiClient

    from goodput_operator.kube.answers import Answer
    from goodput_operator.kube.fence import Fence
    from goodput_operator.kube.kinds import Kind
    from goodput_operator.kube.objects import Object

__all__ = ["Client", "LeaseCalls"]

_JSON: Final = "application/json"
_MERGE: Final = "application/merge-patch+json"
_STEPS: Final = "application/json-patch+json"
_APPLY: Final = "application/apply-patch+yaml"

_METHODS: Final = {
    "get": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}


class _Calls:
    """One bounded call at a time; every outcome is an answer.

    Args:
        api: the connection, credentials included.
        timeout_ns: of one call.
        count: told of each call: verb, kind, status.
    """

    def __init__(
        self, api: ApiClient, *, timeout_ns: int, count: Callable[[str, str, int], None]
    ) -> None:
        self._api = api
        self._timeout_ns = timeout_ns
        self._count = count

    async def read(self, kind: Kind, namespace: str, name: str) -> Answer:
        """One object as it is now, past every cache of ours."""
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
    ) -> Answer:
        seconds = (timeout_ns or self._timeout_ns) / NS_PER_S
        answer: Answer
        try:
            answer = await self._send(
                verb, path, body, content_type=content_type, query=query or {}, seconds=seconds
            )
        except TimeoutError:
            answer = Refusal(
                status=UNREACHABLE,
                reason="Timeout",
                message=f"the API server did not answer within {seconds:g} s",
            )
        except (aiohttp.ClientError, OSError) as error:
            answer = Refusal(
                status=UNREACHABLE,
                reason="Unreachable",
                message=f"the API server cannot be reached: {error}",
            )
        self._count(verb, kind.name, answer.status if isinstance(answer, Refusal) else 200)
        return answer

    async def _send(
        self,
        verb: str,
        path: str,
        body: Object | Sequence[Object] | None,
        *,
        content_type: str,
        query: Mapping[str, str],
        seconds: float,
    ) -> Answer:
        method, url, headers, _, _ = await self._api.param_serialize(
            method=_METHODS[verb],
            resource_path=path,
            query_params=list(query.items()),
            header_params={"Accept": _JSON, "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        # One limit over connecting, sending and reading.
        async with asyncio.timeout(seconds):
            response = await self._api.call_api(
                method,
                url,
                header_params=headers,
                body=body,
                _request_timeout=aiohttp.ClientTimeout(total=seconds),
            )
            content = await response.read()
        return read_answer(response.status, content)


class LeaseCalls(_Calls):
    """The calls of the election, which nothing fences: they move the fence."""

    async def create_lease(self, namespace: str, body: Object) -> Answer:
        """Create the Lease."""
        return await self._call("create", LEASE, LEASE.path(namespace), body)

    async def replace_lease(self, namespace: str, name: str, body: Object) -> Answer:
        """Replace the Lease, unless it has changed since its `resourceVersion`."""
        return await self._call("update", LEASE, LEASE.path(namespace, name), body)


class Client(_Calls):
    """The API server, as far as the operator needs it.

    Args:
        api: the connection, credentials included.
        fence: every write asks it first, and is given up when it closes.
        timeout_ns: of one call.
        count: told of each call: verb, kind, status.
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

    async def serves(self, kind: Kind) -> Answer:
        """What the API server says of the kind's group and version."""
        root = "apis" if kind.group else "api"
        return await self._call("get", kind, f"/{root}/{kind.api_version}")

    async def apply(self, kind: Kind, body: Object, *, force: bool, part: str = "") -> Answer:
        """Server-side apply under our field manager.

        Args:
            kind: of the object.
            body: the fields that we own, all of them; with `metadata.uid` only this very object:
                one of another uid, or none, is a conflict.
            force: take fields from managers that set other values.
            part: a subresource, such as `status`.

        Raises:
            LeaseLostError: another operator may write by now.
        """
        metadata = body["metadata"]
        return await self._write(
            "patch",
            kind,
            kind.path(metadata["namespace"], metadata["name"], part),
            body,
            content_type=_APPLY,
            query={"fieldManager": MANAGER, "force": "true" if force else "false"},
        )

    async def create(self, kind: Kind, namespace: str, body: Object) -> Answer:
        """Create an object that must not be there.

        Raises:
            LeaseLostError: another operator may write by now.
        """
        query = {"fieldManager": MANAGER}
        return await self._write("create", kind, kind.path(namespace), body, query=query)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Object) -> Answer:
        """Change some fields of an object of our own.

        Raises:
            LeaseLostError: another operator may write by now.
        """
        query = {"fieldManager": MANAGER}
        path = kind.path(namespace, name)
        return await self._write("patch", kind, path, patch, content_type=_MERGE, query=query)

    async def hand_over(
        self, kind: Kind, live: Object, managed_fields: Sequence[Mapping[str, Any]]
    ) -> Answer:
        """Set who owns which field of this very object, and nothing else, if it is as it was.

        Args:
            kind: of the object.
            live: it, as it was read.
            managed_fields: its `metadata.managedFields` from now on.

        Raises:
            LeaseLostError: another operator may write by now.
        """
        metadata = live["metadata"]
        steps = [
            {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
            {"op": "replace", "path": "/metadata/managedFields", "value": managed_fields},
            # The API server refuses another version than the latest.
            {
                "op": "replace",
                "path": "/metadata/resourceVersion",
                "value": metadata["resourceVersion"],
            },
        ]
        path = kind.path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": MANAGER}
        return await self._write("patch", kind, path, steps, content_type=_STEPS, query=query)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> Answer:
        """Delete this very object, and what it owns after it.

        Raises:
            LeaseLostError: another operator may write by now.
        """
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
    ) -> Answer:
        left_ns = self._fence.admit(kind.name)
        # What is still on its way when the Lease runs out is given up.
        return await self._call(
            verb,
            kind,
            path,
            body,
            content_type=content_type,
            query=query,
            timeout_ns=min(left_ns, self._timeout_ns),
        )
