"""The text of a response: built token by token, ended by stop strings.

The text that a token adds depends on the tokens before it, and text that may be the beginning of a
stop string is held back. A token therefore counts when it is taken, whether or not it adds text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from goodput_engine.text.stop_matcher import StopMatcher
from goodput_engine.tokens import answer_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.text.detokenizer import Detokenizer

__all__ = ["CompletionText", "EmulatedText", "ModelText", "NoText", "TextSource"]


class TextSource(Protocol):
    """The text of an output, token by token."""

    def take(self, start: int, count: int) -> str:
        """Return the text that tokens `start` to `start + count` complete; called in order."""
        ...

    def rest(self) -> str:
        """Return the text that was held back, after the last token."""
        ...


class EmulatedText:
    """The text of an emulated device."""

    def take(self, start: int, count: int) -> str:
        """Return one word for each token."""
        return answer_text(start, count)

    def rest(self) -> str:
        """Return an empty text, because a word is never held back."""
        return ""


class ModelText:
    """The text of a real model.

    Args:
        detokenizer: converts the tokens of this output.
        token_ids: their ids, which grow while the model computes.
    """

    def __init__(self, detokenizer: Detokenizer, token_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        self._token_ids = token_ids

    def take(self, start: int, count: int) -> str:
        """Return the characters that the tokens complete."""
        return self._detokenizer.push(self._token_ids[start : start + count])

    def rest(self) -> str:
        """Return the replacement of an incomplete character."""
        return self._detokenizer.finish()


class NoText:
    """The text of a model without a tokenizer, which is empty."""

    def take(self, start: int, count: int) -> str:  # noqa: ARG002 - part of the protocol
        """Return an empty text."""
        return ""

    def rest(self) -> str:
        """Return an empty text."""
        return ""


class CompletionText:
    """The text of one response, built as its tokens are taken.

    Args:
        source: the text of the tokens.
        stops: stop strings.
        min_tokens: no stop string ends the text before this many tokens.

    Attributes:
        tokens: number of tokens taken so far; none is taken after the token that completed a stop
            string.
        stopped: True if a stop string was found.
    """

    __slots__ = ("_matcher", "_min_tokens", "_source", "stopped", "tokens")

    def __init__(self, source: TextSource, stops: Sequence[str], *, min_tokens: int) -> None:
        self.tokens = 0
        self._source = source
        self.stopped = False
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens

    def take(self, count: int, *, last: bool) -> str:
        """Return the text of the next tokens that may be sent.

        Args:
            count: number of tokens to take.
            last: True if these are the last tokens, so that no text is held back.
        """
        matcher = self._matcher
        if matcher is None:
            text = self._source.take(self.tokens, count)
            self.tokens += count
            return text + self._source.rest() if last else text
        pieces: list[str] = []
        for _ in range(count):
            piece = self._source.take(self.tokens, 1)
            self.tokens += 1
            if self.tokens <= self._min_tokens:
                pieces.append(piece)
                continue
            text, self.stopped = matcher.feed(piece)
            pieces.append(text)
            if self.stopped:
                return "".join(pieces)
        if last:
            text, self.stopped = matcher.feed(self._source.rest())
            pieces += (text, matcher.rest())
        return "".join(pieces)
