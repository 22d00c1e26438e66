"""Offers requests to services, at rates that change while it runs: inside the cluster's network.

Each line that comes in, `{"name": …, "url": …, "per_s": …}`, sets the rate of one service from
then on, and is answered by how its requests have ended so far: `{outcome: count}`. It ends with
its standard input.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter

import aiohttp

PROMPT_TOKENS = 3000
ANSWER_TOKENS = 24
_TIMEOUT = aiohttp.ClientTimeout(total=300)


class Offer:
    """Requests to one service, at random times."""

    def __init__(self, name: str, url: str, http: aiohttp.ClientSession) -> None:
        self.outcomes: Counter[str] = Counter()
        self._name = name
        self._url = url
        self._http = http
        self._rng = random.Random(name)
        self._per_s = 0.0
        self._changed = asyncio.Event()

    def change(self, per_s: float) -> None:
        self._per_s = per_s
        self._changed.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as sending:
            while True:
                self._changed.clear()
                wait_s = self._rng.expovariate(self._per_s) if self._per_s else None
                try:
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
                except TimeoutError:
                    sending.create_task(self._send())

    async def _send(self) -> None:
        body = {
            "model": self._name,
            "prompt": [self._rng.randrange(30_000) for _ in range(PROMPT_TOKENS)],
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
                text = await response.text()
                whole = response.status == 200 and "[DONE]" in text
                self.outcomes["ok" if whole else f"{response.status}: {text[-300:]}"] += 1
        except aiohttp.ClientError as error:
            self.outcomes[repr(error)] += 1


async def main() -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    connector = aiohttp.TCPConnector(limit=0)
    offers: dict[str, Offer] = {}
    async with aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector) as http:
        running = []
        while line := await lines.readline():
            asked = json.loads(line)
            name = asked["name"]
            if name not in offers:
                offers[name] = Offer(name, asked["url"], http)
                running.append(asyncio.create_task(offers[name].run()))
            offers[name].change(asked["per_s"])
            sys.stdout.write(json.dumps(offers[name].outcomes) + "\n")
            sys.stdout.flush()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
