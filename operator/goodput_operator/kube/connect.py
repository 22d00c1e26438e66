"""Finding the API server: the pod's service account, or a kubeconfig.

One configuration serves both our own client and Kopf's watches. Kopf is given a session of ours,
because only that lets us hear that its watches still ask (`health`) and what it lists (`cache`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import aiohttp
import kopf
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.config_exception import ConfigException

from goodput_core.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["connect", "watch_session"]

_POOL: Final = 32
"""Connections at once: more than workers, probes of the Lease included."""
_UNUSABLE: Final = (ConfigException, OSError, ValueError, TypeError, KeyError, yaml.YAMLError)
"""What the client raises of a file that is no kubeconfig."""


async def connect(kubeconfig: Path | None) -> ApiClient:
    """A client with the credentials of this pod, or of a kubeconfig.

    Args:
        kubeconfig: that file; None: the service account of the pod, and outside of a pod the file
            that kubectl would read.

    Raises:
        UnreachableError: there are no credentials.
        UsageError: the kubeconfig cannot be used.
    """
    configuration = Configuration()
    configuration.connection_pool_maxsize = _POOL
    configuration.retries = None
    try:
        if kubeconfig is None and _in_cluster(configuration):
            return ApiClient(configuration)
        await config.load_kube_config(
            config_file=None if kubeconfig is None else str(kubeconfig),
            client_configuration=configuration,
            persist_config=False,
        )
    except _UNUSABLE as error:
        if kubeconfig is not None:
            raise UsageError(f"{kubeconfig}: cannot be used as a kubeconfig: {error}") from error
        raise UnreachableError(
            "no cluster: this is no pod with a service account, and kubectl's own configuration "
            f"cannot be used either ({error}); name a file with --kubeconfig"
        ) from error
    return ApiClient(configuration)


def _in_cluster(configuration: Configuration) -> bool:
    try:
        config.load_incluster_config(client_configuration=configuration)
    except ConfigException:
        return False
    return True


async def watch_session(
    api: ApiClient,
    *,
    heard: Callable[[str], None],
    listed: Callable[[str, Any], None],
) -> kopf.AiohttpSession:
    """What Kopf watches with.

    Args:
        api: whose server and credentials.
        heard: told the path of each request that the API server grants.
        listed: told the path and the content of each answer that is no stream, before Kopf is.
    """
    configuration = api.configuration
    trace = aiohttp.TraceConfig()

    async def started(
        _: aiohttp.ClientSession, __: object, request: aiohttp.TraceRequestStartParams
    ) -> None:
        # Tokens of service accounts change within the hour.
        request.headers.update(await _authorization(configuration))

    async def answered(
        _: aiohttp.ClientSession, __: object, request: aiohttp.TraceRequestEndParams
    ) -> None:
        if request.response.status < 300:
            heard(request.url.path)

    class Answer(aiohttp.ClientResponse):
        """Decoded once, for Kopf and for us."""

        async def json(self, **options: Any) -> Any:
            content = await super().json(**options)
            if self.status < 300:
                listed(self.url.path, content)
            return content

    trace.on_request_start.append(started)
    trace.on_request_end.append(answered)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=api.rest_client.ssl_context),
        trace_configs=[trace],
        response_class=Answer,
    )
    return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)


async def _authorization(configuration: Configuration) -> dict[str, str]:
    settings = (await configuration.auth_settings()).get("BearerToken")
    value = None if settings is None else settings["value"]
    return {} if value is None else {"Authorization": value}
