"""Measure the tokens that a target adds to a prompt: a start token, or a chat template.

Texts of two lengths are sent before the run. The difference of their token counts shows if the
target uses the given tokenizer, and what remains of a count are the added tokens. The responses are
not streamed, because some servers report the usage of a stream nowhere.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final

import aiohttp
import msgspec

from goodput_core.errors import UsageError
from goodput_core.spec.choices import Endpoint
from goodput_engine.openai.bodies import request_body
from goodput_replay.plan import PromptKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from yarl import URL

    from goodput_replay.sending.prompts import PromptRenderer

__all__ = ["measure_overhead"]

_FEW: Final = 8
_MANY: Final = 72
_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 1 << 20


class _PromptUsage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _CountedResponse(msgspec.Struct):
    usage: _PromptUsage


async def measure_overhead(
    session: aiohttp.ClientSession,
    urls: Iterable[URL],
    endpoint: Endpoint,
    *,
    model: str,
    prompts: PromptRenderer,
    warn: Callable[[str], None],
) -> int | None:
    """Return the number of tokens that the targets add; None if one reports no token counts.

    Args:
        session: session of the run.
        urls: URL of the endpoint on each target.
        endpoint: the API to call.
        model: model name to send.
        prompts: renders texts without an overhead.
        warn: prints a warning.

    Raises:
        UsageError: a target splits words of one token each into several tokens, or merges them.
    """
    overheads: dict[URL, int] = {}
    for url in urls:
        counts = [
            await _count(session, url, _body(endpoint, model, prompts, words))
            for words in (_FEW, _MANY)
        ]
        few, many = counts
        if few is None or many is None:
            warn(
                f"{url}: no number of prompt tokens could be read from a response, so prompts may "
                "be longer than their rows by the tokens that the target adds"
            )
            return None
        if many - few != _MANY - _FEW or few < _FEW:
            raise UsageError(
                f"--tokenizer: {url} counts {few} tokens for {_FEW} words of one token each, and "
                f"{many} for {_MANY}, so it uses another tokenizer; give the one of its model "
                f"{model!r}"
            )
        overheads[url] = few - _FEW
    (first_url, first), *others = overheads.items()
    for url, overhead in others:
        if overhead != first:
            warn(
                f"{url} adds {overhead} tokens to a prompt, and {first_url} adds {first}; prompts "
                f"have the length of their rows on {first_url} only"
            )
    return first


def _body(endpoint: Endpoint, model: str, prompts: PromptRenderer, words: int) -> bytes:
    key = PromptKey(request_id=f"probe-{words}", input_tokens=words)
    options = {"model": model, "max_tokens": 1}
    return request_body(options, prompts.render(key), chat=endpoint is Endpoint.CHAT)


async def _count(session: aiohttp.ClientSession, url: URL, body: bytes) -> int | None:
    """Return the prompt tokens that a target reports for a request; None if it reports none."""
    headers = {"Content-Type": "application/json"}
    data = b""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async with session.post(
                url, data=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    return None
                while len(data) <= _MAX_BYTES and (piece := await response.content.readany()):
                    data += piece
        return msgspec.json.decode(data, type=_CountedResponse).usage.prompt_tokens
    except (aiohttp.ClientError, OSError, ValueError):  # a time-out is an OSError
        return None
