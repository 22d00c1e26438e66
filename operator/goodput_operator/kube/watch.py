"""Connects to the API server, and registers Kopf event handlers for the watched kinds.

Only event handlers are registered, so Kopf writes nothing: no finalizer blocks the deletion of a
service while no operator runs, and no annotation is added to users' objects. Kopf watches with the
session of `watch_session`. This session reports accepted requests to `manager.health`, and listed
objects to `kube.cache`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import aiohttp
import kopf
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.config_exception import ConfigException

from goodput_core.contract import OBJECT_LABEL_LLMSERVICE
from goodput_core.errors import UnreachableError, UsageError
from goodput_operator.kube.cache import owner_of
from goodput_operator.kube.objects import CHILDREN, JOB, LLMSERVICE, MANAGER, POD, TRACEREPLAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from goodput_operator.kube.cache import OwnerKey
    from goodput_operator.kube.objects import Kind

__all__ = ["WATCHED", "WATCH_S", "configure", "connect", "register_watches", "watch_session"]

WATCH_S: Final = 240
"""Duration after which the API server ends a watch and Kopf starts the next."""
WATCHED: Final = (LLMSERVICE, TRACEREPLAY, POD, JOB, *CHILDREN)
_CONNECTIONS: Final = 32
"""Maximum number of connections, more than the workers and the election use at once."""
_CONNECT_S: Final = 10
_REQUEST_S: Final = 60
_MAX_BACK_OFF_S: Final = 15
_EXIT_S: Final = 30
_KUBECONFIG_ERRORS: Final = (
    ConfigException,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    yaml.YAMLError,
)
"""Errors that the client raises for an invalid kubeconfig."""


async def connect(kubeconfig: Path | None) -> ApiClient:
    """Return a client with the credentials of this pod or of a kubeconfig.

    Args:
        kubeconfig: file with credentials. None selects the pod's service account, or kubectl's
            configuration outside a pod.

    Raises:
        UnreachableError: no credentials were found.
        UsageError: the kubeconfig is invalid.
    """
    configuration = Configuration()
    configuration.connection_pool_maxsize = _CONNECTIONS
    configuration.retries = None
    try:
        if kubeconfig is None and _load_service_account(configuration):
            return ApiClient(configuration)
        await config.load_kube_config(
            config_file=None if kubeconfig is None else str(kubeconfig),
            client_configuration=configuration,
            persist_config=False,
        )
    except _KUBECONFIG_ERRORS as error:
        if kubeconfig is not None:
            raise UsageError(f"{kubeconfig}: not a usable kubeconfig: {error}") from error
        raise UnreachableError(
            "no cluster: this is not a pod with a service account, and kubectl's configuration "
            f"is not usable either ({error}); name a file with --kubeconfig"
        ) from error
    return ApiClient(configuration)


def _load_service_account(configuration: Configuration) -> bool:
    try:
        config.load_incluster_config(client_configuration=configuration)
    except ConfigException:
        return False
    return True


async def watch_session(
    api: ApiClient,
    *,
    on_request: Callable[[str], None],
    on_list: Callable[[str, Any], None],
) -> kopf.AiohttpSession:
    """Return the session that Kopf lists and watches with.

    Args:
        api: connection whose server and credentials are used.
        on_request: called with the path of each request that the API server accepted.
        on_list: called with the path and content of each response that is not a stream, before
            Kopf processes it.
    """
    configuration = api.configuration

    async def send_request(
        request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        # Read again for each request, since service account tokens are rotated within the hour.
        request.headers.update(await _authorization_header(configuration))
        response = await send(request)
        if response.status < 300:
            on_request(request.url.path)
        return response

    class Response(aiohttp.ClientResponse):
        """A response that also passes its decoded content to `on_list`."""

        async def json(self, **options: Any) -> Any:
            content = await super().json(**options)
            if self.status < 300:
                on_list(self.url.path, content)
            return content

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=api.rest_client.ssl_context),
        middlewares=(send_request,),
        response_class=Response,
    )
    return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)


async def _authorization_header(configuration: Configuration) -> dict[str, str]:
    settings = (await configuration.auth_settings()).get("BearerToken")
    value = None if settings is None else settings["value"]
    return {} if value is None else {"Authorization": value}


class _Backoffs:
    """Endless back-off delays, so that the operator outlasts an unavailable API server."""

    def __iter__(self) -> Iterator[float]:
        seconds = 1
        while True:
            yield seconds
            seconds = min(2 * seconds, _MAX_BACK_OFF_S)


def configure(settings: kopf.OperatorSettings) -> None:
    """Set time limits, and disable all features with which Kopf writes."""
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.server_timeout = WATCH_S
    settings.watching.client_timeout = WATCH_S + _REQUEST_S
    settings.watching.connect_timeout = _CONNECT_S
    # Each list is one complete response, so `Cache.replace` can drop cached objects that the list
    # lacks.
    settings.watching.chunk_size = None
    settings.watching.initial_streaming = False
    settings.networking.connect_timeout = _CONNECT_S
    settings.networking.request_timeout = _REQUEST_S
    settings.networking.error_backoffs = _Backoffs()
    settings.process.ultimate_exiting_timeout = _EXIT_S
    # Pods and Jobs belong to services or to replays, and those of both have this label.
    managed = f"app.kubernetes.io/managed-by={MANAGER}"
    for kinds, selector in (
        (CHILDREN, OBJECT_LABEL_LLMSERVICE),
        ((POD, JOB), managed),
    ):
        settings.watching.label_selectors[_is_one_of(kinds)] = selector


def _is_one_of(kinds: Iterable[Kind]) -> Callable[[Any], bool]:
    names = {(kind.group, kind.plural) for kind in kinds}
    return lambda resource: (resource.group, resource.plural) in names


def register_watches(
    registry: kopf.OperatorRegistry,
    *,
    on_change: Callable[[Any, bool], None],
    enqueue: Callable[[OwnerKey], None],
) -> None:
    """Register an event handler for each watched kind.

    Args:
        registry: Kopf's registry.
        on_change: called for each event with the object, and True if the object was deleted.
        enqueue: called after `on_change` with the key of the service or replay to reconcile.
    """

    async def owner_event(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
        body, deleted = event["object"], event["type"] == "DELETED"
        on_change(body, deleted)
        inputs = _reconciled_inputs(body)
        if not deleted and memo.get("inputs") == inputs:
            return  # only the status changed, which this operator writes
        memo.inputs = inputs
        if (key := owner_of(body)) is not None:
            enqueue(key)

    async def child_event(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        on_change(body, event["type"] == "DELETED")
        if (key := owner_of(body)) is not None:
            enqueue(key)

    for kind in (LLMSERVICE, TRACEREPLAY):
        _on_event(registry, kind, owner_event)
    for kind in (POD, JOB, *CHILDREN):
        _on_event(registry, kind, child_event)


def _on_event(registry: kopf.OperatorRegistry, kind: Kind, handler: Any) -> None:
    version = kind.api_version.rpartition("/")[2]
    group, plural = kind.group, kind.plural
    kopf.on.event(
        group=group, version=version, plural=plural, id=f"{plural}-event", registry=registry
    )(handler)


def _reconciled_inputs(body: Any) -> object:
    """Return the fields of a service or replay whose change requires a reconciliation."""
    metadata = body["metadata"]
    return (
        metadata.get("generation"),
        metadata.get("deletionTimestamp"),
        metadata.get("labels"),
        metadata.get("annotations"),
    )
