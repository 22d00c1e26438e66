"""The stream of one response: output events, their times, and the token count at the end.

Servers deviate from OpenAI's API in many ways. What a deviation means for the token count is
decided in `goodput_core.slo.conformance`; this module reports what the server sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from goodput_core.slo.conformance import Deviation, TokenCount, count_tokens
from goodput_core.units import NS_PER_US
from goodput_engine.openai.errors import (
    is_failure,
    is_known_reason,
    is_overload,
    read_error,
    reported_status,
)
from goodput_engine.openai.sse import SSEReader, without_nan
from goodput_replay.sending.client.chunks import (
    DONE,
    CompletionChunk,
    MalformedChunkError,
    decode_chunk,
    decode_usage,
    error_sentence,
    has_empty_text,
    has_output,
)

__all__ = ["ResponseReader"]

_AT_LIMIT: Final = "length"


class ResponseReader:
    """Output and times of a response so far. Times are on the monotonic clock."""

    __slots__ = (
        "_final_ns",
        "cached_tokens",
        "deviations",
        "done",
        "end_ns",
        "ended",
        "events",
        "failure",
        "finish_reason",
        "first_ns",
        "gaps_us",
        "last_ns",
        "overloaded",
        "parser",
        "prompt_tokens",
        "reported_status",
        "usage_tokens",
    )

    def __init__(self) -> None:
        self.parser = SSEReader()
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.end_ns: int | None = None
        self.gaps_us: list[int] = []
        self.events = 0
        self._final_ns: int | None = None  # time of a last event with an empty text
        self.usage_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False
        self.ended = False  # the body ended where its length or its last chunk says
        self.failure: str | None = None
        self.overloaded = False
        self.reported_status: int | None = None
        self.deviations: tuple[Deviation, ...] = ()

    @property
    def complete(self) -> bool:
        """True if the whole output arrived: the stream had a finish reason or [DONE]."""
        return self.failure is None and (self.done or self.finish_reason is not None)

    def take(self, data: bytes, now_ns: int) -> None:
        """Count the events in a piece of the stream that was received at `now_ns`."""
        if self.done:
            return
        parser = self.parser
        for event in parser.feed(data):
            if self.done or self.failure is not None:
                break
            if event == DONE:
                self.done = True
                self.end_ns = now_ns
            else:
                self._take_event(event, now_ns)
        if parser.error is not None and self.failure is None:
            self.fail(parser.error)

    def end(self, now_ns: int) -> None:
        """Count the last event if the stream ended at `now_ns` without the blank line after it."""
        if self.done:
            return
        for event in self.parser.flush():
            self._take_event(event, now_ns)
        if self.parser.error is not None:
            self.fail(self.parser.error)

    def fail(self, event: bytes, failure: str = "") -> None:
        """Note that the server reported an error in a response with status 200.

        Args:
            event: the event or the body with the error.
            failure: text of the failure; empty to quote the error's message.
        """
        error = read_error(event)
        if error is None:
            error = event
        message = error_sentence(event if error == event else b'{"error":%b}' % error)
        self.failure = failure or f"the stream reported: {message or 'an error'}"
        self.overloaded = is_overload(error)
        if not self.events and not self.overloaded:
            self.reported_status = reported_status(error)
        self.deviations = (Deviation.ERROR_IN_STREAM,)

    def _take_event(self, event: bytes, now_ns: int) -> None:
        try:
            chunk = decode_chunk(event)
        except MalformedChunkError:
            if not self._take_other(event, now_ns):
                raise
            return
        choices = chunk.choices
        if (b'"error' in event or choices is None) and read_error(event) is not None:
            self.fail(event)
            return
        is_last = False
        for choice in choices or ():
            if choice.finish_reason:
                is_last = True
                self.finish_reason = choice.finish_reason
                self.end_ns = now_ns
                if not is_known_reason(choice.finish_reason):
                    self.fail(event, f"the stream ended with {choice.finish_reason!r}")
                    if not is_failure(choice.finish_reason):
                        self.deviations = (Deviation.UNKNOWN_FINISH_REASON,)
        if choices and any(map(has_output, choices)):
            self._token(now_ns)
        elif choices and self.last_ns is not None and any(map(has_empty_text, choices)):
            if is_last:
                self._final_ns = now_ns
            else:
                self._token(now_ns)
        self._take_usage(chunk)

    def _token(self, now_ns: int) -> None:
        if self.last_ns is None:
            self.first_ns = now_ns
        else:
            self.gaps_us.append((now_ns - self.last_ns) // NS_PER_US)
        self.last_ns = now_ns
        if self.end_ns is not None:  # some servers send a token after the finish reason
            self.end_ns = max(self.end_ns, now_ns)
        self.events += 1

    def _take_usage(self, chunk: CompletionChunk) -> None:
        if chunk.has_usage:
            usage = decode_usage(chunk.usage)
            if usage.completion_tokens is not None:
                self.usage_tokens = usage.completion_tokens
                # An event with a finish reason and an empty text is the last token, or none.
                final_ns, self._final_ns = self._final_ns, None
                if final_ns is not None and self.usage_tokens == self.events + 1:
                    self._token(max(final_ns, self.last_ns or 0))
            if usage.prompt_tokens is not None:
                self.prompt_tokens = usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _take_other(self, event: bytes, now_ns: int) -> bool:
        """Return True if an event that is no chunk is understood."""
        valid = without_nan(event)
        if valid is not None:
            self._take_event(valid, now_ns)
            return True
        # Some servers pad [DONE], or keep connections alive with events without data.
        text = event.strip()
        if text == DONE:
            self.done = True
            self.end_ns = now_ns
        return not text or self.done

    def count(self, *, limit: int | None, pinned: bool, complete: bool) -> TokenCount:
        """Return the number of output tokens, and all deviations of the response.

        Args:
            limit: maximum number of output tokens in the request; None if there was none.
            pinned: True if the output must have exactly `limit` tokens.
            complete: True if the response ended without a failure.
        """
        if complete or (self.ended and self.failure is None):
            count = count_tokens(
                self.events,
                self.usage_tokens,
                limit=limit,
                pinned=pinned,
                at_limit=self.finish_reason == _AT_LIMIT,
                finished=self.finish_reason is not None,
            )
            if complete:
                return count
            if limit is not None and count.tokens >= limit:
                # All tokens arrived, but neither a finish reason nor [DONE].
                deviations = (Deviation.NO_FINISH_REASON, *count.deviations)
                return replace(count, deviations=deviations)
        tokens = self.events if self.usage_tokens is None else self.usage_tokens
        return TokenCount(tokens=tokens, most_tokens=tokens, deviations=self.deviations)
