"""The operator's own port answers on every address of its pod, of either family."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest

from goodput_core.errors import UsageError
from goodput_operator.cluster.metrics import OperatorMetrics
from goodput_operator.cluster.probes import Probes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from goodput_operator.cluster.health import Health


class Well:
    """A health without problems."""

    ready = True

    def report(self) -> dict[str, Any]:
        return {"problems": [], "leading": True, "waiting": 0}


@pytest.fixture
async def probes() -> AsyncIterator[Probes]:
    probes = Probes(cast("Health", Well()), OperatorMetrics())
    yield probes
    await probes.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the kernel has no IPv6")
async def test_everywhere_is_both_families(probes: Probes) -> None:
    port = await probes.start("::", free_port())
    async with aiohttp.ClientSession() as http:
        for host in ("127.0.0.1", "[::1]"):
            async with http.get(f"http://{host}:{port}/health/ready") as response:
                assert response.status == 200


async def test_a_port_that_is_taken_is_said_so(probes: Probes) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="choose another with --probe-port"),
    ):
        await probes.start("127.0.0.1", taken.getsockname()[1])
