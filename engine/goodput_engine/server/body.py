"""The bodies of OpenAI's completion endpoints, as this engine accepts them.

Three kinds of fields: those that this engine obeys; those that only steer sampling or the
caller's bookkeeping, which are accepted; and those that would change the answer and cannot be
done, which are refused by name unless they ask for nothing. A field that OpenAI does not have
is refused too: a typo must not be silently ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from goodput_engine.server.refusals import bad_request

__all__ = ["ChatBody", "CompletionBody", "Message", "StreamOptions", "TextPart", "decode_body"]

MAX_TOKENS: Final = 1_048_576
_MAX_STOPS: Final = 16
_MAX_STOP_CHARACTERS: Final = 256

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints share; a null is as good as an absent field."""

    # Obeyed.
    model: str
    max_tokens: _Tokens | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stop: Annotated[list[_Stop], msgspec.Meta(max_length=_MAX_STOPS)] | _Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    slo_class: str | None = None

    # Accepted: an emulated device does not sample, and the rest is for the caller's books.
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: _Share | None = None
    top_k: int | None = None
    min_p: _Share | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    user: str | None = None

    # Refused unless they ask for nothing; `_NOTHING` says what that is.
    n: Any = None
    logprobs: Any = None
    logit_bias: Any = None
    stop_token_ids: Any = None


class CompletionBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    # Text or token ids: told apart by its first byte, so that ids decode as a typed list.
    prompt: msgspec.Raw

    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a message's content; images, audio and files are not built."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] = ""

    # What an assistant's answer carries when a client sends it back; refused unless empty.
    name: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: _Tokens | None = None

    # Accepted.
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    # Refused unless they ask for nothing.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    verbosity: Any = None
    web_search_options: Any = None


# The values, beside null, with which a field asks for what this engine does anyway.
_COMMON_NOTHING: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "stop_token_ids": ([],),
}
_NOTHING: Final[dict[type, dict[str, tuple[object, ...]]]] = {
    CompletionBody: {**_COMMON_NOTHING, "best_of": (1,), "echo": (False,), "suffix": ("",)},
    ChatBody: {
        **_COMMON_NOTHING,
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "store": (False,),
        "tool_choice": ("none",),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
    Message: {
        "name": (),
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "tool_calls": ([],),
    },
}
_PATH: Final = re.compile(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(.*)`")

B = TypeVar("B", CompletionBody, ChatBody)


def decode_body(data: bytes | bytearray, decoder: msgspec.json.Decoder[B]) -> B:
    """A request's body.

    Raises:
        Refusal: 400, naming the field, for what is not JSON, has a wrong type or an unknown
            field, or asks for what this engine cannot do.
    """
    try:
        body = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    _refuse_unsupported(body, "")
    if isinstance(body, ChatBody):
        for index, message in enumerate(body.messages):
            _refuse_unsupported(message, f"messages[{index}].")
    return body


def _refuse_unsupported(value: CompletionBody | ChatBody | Message, path: str) -> None:
    for field, nothing in _NOTHING[type(value)].items():
        asked = getattr(value, field)
        # `True == 1` in Python, but not in what a client asks for.
        if asked is None or any(asked == none and type(asked) is type(none) for none in nothing):
            continue
        instead = f"; leave it out or send {_shown(nothing[0])}" if nothing else "; leave it out"
        raise bad_request(f"{path}{field} is not supported by this engine{instead}", path + field)


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _explained(error: str) -> Exception:
    """The sentence of msgspec with the field first: `max_tokens: expected `int`, got `str``."""
    match = _PATH.fullmatch(error)
    assert match is not None
    problem, path = match[1], match[2] or ""
    if unknown := _UNKNOWN.fullmatch(problem):
        name = unknown[1][:100]
        field = f"{path}.{name}" if path else name
        return bad_request(f"{field} is not a field of this endpoint; remove it", field)
    if missing := _MISSING.fullmatch(problem):
        field = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"{field} is required", field)
    if not path:
        return bad_request(f"the body must be a JSON object: {_lower(problem)}")
    return bad_request(f"{path}: {_lower(problem)}", path)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
