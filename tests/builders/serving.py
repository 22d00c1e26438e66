"""An engine whose HTTP process is the test's own event loop; its core runs in a process."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs
from tests.builders.schedulers import make_configure

from goodput_core.slo.targets import SLOClass
from goodput_engine.core_client import CoreClient
from goodput_engine.http_server import listen
from goodput_engine.messages import FollowManifest
from goodput_engine.openai.headers import ServiceClasses
from goodput_engine.server.app import serving_app
from goodput_engine.server.manifest_watch import FollowedFields
from goodput_engine.server.parsers import Parsers
from goodput_engine.server.settings import ClientLimits, EngineSettings, ReplicaIdentity
from goodput_engine.server.state import ServerState
from goodput_engine.server_options import CLIENT_CONNECTIONS, ConnectionLimits

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Iterable

__all__ = ["CONFIGURE", "server_state", "serving"]

CONFIGURE = make_configure(
    token_budget=2048,
    min_token_budget=256,
    max_token_budget=8192,
    max_num_seqs=16,
    max_waiting=1024,
)
_CLASSES = (SLOClass(name="chat", ttft_ms=60_000, tpot_ms=60_000),)


def server_state(
    *,
    classes: Iterable[SLOClass] = _CLASSES,
    clients: ClientLimits | None = None,
    control_token: str | None = None,
    **configure: Any,
) -> ServerState:
    """Return the state of an HTTP process before its core is ready.

    Args:
        classes: the SLO classes; the first one is the default.
        clients: limits on client requests; None for the defaults.
        control_token: token of `PATCH /control/limits`.
        configure: fields that replace those of `CONFIGURE`.
    """
    core = structs.replace(CONFIGURE, **configure)
    by_name = {one.name: one for one in classes}
    settings = EngineSettings(
        identity=ReplicaIdentity(llmservice="chat", replica="chat-0", revision="1"),
        followed=FollowedFields(
            slo=ServiceClasses(classes=by_name, default=next(iter(by_name))),
            core=FollowManifest(
                min_token_budget=core.min_token_budget, max_token_budget=core.max_token_budget
            ),
        ),
        manifest=Path("none.yaml"),
        configure=core,
        device={},
        host="127.0.0.1",
        port=0,
        admin_port=0,
        grace_s=1,
        exit_with_parent=False,
        json=False,
        control_token=control_token,
        clients=clients or ClientLimits(),
    )
    return ServerState(settings)


@asynccontextmanager
async def serving(
    state: ServerState,
    *,
    address: tuple[str, int] | socket.socket = ("127.0.0.1", 0),
    connections: ConnectionLimits = CLIENT_CONNECTIONS,
    on_step: Callable[[object], None] = lambda _: None,
    silence_s: float = 30,
) -> AsyncIterator[str]:
    """Start a core and open the serving port; yields its URL.

    Args:
        state: the state of the HTTP process.
        address: host and port, or a bound socket.
        connections: limits of the port's connections.
        on_step: called after each step of the core.
        silence_s: time after which a silent core is killed.
    """
    async with AsyncExitStack() as stack:
        parsers = Parsers.start(stack)
        core = await CoreClient.start(
            state.settings.configure, on_step=on_step, silence_s=silence_s
        )
        stack.push_async_callback(core.close)
        state.serve(core, await core.await_ready())
        url, _ = await listen(
            stack,
            serving_app(state, parsers),
            address,
            limits=connections,
            shutdown_s=0.1,
            handler_cancellation=True,
        )
        yield url
