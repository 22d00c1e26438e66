"""A server with the command line, the endpoints and the metrics of vLLM, for tests without a GPU.

    vllm serve MODEL [options]

Each token of a request takes longer, the more requests run, so that a replica has a capacity. The
metrics have the names and labels of vllm/v1/metrics/loggers.py (vLLM 0.33). The environment
variable EMULATED_METRICS selects another page: `old` has the names of vLLM 0.8, `missing` responds
with 404, `slow` does not respond, and `huge` is endless. As with vLLM, a prompt takes one step for
each `--max-num-batched-tokens`, and steps take longer with `--enforce-eager`. EMULATED_SLOWNESS is
a factor of all steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_STEP_S = 0.010
_STEP_PER_REQUEST_S = 0.015
_PREFILL_S_PER_TOKEN = 0.00002
_EAGER = 3
"""Factor of the step time without CUDA graphs; exaggerated."""
_BLOCKS = 1000
_BLOCK_TOKENS = 16


class EmulatedVllm:
    """One replica.

    Args:
        model: the served model's name.
        width: maximum number of running requests; others wait.
        batched_tokens: prompt tokens of one step.
        slowness: factor of all times.
        metrics: value of EMULATED_METRICS.
    """

    def __init__(
        self,
        model: str,
        width: int,
        metrics: str,
        batched_tokens: int = 2048,
        slowness: float = 1.0,
    ) -> None:
        self._model = model
        self._batched_tokens = batched_tokens
        self._slowness = slowness
        self._metrics = metrics
        self._places = asyncio.Semaphore(width)
        self._registry = registry = CollectorRegistry()
        labels, values = ["model_name", "engine"], (model, "0")
        usage = "gpu_cache_usage_perc" if metrics == "old" else "kv_cache_usage_perc"
        gauges = (
            Gauge(f"vllm:{name}", name, labels, registry=registry).labels(*values)
            for name in ("num_requests_running", "num_requests_waiting", usage)
        )
        self._running, self._waiting, self._usage = gauges
        Counter("vllm:num_preemptions", "Preemptions.", labels, registry=registry).labels(*values)
        tokens = Counter("vllm:generation_tokens", "Tokens.", labels, registry=registry)
        self._generated = tokens.labels(*values)
        config = Gauge(
            "vllm:cache_config_info",
            "Settings.",
            ["block_size", "num_gpu_blocks"],
            registry=registry,
        )
        config.labels(str(_BLOCK_TOKENS), str(_BLOCKS)).set(1)
        histograms = (
            Histogram(f"vllm:{name}", name, labels, registry=registry).labels(*values)
            for name in ("request_prompt_tokens", "request_generation_tokens")
        )
        self._prompts, self._outputs = histograms
        self._used_tokens = 0
        self._batch = 0

    def app(self) -> web.Application:
        """Return the application with vLLM's paths."""
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.completions)
        return app

    async def health(self, _: web.Request) -> web.Response:
        """Respond with 200, as vLLM does while its engine runs."""
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        """List the model."""
        return web.json_response({"object": "list", "data": [{"id": self._model}]})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Respond with the metrics page."""
        if self._metrics == "missing":
            return web.Response(status=404)
        if self._metrics == "slow":
            await asyncio.Event().wait()
        if self._metrics == "huge":
            page = web.StreamResponse()
            await page.prepare(request)
            while True:
                await page.write(b"# a comment\n" * 4096)
        return web.Response(body=generate_latest(self._registry))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Respond with as many tokens as requested, of a completion or a chat."""
        body = await request.json()
        if body.get("model") != self._model:
            error = {"message": "The model does not exist.", "code": 404}
            return web.json_response({"error": error}, status=404)
        chat = "messages" in body
        asked = json.dumps(body["messages"]) if chat else body["prompt"]
        prompt, tokens = len(asked), int(body.get("max_tokens", 16))
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
        streams = bool(body.get("stream"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if streams:
            await response.prepare(request)
        self._waiting.inc()
        try:
            await self._places.acquire()
        finally:
            self._waiting.dec()
        try:
            async with aclosing(self._run(prompt, tokens)) as run:
                async for number in run:
                    self._generated.inc()
                    if streams:
                        choice = _choice(
                            "delta" if chat else "", " word", last=number + 1 == tokens
                        )
                        await self._write(response, {"choices": [choice]})
        finally:
            self._places.release()
        self._prompts.observe(prompt)
        self._outputs.observe(tokens)
        if not streams:
            choice = _choice("message" if chat else "", " word" * tokens, last=True)
            return web.json_response({"choices": [choice], "usage": usage})
        if (body.get("stream_options") or {}).get("include_usage"):
            await self._write(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _run(self, prompt: int, tokens: int) -> AsyncGenerator[int, None]:
        """Yield the number of each token when it is computed."""
        self._batch += 1
        self._running.set(self._batch)
        self._used_tokens += prompt + tokens
        self._usage.set(min(1.0, self._used_tokens / (_BLOCKS * _BLOCK_TOKENS)))
        try:
            further_steps = (prompt - 1) // self._batched_tokens
            await asyncio.sleep(prompt * _PREFILL_S_PER_TOKEN + further_steps * self._step_s())
            for number in range(tokens):
                await asyncio.sleep(self._step_s())
                yield number
        finally:
            self._batch -= 1
            self._running.set(self._batch)
            self._used_tokens -= prompt + tokens

    def _step_s(self) -> float:
        return self._slowness * (_STEP_S + _STEP_PER_REQUEST_S * self._batch)

    async def _write(self, response: web.StreamResponse, event: dict[str, object]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _choice(message: str, text: str, *, last: bool) -> dict[str, object]:
    """Return a choice with text.

    Args:
        message: name of the chat message's field; empty for a completion.
        text: the text.
        last: True if nothing follows it.
    """
    content = {message: {"role": "assistant", "content": text}} if message else {"text": text}
    return {"index": 0, **content, "finish_reason": "length" if last else None}


def main(argv: list[str]) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--revision")
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    args = parser.parse_args(argv)
    metrics = os.environ.get("EMULATED_METRICS", "")
    slowness = float(os.environ.get("EMULATED_SLOWNESS", "1"))
    server = EmulatedVllm(
        args.served_model_name or args.model,
        args.max_num_seqs,
        metrics,
        args.max_num_batched_tokens,
        slowness * (_EAGER if args.enforce_eager else 1),
    )
    web.run_app(server.app(), host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
