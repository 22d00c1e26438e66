"""What Kopf is used for: it lists and watches, and tells us what changed and whose turn it may be.

Event handlers only. Kopf then writes nothing: no finalizer keeps a service from being deleted while
no operator runs, and no annotation marks users' objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import kopf

from goodput_core.contract import OBJECT_LABEL_LLMSERVICE
from goodput_operator.kube.cache import key_of, service_of
from goodput_operator.kube.kinds import CHILDREN, LLMSERVICE, POD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from goodput_operator.kube.cache import Key
    from goodput_operator.kube.kinds import Kind

__all__ = ["WATCHED", "WATCH_S", "configure", "register_watches"]

WATCH_S: Final = 240
"""The API server ends each watch after so long, and each is begun again."""
WATCHED: Final = (LLMSERVICE, POD, *CHILDREN)
_CONNECT_S: Final = 10
_REQUEST_S: Final = 60
_MOST_BACK_OFF_S: Final = 15
_EXIT_S: Final = 30


class _Forever:
    """Back-offs without an end: while the API server is away, the operator waits for it."""

    def __iter__(self) -> Iterator[float]:
        seconds = 1
        while True:
            yield seconds
            seconds = min(2 * seconds, _MOST_BACK_OFF_S)


def configure(settings: kopf.OperatorSettings) -> None:
    """Bound everything that Kopf waits for, and keep it from writing."""
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.server_timeout = WATCH_S
    settings.watching.client_timeout = WATCH_S + _REQUEST_S
    settings.watching.connect_timeout = _CONNECT_S
    # Each list is one answer, complete: what it lacks is gone (`Cache.listed`).
    settings.watching.chunk_size = None
    settings.watching.initial_streaming = False
    settings.networking.connect_timeout = _CONNECT_S
    settings.networking.request_timeout = _REQUEST_S
    settings.networking.error_backoffs = _Forever()
    settings.process.ultimate_exiting_timeout = _EXIT_S
    ours = {(kind.group, kind.plural) for kind in (POD, *CHILDREN)}
    settings.watching.label_selectors[
        lambda resource: (resource.group, resource.plural) in ours
    ] = OBJECT_LABEL_LLMSERVICE


def register_watches(
    registry: kopf.OperatorRegistry,
    *,
    told: Callable[[Any, bool], None],
    wanted: Callable[[Key], None],
) -> None:
    """Register the handlers.

    Args:
        registry: Kopf's.
        told: called at every event with the object, and whether it was deleted.
        wanted: called then with the service that may want a turn.
    """

    async def service_event(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
        body, deleted = event["object"], event["type"] == "DELETED"
        told(body, deleted)
        cause = _cause(body)
        if not deleted and memo.get("cause") == cause:
            return  # a change of the status alone, which is our own
        memo.cause = cause
        wanted(key_of(body))

    async def part_event(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        told(body, event["type"] == "DELETED")
        key = service_of(body)
        if key is not None:
            wanted(key)

    _on(registry, LLMSERVICE, service_event)
    for kind in (POD, *CHILDREN):
        _on(registry, kind, part_event)


def _on(registry: kopf.OperatorRegistry, kind: Kind, tell: Any) -> None:
    version = kind.api_version.rpartition("/")[2]
    group, plural = kind.group, kind.plural
    kopf.on.event(
        group=group, version=version, plural=plural, id=f"{plural}-event", registry=registry
    )(tell)


def _cause(body: Any) -> object:
    """What of a service makes a turn worth while when it changes."""
    metadata = body["metadata"]
    return (
        metadata.get("generation"),
        metadata.get("deletionTimestamp"),
        metadata.get("labels"),
        metadata.get("annotations"),
    )
