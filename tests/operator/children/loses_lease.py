"""An operator process that loses the Lease as soon as Kopf watches; options as arguments."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import kopf

from goodput_core.errors import GoodputError
from goodput_operator.kube.errors import LeaseLostError
from goodput_operator.manager.cli import run_operator
from goodput_operator.manager.options import parse_options

if TYPE_CHECKING:
    from collections.abc import Callable


class LosesLease:
    """Loses the Lease as soon as Kopf watches."""

    def __init__(self, _: object, on_failure: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._on_failure = on_failure

    async def start(self, **_: object) -> None:
        """Connect to nothing."""

    async def login(self) -> kopf.AiohttpSession:
        asyncio.get_running_loop().call_soon(self._lose)
        session = aiohttp.ClientSession()
        return kopf.AiohttpSession(server="http://127.0.0.1:1", aiohttp_session=session)

    def _lose(self) -> None:
        self.failure = LeaseLostError("the Lease is another's")
        self._on_failure()

    async def stop(self) -> None:
        """Release nothing."""

    def enqueue(self, key: object) -> None:
        """Ignore a watched service."""


def make(*arguments: Any) -> Any:
    return LosesLease(*arguments)


if __name__ == "__main__":
    try:
        sys.exit(run_operator(parse_options(sys.argv[1:]), make))
    except GoodputError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
