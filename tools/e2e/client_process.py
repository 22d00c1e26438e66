"""Send completion requests, as a process that can run inside the cluster's network.

    client_process.py burst URL MODEL COUNT TOKENS
    client_process.py load

`burst` sends COUNT requests at once and prints a JSON line for each first token and for each end,
with the outcome. `load` sends requests to services at random times. Each input line, `{"name": …,
"url": …, "per_s": …}`, sets the rate of one service. The output line reports how the requests of
that service have ended so far, as `{outcome: count}`. It exits when its standard input closes.

An outcome is `done`, or the code of the error. No request is retried.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Callable

_LOAD_TIMEOUT_S = 300


def write_event(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


async def complete(
    http: aiohttp.ClientSession,
    url: str,
    *,
    model: str,
    prompt: list[int],
    tokens: int,
    first_token: Callable[[], None] = lambda: None,
) -> str:
    """Send one streamed request and return its outcome."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    outcome, begun = "cut off", False
    try:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                return str((await response.json())["error"]["code"])
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    outcome = "done"
                elif b'"error"' in data:
                    outcome = json.loads(data)["error"]["code"]
                elif data and not begun:
                    begun = True
                    first_token()
    except (aiohttp.ClientError, OSError) as error:
        outcome = type(error).__name__
    return outcome


async def burst(url: str, model: str, count: int, tokens: int) -> None:
    async def send(number: int) -> None:
        outcome = await complete(
            http,
            url,
            model=model,
            prompt=[number, 1, 2, 3],
            tokens=tokens,
            first_token=lambda: write_event({"request": number}),
        )
        write_event({"request": number, "outcome": outcome})

    async with client_session(timeout_s=None) as http:  # the test detects a request that hangs
        await asyncio.gather(*map(send, range(count)))


class Load:
    """Requests to one service at random times, none until a rate is set.

    Args:
        name: name of the service.
        url: URL of the service.
        http: HTTP session.
        prompt_tokens, output_tokens: length of each request.
    """

    def __init__(
        self,
        name: str,
        url: str,
        http: aiohttp.ClientSession,
        *,
        prompt_tokens: int = 3000,
        output_tokens: int = 24,
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self._name = name
        self._url = url
        self._http = http
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._rng = random.Random(name)
        self._per_s = 0.0
        self._changed = asyncio.Event()

    def set_rate(self, per_s: float) -> None:
        self._per_s = per_s
        self._changed.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as requests:
            while True:
                self._changed.clear()
                wait_s = self._rng.expovariate(self._per_s) if self._per_s else None
                try:
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
                except TimeoutError:
                    requests.create_task(self._send())

    async def _send(self) -> None:
        prompt = [self._rng.randrange(30_000) for _ in range(self._prompt_tokens)]
        outcome = await complete(
            self._http, self._url, model=self._name, prompt=prompt, tokens=self._output_tokens
        )
        self.outcomes[outcome] += 1


async def load() -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    loads: dict[str, Load] = {}
    async with client_session(timeout_s=_LOAD_TIMEOUT_S) as http:
        running = []
        while line := await lines.readline():
            rate = json.loads(line)
            name = rate["name"]
            if name not in loads:
                loads[name] = Load(name, rate["url"], http)
                running.append(asyncio.create_task(loads[name].run()))
            loads[name].set_rate(rate["per_s"])
            write_event(loads[name].outcomes)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def client_session(*, timeout_s: float | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s), connector=aiohttp.TCPConnector(limit=0)
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["burst", url, model, count, tokens]:
            asyncio.run(burst(url, model, int(count), int(tokens)))
        case ["load"]:
            asyncio.run(load())
        case _:
            sys.exit(__doc__)
