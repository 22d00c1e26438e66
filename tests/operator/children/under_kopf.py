"""What `kopf run` imports in place of the operator's module: an operator that ends by itself.

Its options are in the environment, as the operator's own are.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from typing import TYPE_CHECKING, Any

import aiohttp
import kopf

from goodput_core.contract import ENV_OPERATOR_OPTIONS
from goodput_operator.kube.errors import LeaseLostError
from goodput_operator.manager.under_kopf import register

if TYPE_CHECKING:
    from collections.abc import Callable


class Short:
    """Loses the Lease as soon as Kopf watches."""

    def __init__(self, _: object, ended: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._ended = ended

    async def start(self, **_: object) -> None:
        """Nothing is needed for it."""

    async def login(self) -> kopf.AiohttpSession:
        asyncio.get_running_loop().call_soon(self._lose)
        session = aiohttp.ClientSession()
        return kopf.AiohttpSession(server="http://127.0.0.1:1", aiohttp_session=session)

    def _lose(self) -> None:
        self.failure = LeaseLostError("the Lease is another's")
        self._ended()

    async def stop(self) -> None:
        """Nor at its end."""


def short(*arguments: Any) -> Any:
    return Short(*arguments)


register(shlex.split(os.environ[ENV_OPERATOR_OPTIONS]), short)
