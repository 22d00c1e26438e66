"""An API server in memory, with server-side apply and rejections, for tests of the writers.

Calls pass the real `Client` with its fence, time limits and responses; only the connection is
missing. `test_operator_on_api_server.py` uses a real API server.
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
class ManualClock:
    """A clock that a test advances."""

    ns: int = 1_000 * NS_PER_S

    def now_ns(self) -> int:
        return self.ns

    def unix_ns(self) -> int:
        return self.ns + 1_700_000_000 * NS_PER_S


@dataclass
class InMemoryServer:
    """The objects, the managers of their fields, and the received calls.

    Args:
        objects: objects by path.
        managers: manager by field of each object's `data`.
        rejections: status and body of calls to reject, by method and path.
        exclusive: fields of `data` that exclude each other; an object with several is invalid.
        hanging: paths without a response.
        calls: method, path and force of the received calls.
        bodies: bodies of the received calls.
    """

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    managers: dict[str, dict[str, str]] = field(default_factory=dict)
    rejections: dict[tuple[str, str], tuple[int, dict[str, Any]]] = field(default_factory=dict)
    exclusive: set[str] = field(default_factory=set)
    hanging: set[str] = field(default_factory=set)
    calls: list[tuple[str, str, bool]] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)

    def put(self, path: str, body: dict[str, Any], manager: str = "kubectl") -> None:
        """Store an object of another manager."""
        name = path.rpartition("/")[2]
        metadata = {"name": name, "uid": f"uid-{len(self.objects)}", **body.get("metadata", {})}
        self.objects[path] = {**body, "metadata": {**metadata, "resourceVersion": "1"}}
        self.managers[path] = dict.fromkeys(body.get("data", {}), manager)

    @property
    def writes(self) -> list[tuple[str, str, bool]]:
        """Return the calls that may change an object: method, path, force."""
        return [call for call in self.calls if call[0] != "GET"]

    def respond(
        self, method: str, path: str, body: Any, query: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        force = query.get("force") == "true"
        self.calls.append((method, path, force))
        self.bodies.append(body)
        if (method, path) in self.rejections:
            return self.rejections[method, path]
        if method == "GET":
            return (
                (200, self._with_managers(path))
                if path in self.objects
                else _status(404, "NotFound")
            )
        if method == "DELETE":
            return self._delete(path, body)
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return _status(409, "AlreadyExists")
            self.put(path, body, "goodput-operator")
            return 201, self.objects[path]
        if isinstance(body, list):
            return self._replace_managed_fields(path, body)
        if "metadata" not in body:
            return 200, self.objects[path] | body
        return self._apply(path.removesuffix("/status"), body, force=force)

    def _with_managers(self, path: str) -> dict[str, Any]:
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

    def _replace_managed_fields(self, path: str, steps: list[Any]) -> tuple[int, dict[str, Any]]:
        """Apply a JSON patch of `metadata.managedFields` that makes all fields ours."""
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
        managers, applied = self.managers[path], body.get("data", {})
        # Fields that are ours and no longer applied are removed.
        kept = {
            name: value
            for name, value in live.get("data", {}).items()
            if name in applied or managers.get(name) != "goodput-operator"
        }
        merged = {**live, **body, "data": {**kept, **applied}}
        if len(self.exclusive & set(merged["data"])) > 1:
            return _status(422, "Invalid")
        merged["metadata"] = {**live["metadata"], **body["metadata"], "resourceVersion": version}
        self.objects[path] = merged
        self.managers[path] |= dict.fromkeys(body.get("data", {}), "goodput-operator")
        return 200, merged


def _status(code: int, reason: str, causes: Any = ()) -> tuple[int, dict[str, Any]]:
    return code, {
        "kind": "Status",
        "code": code,
        "reason": reason,
        "message": f"rejected: {reason}",
        "details": {"causes": list(causes)},
    }


class InMemoryClient(Client):
    """The real client, which sends its calls to an `InMemoryServer`."""

    def __init__(self, server: InMemoryServer, fence: Fence) -> None:
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
            if path in self.server.hanging:
                await asyncio.Event().wait()
        status, content = self.server.respond(methods[verb], path, body, query)
        return parse_response(status, json.dumps(content).encode())


@dataclass
class ApiBench:
    """A server in memory with a client, its fence and its clock."""

    clock: ManualClock = field(default_factory=ManualClock)
    server: InMemoryServer = field(default_factory=InMemoryServer)
    fence: Fence = field(init=False)
    client: InMemoryClient = field(init=False)

    def __post_init__(self) -> None:
        self.fence = Fence(self.clock)
        self.fence.extend(self.clock.ns + 3600 * NS_PER_S)
        self.client = InMemoryClient(self.server, self.fence)


@pytest.fixture
def bench() -> ApiBench:
    """Return a bench without objects."""
    return ApiBench()


@pytest.fixture
def make_bench() -> type[ApiBench]:
    """Return the class, for tests that need a bench per example."""
    return ApiBench
