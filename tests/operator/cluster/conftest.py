"""A memory of an API server: enough of server-side apply, and of refusals, to try the writers on.

The calls go through the real `Client` with its fence, time-outs and answers; only the wire is not
there. What a real API server does is tried on one (`test_operator_on_api_server.py`).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest

from goodput_core.units import NS_PER_S
from goodput_operator.kube.client import Client, parse_response
from goodput_operator.kube.fence import Fence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_operator.kube.client import ApiResponse
    from goodput_operator.kube.objects import Object


@dataclass
class HandClock:
    """Time that moves when a test says so."""

    ns: int = 1_000 * NS_PER_S

    def now_ns(self) -> int:
        return self.ns

    def unix_ns(self) -> int:
        return self.ns + 1_700_000_000 * NS_PER_S


@dataclass
class Server:
    """Objects, the managers of their fields, and the calls so far.

    Args:
        objects: by path.
        managers: of each object's `data`: field to manager.
        refuse: answers to give instead, by method and path.
        rivals: fields of `data` of which an object may have one alone: more are invalid.
        hang: paths that never answer.
    """

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    managers: dict[str, dict[str, str]] = field(default_factory=dict)
    refuse: dict[tuple[str, str], tuple[int, dict[str, Any]]] = field(default_factory=dict)
    rivals: set[str] = field(default_factory=set)
    hang: set[str] = field(default_factory=set)
    calls: list[tuple[str, str, bool]] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)

    def put(self, path: str, body: dict[str, Any], manager: str = "somebody") -> None:
        """Store an object of another manager."""
        name = path.rpartition("/")[2]
        metadata = {"name": name, "uid": f"uid-{len(self.objects)}", **body.get("metadata", {})}
        self.objects[path] = {**body, "metadata": {**metadata, "resourceVersion": "1"}}
        self.managers[path] = dict.fromkeys(body.get("data", {}), manager)

    @property
    def writes(self) -> list[tuple[str, str, bool]]:
        """The calls that may change something: method, path, forced."""
        return [call for call in self.calls if call[0] != "GET"]

    def answer(
        self, method: str, path: str, body: Any, query: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        force = query.get("force") == "true"
        self.calls.append((method, path, force))
        self.bodies.append(body)
        if (method, path) in self.refuse:
            return self.refuse[method, path]
        if method == "GET":
            return (200, self._seen(path)) if path in self.objects else _status(404, "NotFound")
        if method == "DELETE":
            return self._delete(path, body)
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return _status(409, "AlreadyExists")
            self.put(path, body, "goodput-operator")
            return 201, self.objects[path]
        if isinstance(body, list):
            return self._hand_over(path, body)
        if "metadata" not in body:
            return 200, self.objects[path] | body
        return self._apply(path.removesuffix("/status"), body, force=force)

    def _seen(self, path: str) -> dict[str, Any]:
        live = self.objects[path]
        owned: dict[str, dict[str, Any]] = {}
        for name, manager in self.managers.get(path, {}).items():
            owned.setdefault(manager, {})[f"f:{name}"] = {}
        if not owned:
            return live
        entries = [
            {"manager": manager, "apiVersion": live["apiVersion"], "fieldsV1": {"f:data": fields}}
            for manager, fields in owned.items()
        ]
        return {**live, "metadata": {**live["metadata"], "managedFields": entries}}

    def _delete(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        live = self.objects.get(path)
        if live is None:
            return _status(404, "NotFound")
        if live["metadata"]["uid"] != body["preconditions"]["uid"]:
            return _status(409, "Conflict")
        del self.objects[path]
        return 200, {"kind": "Status"}

    def _hand_over(self, path: str, steps: list[Any]) -> tuple[int, dict[str, Any]]:
        """A JSON patch of `metadata.managedFields`, by which everything becomes ours."""
        live = self.objects[path]
        values = {step["path"]: step["value"] for step in steps}
        assert values["/metadata/uid"] == live["metadata"]["uid"]
        assert values["/metadata/resourceVersion"] == live["metadata"]["resourceVersion"]
        (entry,) = values["/metadata/managedFields"]
        fields = entry["fieldsV1"]["f:data"]
        self.managers[path] = {name.removeprefix("f:"): entry["manager"] for name in fields}
        return 200, live

    def _apply(self, path: str, body: Any, *, force: bool) -> tuple[int, dict[str, Any]]:
        live = self.objects.get(path)
        uid = body["metadata"].get("uid")
        if uid is not None and (live is None or live["metadata"]["uid"] != uid):
            return _status(409, "Conflict")
        if live is None:
            self.put(path, body, "goodput-operator")
            return 201, self.objects[path]
        theirs = {
            name: manager
            for name, manager in self.managers.setdefault(path, {}).items()
            if manager != "goodput-operator"
            and name in body.get("data", {})
            and body["data"][name] != live["data"][name]
        }
        if theirs and not force:
            causes = [
                {
                    "reason": "FieldManagerConflict",
                    "message": f'conflict with "{manager}" using v1',
                    "field": f".data.{name}",
                }
                for name, manager in theirs.items()
            ]
            return _status(409, "Conflict", causes)
        version = str(int(live["metadata"]["resourceVersion"]) + 1)
        mine, asked = self.managers[path], body.get("data", {})
        # What was ours and is asked for no more goes.
        left = {
            name: value
            for name, value in live.get("data", {}).items()
            if name in asked or mine.get(name) != "goodput-operator"
        }
        merged = {**live, **body, "data": {**left, **asked}}
        if len(self.rivals & set(merged["data"])) > 1:
            return _status(422, "Invalid")
        merged["metadata"] = {**live["metadata"], **body["metadata"], "resourceVersion": version}
        self.objects[path] = merged
        self.managers[path] |= dict.fromkeys(body.get("data", {}), "goodput-operator")
        return 200, merged


def _status(code: int, reason: str, causes: Any = ()) -> tuple[int, dict[str, Any]]:
    words = f"the server says {reason}"
    return code, {
        "kind": "Status",
        "code": code,
        "reason": reason,
        "message": words,
        "details": {"causes": list(causes)},
    }


class MemoryClient(Client):
    """The real client; what it would send goes to a `Server`."""

    def __init__(self, server: Server, fence: Fence) -> None:
        self.counted: list[tuple[str, str, int]] = []
        super().__init__(
            cast("Any", None),
            fence=fence,
            timeout_ns=NS_PER_S // 20,
            count=lambda *call: self.counted.append(call),
        )
        self.server = server

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
        methods = {"get": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}
        async with asyncio.timeout(seconds):
            if path in self.server.hang:
                await asyncio.Event().wait()
        status, content = self.server.answer(methods[verb], path, body, query)
        return parse_response(status, json.dumps(content).encode())


@dataclass
class Memory:
    """A server, a client of it, and the time and the fence that the client goes by."""

    clock: HandClock = field(default_factory=HandClock)
    server: Server = field(default_factory=Server)
    fence: Fence = field(init=False)
    client: MemoryClient = field(init=False)

    def __post_init__(self) -> None:
        self.fence = Fence(self.clock)
        self.fence.extend(self.clock.ns + 3600 * NS_PER_S)
        self.client = MemoryClient(self.server, self.fence)


@pytest.fixture
def memory() -> Memory:
    """A fresh one."""
    return Memory()


@pytest.fixture
def make_memory() -> type[Memory]:
    """For tests that need one for each example."""
    return Memory
