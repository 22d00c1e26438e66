"""Outputs that follow a grammar: the tokens that each may continue with.

A grammar is compiled in a thread, while the prompt is computed. Its state advances with the sampled
tokens alone, so it survives preemption, and does not depend on other requests or on chunks.

An exception of llguidance fails the request with the grammar. The other requests of the step
continue.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from llguidance import LLExecutor, LLTokenizer
from llguidance.numpy import (
    allocate_token_bitmask,
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
)

from goodput_engine.grammars import compile_grammar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from llguidance import LLMatcher

__all__ = ["Grammars", "OutputGrammar"]

_WORD_BITS: Final = 32
_MAX_DETAIL: Final = 200


class OutputGrammar:
    """The state of one output.

    Args:
        compiled: the state before the first token, which may not be ready yet.
        stop_ids: ids of the model's tokens that end an output.
    """

    def __init__(self, compiled: Future[LLMatcher], stop_ids: frozenset[int]) -> None:
        self._compiled = compiled
        self._stuck = False
        self._failure = ""
        self.stop_ids = stop_ids

    @property
    def matcher(self) -> LLMatcher | None:
        """The state, once it is compiled; None if it could not be compiled."""
        error = self._compiled.exception()
        if error is None:
            return self._compiled.result()
        self._failure = _describe(error)
        return None

    @contextmanager
    def failing_alone(self) -> Iterator[None]:
        """Let an exception become the problem of this output, instead of that of the step."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of llguidance is no Exception
            self._failure = _describe(error)

    def problem(self) -> str | None:
        """Return the reason why the output cannot continue; None if it can."""
        problem = ""
        with self.failing_alone():
            matcher = self.matcher
            problem = "" if matcher is None else matcher.get_error()
        problem = self._failure or problem
        if not problem and self._stuck:
            return "the model has no token that the schema permits"
        # The name of llguidance for a grammar without any text, such as one that only names itself.
        if problem.startswith("NoExtension"):
            return "no text matches the schema"
        return " ".join(problem.split())[:_MAX_DETAIL] or None

    def append(self, token_id: int) -> bool:
        """Advance by a sampled token; return True if the output is complete."""
        if token_id in self.stop_ids:
            return True
        is_complete = False
        with self.failing_alone():
            if (matcher := self.matcher) is not None:
                matcher.consume_token(token_id)
                is_complete = bool(matcher.is_stopped()) and not matcher.is_error()
        return is_complete

    def restrict(self, words: np.ndarray, banned: Collection[int], *, may_stop: bool) -> None:
        """Change the mask of the grammar by the rules of the request.

        Args:
            words: bits of the permitted tokens, int32; changed in place.
            banned: ids that must not be sampled, unless nothing else is left.
            may_stop: False if the output must continue as long as the grammar permits.
        """
        is_accepting = False
        with self.failing_alone():
            is_accepting = (matcher := self.matcher) is not None and bool(matcher.is_accepting())
        _set_bits(words, self.stop_ids, on=False)
        continues = words.copy()
        _set_bits(continues, banned, on=False)
        if continues.any():
            words[:] = continues
            if may_stop and is_accepting:
                _set_bits(words, self.stop_ids, on=True)
        elif is_accepting:
            _set_bits(words, self.stop_ids, on=True)
        elif not words.any():
            self._stuck = True
            words[:] = -1  # the sampled token is not used


class Grammars:
    """Compiles the grammars of requests for one model.

    Args:
        tokenizer_file: the model's `tokenizer.json`.
        vocab_size: number of logits.
        stop_ids: ids of the tokens that end an output.
    """

    def __init__(self, tokenizer_file: Path, *, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._tokenizer: Future[LLTokenizer] = self._pool.submit(self._load)
        self._masks = LLExecutor(torch.get_num_threads())

    def problem(self) -> str:
        """Return the reason why no output can follow a grammar; empty if outputs can.

        Wait until the tokenizer is loaded, which takes up to a second for a large one.
        """
        error = self._tokenizer.exception()
        return "" if error is None else _describe(error)

    def start(self, grammar: str) -> OutputGrammar:
        """Begin to compile the grammar of a new request."""
        return OutputGrammar(self._pool.submit(self._compile, grammar), self._stop_ids)

    def masks(self, grammars: Sequence[OutputGrammar]) -> np.ndarray:
        """Return the bits of the tokens that each grammar permits, `[num_grammars, num_words]`.

        A grammar that fails permits no token.
        """
        size = self._vocab_size
        if self._tokenizer.exception() is None:
            size = self._tokenizer.result().vocab_size
        bits: np.ndarray = allocate_token_bitmask(len(grammars), size)
        bits[:] = 0
        matchers = [
            (matcher, at) for at, one in enumerate(grammars) if (matcher := one.matcher) is not None
        ]
        try:
            fill_next_token_bitmask_par(self._masks, matchers, bits)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 - a panic of llguidance is no Exception
            for matcher, at in matchers:
                with grammars[at].failing_alone():
                    fill_next_token_bitmask(matcher, bits, at)
        return bits

    def _load(self) -> LLTokenizer:
        text = self._file.read_text(encoding="utf-8")
        stop_ids = sorted(self._stop_ids) or None
        try:
            # The logits often have more rows than the tokenizer has tokens.
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=stop_ids)
        except ValueError:
            return LLTokenizer(text, eos_token=stop_ids)

    def _compile(self, grammar: str) -> LLMatcher:
        problem = self.problem()
        if problem:  # not the same exception again, which would collect the frames of all requests
            raise ValueError(problem)
        return compile_grammar(grammar, self._tokenizer.result())


def _describe(error: BaseException) -> str:
    """Return an error in one line, which is never empty."""
    return " ".join(f"{error}".split())[:_MAX_DETAIL] or type(error).__name__


def _set_bits(words: np.ndarray, ids: Collection[int], *, on: bool) -> None:
    for token_id in ids:
        word, bit = divmod(token_id, _WORD_BITS)
        if word >= len(words):
            continue
        mask = np.uint32(1 << bit).astype(np.int32)
        words[word] = words[word] | mask if on else words[word] & ~mask
