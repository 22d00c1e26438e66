"""The log-probabilities of a response, sent together with the text of their tokens.

The text of a token can be held back, and a stop string removes text that was not sent yet. The
entry of a token is therefore sent once the first character of the token's text is sent. Tokens
whose text a stop string removed completely have no entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from goodput_engine.openai.logprobs import TokenEntry, chat_logprobs, completion_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.plan import TokenLogprobs
    from goodput_engine.server.output_text import TextSource

__all__ = ["OutputLogprobs"]


class TokenLabels(Protocol):
    """The labels of a tokenizer's tokens; see `goodput_engine.openai.logprobs`."""

    def token_label(self, token_id: int, *, first: bool) -> bytes | str:
        """Return the label of a token; `first` is True at the start of a text."""
        ...


class OutputLogprobs:
    """The log-probabilities of one response.

    It is also the source of the response's text, so that it knows where the text of each token
    begins.

    Args:
        source: the text of the tokens.
        token_ids: ids of the output's tokens, which grow while the model computes.
        logprobs: their log-probabilities.
        labels: tokenizer of the model; None if it has none, so that a token's id is its name.
        chat: True for the chat endpoint.
        count: requested number of most probable tokens.
    """

    def __init__(
        self,
        source: TextSource,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        labels: TokenLabels | None,
        *,
        chat: bool,
        count: int,
    ) -> None:
        self._source = source
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._labels = labels
        self._chat = chat
        self._count = count
        self._starts: list[int] = []  # number of characters before each token
        self._characters = 0
        self._sent_characters = 0
        self._sent_tokens = 0
        self._first = chat  # a completion continues its prompt

    def take(self, start: int, count: int) -> str:
        """Return the text that tokens `start` to `start + count` complete; called in order."""
        pieces: list[str] = []
        for at in range(start, start + count):
            self._starts.append(self._characters)
            pieces.append(self._source.take(at, 1))
            self._characters += len(pieces[-1])
        return "".join(pieces)

    def rest(self) -> str:
        """Return the text that was held back, after the last token."""
        return self._source.rest()

    def send(self, text: str, *, complete: bool) -> list[TokenEntry]:
        """Return the entries to send with a text.

        Args:
            text: the next text of the response.
            complete: True if the output has ended without a stop string.
        """
        self._sent_characters += len(text)
        entries: list[TokenEntry] = []
        everything = complete or self._labels is None
        while self._sent_tokens < len(self._starts):
            at = self._sent_tokens
            if not (everything or self._starts[at] < self._sent_characters):
                break
            token = self._logprobs[at]
            top = zip(token.top_ids, token.top_logprobs, strict=True)
            entries.append(
                TokenEntry(
                    self._label(self._token_ids[at]),
                    token.logprob,
                    [(self._label(token_id), logprob) for token_id, logprob in top],
                    self._starts[at],
                )
            )
            self._first = self._first and isinstance(entries[-1].label, str)
            self._sent_tokens += 1
        return entries

    def encode_all(self, text: str, *, complete: bool) -> bytes:
        """Return `logprobs` of a choice with all of its text; see `send`."""
        return self.encode(self.send(text, complete=complete))

    def encode(self, entries: list[TokenEntry]) -> bytes:
        """Return `logprobs` of a choice, as JSON."""
        form = (
            chat_logprobs(entries)
            if self._chat
            else completion_logprobs(entries, count=self._count)
        )
        return msgspec.json.encode(form)

    def _label(self, token_id: int) -> bytes | str:
        if self._labels is None:
            return f"token_id:{token_id}"
        return self._labels.token_label(token_id, first=self._first)
