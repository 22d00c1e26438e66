"""The handlers and settings of Kopf, with which it never writes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import kopf
import pytest

from goodput_operator.kube.cache import ReplayKey
from goodput_operator.kube.objects import CHILDREN, JOB, LLMSERVICE, POD, TRACEREPLAY
from goodput_operator.kube.watch import WATCHED, configure, register_watches

if TYPE_CHECKING:
    from goodput_operator.kube.cache import OwnerKey

LABELS = {"goodput.dev/llmservice": "chat"}


class Watches:
    """The registered handlers, called by tests."""

    def __init__(self) -> None:
        self.registry = kopf.OperatorRegistry()
        self.changes: list[tuple[Any, bool]] = []
        self.enqueued: list[OwnerKey] = []
        register_watches(
            self.registry,
            on_change=lambda body, deleted: self.changes.append((body, deleted)),
            enqueue=self.enqueued.append,
        )
        self._events = {h.id: h.fn for h in self.registry._watching.get_all_handlers()}
        self._memos: dict[str, kopf.Memo] = defaultdict(kopf.Memo)

    async def event(self, plural: str, body: dict[str, Any], kind: str | None = None) -> None:
        handler: Any = self._events[f"{plural}-event"]  # type: ignore[index]
        # Kopf keeps one memo per object until the object is deleted.
        uid = body["metadata"].get("uid", "")
        memo = self._memos.pop(uid, kopf.Memo()) if kind == "DELETED" else self._memos[uid]
        await handler(event={"type": kind, "object": body}, body=body, memo=memo)


@pytest.fixture
def watches() -> Watches:
    return Watches()


def service(generation: int = 1, **more: Any) -> dict[str, Any]:
    metadata = {"name": "chat", "namespace": "ns", "uid": "u", "generation": generation, **more}
    return {"kind": "LLMService", "metadata": metadata}


def test_no_handler_makes_kopf_write_a_finalizer_or_an_annotation(watches: Watches) -> None:
    registry = watches.registry
    assert list(registry._changing.get_all_handlers()) == []
    assert list(registry._spawning.get_all_handlers()) == []
    assert list(registry._webhooks.get_all_handlers()) == []


def test_every_kind_is_watched_and_secrets_are_not(watches: Watches) -> None:
    watched = {
        h.selector.plural for h in watches.registry._watching.get_all_handlers() if h.selector
    }
    assert watched == {kind.plural for kind in (LLMSERVICE, TRACEREPLAY, POD, JOB, *CHILDREN)}
    assert len(WATCHED) == len(watched)
    assert "secrets" not in watched


async def test_a_change_of_a_services_status_alone_enqueues_nothing(
    watches: Watches,
) -> None:
    await watches.event("llmservices", service())
    await watches.event("llmservices", service() | {"status": {"replicas": 1}}, "MODIFIED")
    assert watches.enqueued == [("ns", "chat")]
    assert len(watches.changes) == 2, "the cache is updated"


@pytest.mark.parametrize(
    "changed",
    [
        service(generation=2),
        service(labels={"a": "b"}),
        service(annotations={"a": "b"}),
        service(deletionTimestamp="2026-01-01T00:00:00Z"),
        service(uid="another"),
    ],
    ids=["spec", "label", "annotation", "deletion", "namesake"],
)
async def test_any_other_change_of_a_service_enqueues_it(
    watches: Watches, changed: dict[str, Any]
) -> None:
    await watches.event("llmservices", service())
    await watches.event("llmservices", changed, "MODIFIED")
    assert watches.enqueued == [("ns", "chat")] * 2


async def test_a_deleted_service_is_enqueued_once_more(watches: Watches) -> None:
    await watches.event("llmservices", service())
    await watches.event("llmservices", service(), "DELETED")
    await watches.event("llmservices", service(), "ADDED")
    assert watches.enqueued == [("ns", "chat")] * 3


async def test_a_child_enqueues_the_service_in_its_label(watches: Watches) -> None:
    ours = {"metadata": {"name": "chat-1", "namespace": "ns", "labels": LABELS}}
    theirs = {"metadata": {"name": "other", "namespace": "ns"}}
    for kind in (POD, *CHILDREN):
        await watches.event(kind.plural, {"kind": kind.name, **ours})
        await watches.event(kind.plural, {"kind": kind.name, **theirs})
    assert watches.enqueued == [("ns", "chat")] * (1 + len(CHILDREN))


async def test_a_replay_and_its_jobs_and_pods_enqueue_the_replay_not_a_service(
    watches: Watches,
) -> None:
    labels = {"goodput.dev/tracereplay": "chat"}
    child = {"metadata": {"name": "chat-shards", "namespace": "ns", "labels": labels}}
    await watches.event("tracereplays", {**service(), "kind": "TraceReplay"})
    for kind in (JOB, POD):
        await watches.event(kind.plural, {"kind": kind.name, **child})
    assert watches.enqueued == [ReplayKey("ns", "chat")] * 3


async def test_every_event_is_delivered_and_deletions_are_marked(watches: Watches) -> None:
    pod = {"kind": "Pod", "metadata": {"name": "chat-1", "namespace": "ns"}}
    for kind in (None, "ADDED", "MODIFIED", "DELETED"):
        await watches.event("pods", pod, kind)
        await watches.event("llmservices", service(), kind)
    deleted_flags = [False, False, False, True]
    assert [deleted for body, deleted in watches.changes if body == pod] == deleted_flags
    assert [deleted for body, deleted in watches.changes if body == service()] == deleted_flags


def test_no_kopf_index_is_registered(
    watches: Watches,
) -> None:
    assert list(watches.registry._indexing.get_all_handlers()) == []


def test_every_wait_of_kopf_is_bounded_and_the_api_server_filters_by_label(
    watches: Watches,
) -> None:
    settings = kopf.OperatorSettings()
    non_default = {"chunk_size": 500, "initial_streaming": True}
    for name, value in non_default.items():
        setattr(settings.watching, name, value)
    configure(settings)
    waits = (
        settings.watching.server_timeout,
        settings.watching.client_timeout,
        settings.watching.connect_timeout,
        settings.networking.request_timeout,
        settings.networking.connect_timeout,
    )
    assert all(wait is not None and wait <= 300 for wait in waits)
    assert not settings.posting.enabled
    assert not any(getattr(settings.watching, name) for name in non_default), (
        "one response has the complete list"
    )
    assert settings.scanning.disabled
    backoffs: Any = settings.networking.error_backoffs
    assert list(itertools.islice(backoffs, 7)) == [1, 2, 4, 8, 15, 15, 15]
    selectors = settings.watching.label_selectors
    resources = [
        kopf.Resource(kind.group, kind.api_version.rpartition("/")[2], kind.plural)
        for kind in (LLMSERVICE, TRACEREPLAY, POD, JOB, *CHILDREN)
    ]
    services, replays, pods, jobs, *parts = map(selectors.collect, resources)
    assert all(selected == ["goodput.dev/llmservice"] for selected in parts)
    assert jobs == pods == ["app.kubernetes.io/managed-by=goodput-operator"]
    assert services == replays == []
