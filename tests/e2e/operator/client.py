"""A client as a process of its own: `python client.py URL MODEL COUNT TOKENS`.

It asks for COUNT answers at once, each streamed and of TOKENS tokens, and prints a JSON line for
each first token and for each end: "done", or the code of the error that ended it. It tries
nothing twice.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp


def say(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


async def answer(
    http: aiohttp.ClientSession, url: str, model: str, number: int, tokens: int
) -> None:
    body = {
        "model": model,
        "prompt": [number, 1, 2, 3],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    end, begun = "cut off", False
    try:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                end = (await response.json())["error"]["code"]
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    end = "done"
                elif b'"error"' in data:
                    end = json.loads(data)["error"]["code"]
                elif data and not begun:
                    begun = True
                    say(answer=number)
    except (aiohttp.ClientError, OSError) as error:
        end = type(error).__name__
    say(answer=number, end=end)


async def main(url: str, model: str, count: int, tokens: int) -> None:
    # One that hangs is the test's to find.
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await asyncio.gather(*(answer(http, url, model, number, tokens) for number in range(count)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
