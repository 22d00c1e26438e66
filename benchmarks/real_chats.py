"""Concurrent chats with a real model over HTTP, each compared with the model's own logits.

A service is started with `goodput up` from a manifest with `file://`. All chats are sent to its
router at the same time, and streamed greedily. Afterwards, transformers computes prompt and output
of each chat in one pass, and each token must be the most probable one. Where the two highest logits
differ by less than 1e-4, the order of floating-point operations decides: such a token is a tie.

    make smollm2
    python -m benchmarks.real_chats
    python -m benchmarks.real_chats --quick     # 16 chats
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import yaml

from goodput_core.spec.manifest import parse_manifest, read_manifest_text
from goodput_replay.sending.local_service import running_service

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
TASKS: Final = (
    "What is {}?",
    "Explain {} to a child in one sentence.",
    "Write a short poem about {}.",
    "Name three facts about {}, one for each line, and end with the most surprising one.",
    "Is {} dangerous? Answer yes or no, and then say why.",
    "Translate the words “{}” into French and German.",
    "Write a Python function that returns information about {} as a dictionary.",
    "I know nothing about {}. Where do I begin, which words must I know, and what will it cost?",
    "Continue: once upon a time, {} appeared in a small village, and",
    "Summarize the history of {} in four sentences, for a newspaper of 1900.",
)
TOPICS: Final = (
    "the moon", "bread", "electricity", "a volcano", "chess", "the sea", "an elephant", "music",
    "paper", "the wheel", "a thunderstorm", "gold", "sleep", "a bicycle", "the number seven",
    "coffee", "glass", "a spider", "the alphabet", "snow",
)  # fmt: skip
TIE: Final = 1e-4
TIES_ALLOWED_IN: Final = 10_000
CHATS_OF_A_BATCH: Final = 16
# The service must not reject requests of which all but the first few wait for minutes.
PATIENT: Final = {"X-SLO-TTFT-Ms": "3600000", "X-SLO-TPOT-Ms": "3600000"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RealChat:
    """A chat and its output.

    Args:
        prompt: message of the user.
        token_ids: ids of the streamed output.
        text: streamed text.
        prompt_tokens: length of the prompt in tokens, as the service reports it.
    """

    prompt: str
    token_ids: list[int]
    text: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCheck:
    """Result of the comparison.

    Args:
        tokens: number of compared tokens.
        ties: tokens that are not the most probable ones, after a tie.
        wrong: tokens that are not the most probable ones otherwise.
        other_prompts: chats whose prompt has another length in transformers.
        other_texts: chats whose text is not that of their token ids.
    """

    tokens: int
    ties: int
    wrong: int
    other_prompts: int
    other_texts: int

    @property
    def passed(self) -> bool:
        """True if only ties differ, and at most one token in 10,000: none in fewer tokens."""
        allowed = self.tokens // TIES_ALLOWED_IN
        return not (self.wrong or self.other_prompts or self.other_texts) and self.ties <= allowed


def prompts(count: int) -> list[str]:
    """Return different messages, of which up to 200 exist."""
    return [task.format(topic) for topic, task in islice(product(TOPICS, TASKS), count)]


async def stream_chats(
    url: str, model: str, messages: Sequence[str], tokens: int
) -> list[RealChat]:
    """Send all messages at the same time and return the outputs, of `tokens` tokens each."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        return await asyncio.gather(
            *(_stream_chat(session, model, message, tokens) for message in messages)
        )


async def _stream_chat(
    session: aiohttp.ClientSession, model: str, message: str, tokens: int
) -> RealChat:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": message}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    token_ids: list[int] = []
    text, usage = "", {"prompt_tokens": 0, "completion_tokens": 0}
    async with session.post("/v1/chat/completions", json=body, headers=PATIENT) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = msgspec.json.decode(line.removeprefix(b"data: "))
            for choice in event["choices"]:
                token_ids += choice.get("token_ids") or ()
                text += choice["delta"].get("content") or ""
            usage = event.get("usage") or usage
    if not len(token_ids) == usage["completion_tokens"] == tokens:
        raise SystemExit(f"{len(token_ids)} tokens arrived, not {tokens}: {usage}")
    return RealChat(
        prompt=message, token_ids=token_ids, text=text, prompt_tokens=usage["prompt_tokens"]
    )


def check_chats(folder: Path, chats: Sequence[RealChat]) -> ChatCheck:
    """Compare every token with the logits of transformers, in one pass over each chat.

    Chats of one length share a batch, which needs no padding and a third less time.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ties = wrong = other_prompts = other_texts = 0
    by_length: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}
    for chat in chats:
        messages = [{"role": "user", "content": chat.prompt}]
        prompt: list[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        other_prompts += len(prompt) != chat.prompt_tokens
        expected = tokenizer.decode(chat.token_ids, skip_special_tokens=True)
        other_texts += expected.removesuffix("\N{REPLACEMENT CHARACTER}") != chat.text.removesuffix(
            "\N{REPLACEMENT CHARACTER}"
        )
        lengths = (len(prompt), len(chat.token_ids))
        by_length.setdefault(lengths, []).append((prompt + chat.token_ids[:-1], chat.token_ids))
    for (_, num_tokens), same_length in by_length.items():
        for first in range(0, len(same_length), CHATS_OF_A_BATCH):
            batch = same_length[first : first + CHATS_OF_A_BATCH]
            ids, tokens = (torch.tensor(part) for part in zip(*batch, strict=True))
            with torch.inference_mode():
                logits = model(ids, logits_to_keep=num_tokens).logits
            highest = logits.topk(2).values
            differs = logits.argmax(-1) != tokens
            tied = differs & (highest[..., 0] - highest[..., 1] < TIE)
            ties += int(tied.sum())
            wrong += int((differs & ~tied).sum())
    return ChatCheck(
        tokens=sum(len(chat.token_ids) for chat in chats),
        ties=ties,
        wrong=wrong,
        other_prompts=other_prompts,
        other_texts=other_texts,
    )


async def serve_chats(
    manifest: Path, model: str, count: int, tokens: int
) -> tuple[list[RealChat], float]:
    """Start the service of a manifest, stream chats, and return them with the seconds they took."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        async with running_service(
            manifest,
            device=None,
            log=where / "log",
            decisions=where / "decisions",
            report=print,
        ) as running:
            began = time.monotonic()
            chats = await stream_chats(running.url, model, prompts(count), tokens)
            return chats, time.monotonic() - began


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples/smollm2.yaml")
    parser.add_argument("--chats", type=int, default=200, help="up to 200")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each output")
    parser.add_argument("--quick", action="store_true", help="16 chats")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a text")
    args = parser.parse_args(argv)
    text = read_manifest_text(args.manifest)
    service = parse_manifest(text, source=str(args.manifest), yaml=yaml)
    folder = Path(service.spec.model.name).expanduser()
    if find_spec("torch") is None or not folder.is_dir():
        print("NOT RUN: torch or the model is missing; run `make smollm2`")
        return 0
    count = 16 if args.quick else args.chats
    chats, seconds = asyncio.run(
        serve_chats(args.manifest, service.metadata.name, count, args.tokens)
    )
    began = time.monotonic()
    check = check_chats(folder, chats)
    checked = time.monotonic() - began
    if args.json:
        print(json.dumps(asdict(check) | {"seconds": seconds, "check_seconds": checked}))
    else:
        print(
            f"{count} concurrent chats: {check.tokens:,} tokens in {seconds:.1f} s "
            f"({check.tokens / seconds:.0f} tokens/s), checked in {checked:.1f} s\n"
            f"not the most probable token: {check.wrong}, after a tie: {check.ties}; "
            f"other prompts: {check.other_prompts}, other texts: {check.other_texts}"
        )
    return 0 if check.passed else 1


if __name__ == "__main__":
    sys.exit(main())
