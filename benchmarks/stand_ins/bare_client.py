"""A bare aiohttp loop that sends a schedule: the reference of the benchmarks of load generators.

It does what each asyncio client must do, and nothing else: sleep until a request is due, send a
body that was rendered before the start, and read the lines of the stream to its end. It keeps no
records, parses no JSON and shows no progress, and garbage is not collected while it sends.

    python benchmarks/stand_ins/bare_client.py --url http://127.0.0.1:8000 --schedule trace.jsonl

The schedule has Mooncake's JSON lines: timestamp (ms), input_length, output_length. The last line
of the output is a JSON object with the number of requests and of complete responses.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from pathlib import Path

import aiohttp
import uvloop

START_DELAY_S = 0.5


def read_schedule(path: Path) -> list[tuple[float, bytes]]:
    """Return the due time in seconds and the body of each request."""
    schedule = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        body = {
            "model": "mock",
            "prompt": list(range(10_000, 10_000 + row["input_length"])),
            "max_tokens": row["output_length"],
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        schedule.append((row["timestamp"] / 1000, json.dumps(body).encode()))
    return schedule


async def send(session: aiohttp.ClientSession, url: str, body: bytes) -> bool:
    """Send a request, read its stream, and return True if the stream was complete."""
    complete = False
    headers = {"Content-Type": "application/json"}
    async with session.post(url, data=body, headers=headers) as response:
        async for line in response.content:
            complete = complete or line.startswith(b"data: [DONE]")
    return complete


async def run(url: str, schedule: list[tuple[float, bytes]]) -> int:
    """Send all requests at their times, and return the number of complete responses."""
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        tasks = []
        start = loop.time() + START_DELAY_S
        for due_s, body in schedule:
            delay = start + due_s - loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(send(session, url, body)))
        results = await asyncio.gather(*tasks, return_exceptions=True)
    return sum(result is True for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--schedule", type=Path, required=True)
    options = parser.parse_args()
    schedule = read_schedule(options.schedule)
    gc.collect()
    gc.freeze()
    gc.disable()
    complete = uvloop.run(run(f"{options.url}/v1/completions", schedule))
    print(json.dumps({"requests": len(schedule), "complete": complete}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
