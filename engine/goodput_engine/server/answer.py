"""The text of an answer and the JSON around it, for both endpoints, streamed or whole.

An event is made once per token and request, so what does not change is encoded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from goodput_core.units import NS_PER_MS
from goodput_engine.server.stops import StopMatcher
from goodput_engine.tokens import answer_text

if TYPE_CHECKING:
    from goodput_engine.core_client import RequestStream
    from goodput_engine.server.intake import Call

__all__ = ["DONE", "Answer", "EventForm", "timings", "usage", "whole_body"]

DONE: Final = b"data: [DONE]\n\n"


class Answer:
    """The text of one answer, as far as it was taken.

    Args:
        call: the request.

    Attributes:
        tokens: taken so far; with a stop string, up to the token that completed it.
        stopped: a stop string was found.
    """

    __slots__ = ("_matcher", "_min_tokens", "stopped", "tokens")

    def __init__(self, call: Call) -> None:
        self.tokens = 0
        self.stopped = False
        self._matcher = StopMatcher(call.stops) if call.stops else None
        self._min_tokens = call.min_tokens

    def take(self, count: int, *, last: bool) -> str:
        """The text of the next `count` tokens that may be shown.

        Args:
            count: tokens to take.
            last: the answer ends with them: nothing is held back.
        """
        matcher = self._matcher
        if matcher is None:
            text = answer_text(self.tokens, count)
            self.tokens += count
            return text
        shown: list[str] = []
        for _ in range(count):
            piece = answer_text(self.tokens, 1)
            self.tokens += 1
            if self.tokens <= self._min_tokens:
                shown.append(piece)
                continue
            text, self.stopped = matcher.feed(piece)
            shown.append(text)
            if self.stopped:
                return "".join(shown)
        if last:
            shown.append(matcher.rest())
        return "".join(shown)


class EventForm:
    """Makes the events of one streamed answer.

    Args:
        call: the request.
        answer_id: the answer's `id`.
        created: Unix seconds.
        model: the served name.
    """

    __slots__ = ("_first", "_head", "_key", "_role", "_tail")

    def __init__(self, call: Call, *, answer_id: str, created: int, model: str) -> None:
        kind = "chat.completion.chunk" if call.chat else "text_completion"
        head = msgspec.json.encode(
            {"id": answer_id, "object": kind, "created": created, "model": model}
        )
        self._head = b"data: " + head[:-1]
        end = b"}" if call.chat else b""
        self._key = b'"delta":{' if call.chat else b""
        self._role = b'"role":"assistant",' if call.chat else b""
        self._tail = (
            end
            + b',"logprobs":null,"finish_reason":%b}]'
            + (b',"usage":null' if call.include_usage else b"")
            + b"}\n\n"
        )
        self._first = True

    def event(self, text: str, finish_reason: str | None) -> bytes:
        """One event: some text, and with the last the reason why it ends."""
        name = b'"content":' if self._key else b'"text":'
        role = self._role if self._first else b""
        self._first = False
        return (
            self._head
            + b',"choices":[{"index":0,'
            + self._key
            + role
            + name
            + msgspec.json.encode(text)
            + self._tail % (b'"%b"' % finish_reason.encode() if finish_reason else b"null")
        )

    def usage_event(self, used: dict[str, Any]) -> bytes:
        """The event of `stream_options.include_usage`: no choice, the usage."""
        return self._head + b',"choices":[],"usage":' + msgspec.json.encode(used) + b"}\n\n"


def usage(call: Call, answer: Answer, stream: RequestStream) -> dict[str, Any]:
    """OpenAI's usage object."""
    prompt_tokens = call.submit.input_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": prompt_tokens + answer.tokens,
        "prompt_tokens_details": {"cached_tokens": stream.cached_tokens},
    }


def whole_body(
    call: Call,
    text: str,
    *,
    answer_id: str,
    created: int,
    model: str,
    finish_reason: str,
    used: dict[str, Any],
) -> bytes:
    """The body of an answer that is not streamed."""
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text, "refusal": None}}
        if call.chat
        else {"text": text}
    )
    return msgspec.json.encode(
        {
            "id": answer_id,
            "object": "chat.completion" if call.chat else "text_completion",
            "created": created,
            "model": model,
            "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}],
            "usage": used,
        }
    )


def timings(call: Call, answer: Answer, stream: RequestStream) -> str:
    """The engine's account of a whole answer, as the JSON of `X-Goodput-Timings`.

    Milliseconds from the arrival at this process, on the core's clock: a step's tokens count
    from when the step's results were there. `tpot_ms` is null for a single token.
    """
    arrived, first, last = stream.arrival_ns, stream.first_token_ns, stream.last_token_ns
    gaps = stream.tokens - 1
    return msgspec.json.encode(
        {
            "queue_ms": _ms(stream.first_scheduled_ns - arrived),
            "ttft_ms": _ms(first - arrived),
            "tpot_ms": _ms((last - first) / gaps) if gaps > 0 else None,
            "e2e_ms": _ms(last - arrived),
            "prompt_tokens": call.submit.input_tokens,
            "cached_tokens": stream.cached_tokens,
            "output_tokens": answer.tokens,
        }
    ).decode()


def _ms(ns: float) -> float:
    return round(ns / NS_PER_MS, 3)
