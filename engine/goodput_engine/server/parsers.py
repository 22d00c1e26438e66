"""The threads of an HTTP process for work that would delay its event loop.

A chat of a real model waits for the process of its chat template, and a hostile template makes each
chat wait for seconds. Chats therefore have threads of their own. Long bodies of either kind take
long to tokenize, so that short requests do not wait for long ones. The log-probabilities of a whole
response take up to a fifth of a millisecond for each token.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AsyncExitStack, ExitStack

__all__ = ["Parsers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """One thread for each kind of work.

    Args:
        texts: parses completions whose texts are neither long nor a few words.
        long_bodies: parses long bodies, and compiles schemas.
        chats: parses short chats that have a chat template.
        long_chats: parses long ones.
        logprobs: encodes the log-probabilities of whole responses.
    """

    texts: Executor
    long_bodies: Executor
    chats: Executor
    long_chats: Executor
    logprobs: Executor

    @classmethod
    def start(cls, stack: ExitStack | AsyncExitStack) -> Parsers:
        """Return executors that end with the stack."""

        def thread(name: str) -> Executor:
            return stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=name))

        return cls(
            texts=thread("texts"),
            long_bodies=thread("long-bodies"),
            chats=thread("chats"),
            long_chats=thread("long-chats"),
            logprobs=thread("logprobs"),
        )
