"""Bodies of OpenAI's completion endpoints: decoding of requests, encoding of responses.

A known request field is honoured, accepted without effect, or rejected. A field is accepted without
effect if it serves the caller's bookkeeping, or only affects sampling and the device is emulated.
It is rejected, with an error that names it, if it would change the response and is not implemented.
Unknown fields are rejected too, so that a typo is not silently ignored.

Unused fields are not decoded, because decoding arbitrary JSON takes up to thirty times the memory
of its text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import msgspec

from goodput_engine.openai.encoding import require_utf8
from goodput_engine.openai.errors import APIError, bad_request
from goodput_engine.openai.unsupported import (
    NEUTRAL_FOR_CHATS,
    NEUTRAL_FOR_COMPLETIONS,
    NEUTRAL_FOR_MESSAGES,
    NEUTRAL_FOR_STREAMS,
    OF_REAL_MODELS,
    reject_unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CHAT_BODY",
    "COMPLETION_BODY",
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "StreamOptions",
    "TextPart",
    "decode_body",
    "decode_field",
    "read_stops",
    "request_body",
    "response_body",
    "tool_call_object",
    "usage_object",
]

MAX_TOKENS: Final = 1_048_576
MAX_STOP_TOKEN_IDS: Final = 128
_MAX_STOPS: Final = 16
_MAX_STOP_CHARACTERS: Final = 256
_MAX_STOP_BYTES: Final = 64 << 10
_MAX_METADATA_BYTES: Final = 64 << 10
# A larger body is checked for its number of JSON objects and lists before it is decoded.
_UNCHECKED_BYTES: Final = 1 << 20
_MAX_CONTAINERS: Final = 65_536
_SLICE_BYTES: Final = 1 << 18
_QUOTE: Final = ord('"')

_ABSENT: Final = msgspec.Raw()

TokenLimit = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
# A quotient by a smaller penalty could be infinite in single precision.
RepetitionPenalty = Annotated[float, msgspec.Meta(ge=0.01, le=100)]
_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: msgspec.Raw = _ABSENT  # rejected, except for false


class _CommonBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both endpoints; null means absent."""

    # Honoured.
    model: str
    max_tokens: TokenLimit | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stop: msgspec.Raw = _ABSENT  # decoded by `read_stops`
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    slo_class: str | None = None
    return_token_ids: bool | None = None

    # Sampling: honoured by a real model, accepted without effect by an emulated device.
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None

    # Honoured by a real model, rejected by an emulated device except for neutral values.
    logit_bias: msgspec.Raw = _ABSENT
    logprobs: msgspec.Raw = _ABSENT
    stop_token_ids: msgspec.Raw = _ABSENT
    response_format: msgspec.Raw = _ABSENT  # decoded by `read_grammar`

    # Accepted without effect.
    user: str | None = None

    # Rejected, except for neutral values.
    n: msgspec.Raw = _ABSENT
    add_special_tokens: msgspec.Raw = _ABSENT
    allowed_token_ids: msgspec.Raw = _ABSENT
    bad_words: msgspec.Raw = _ABSENT
    echo: msgspec.Raw = _ABSENT
    include_stop_str_in_output: msgspec.Raw = _ABSENT
    length_penalty: msgspec.Raw = _ABSENT
    priority: msgspec.Raw = _ABSENT
    prompt_logprobs: msgspec.Raw = _ABSENT
    return_tokens_as_token_ids: msgspec.Raw = _ABSENT
    skip_special_tokens: msgspec.Raw = _ABSENT
    spaces_between_special_tokens: msgspec.Raw = _ABSENT
    structured_outputs: msgspec.Raw = _ABSENT
    truncate_prompt_tokens: msgspec.Raw = _ABSENT
    use_beam_search: msgspec.Raw = _ABSENT


class CompletionBody(_CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    # Decoded later, as text or as token ids depending on its first byte.
    prompt: msgspec.Raw

    best_of: msgspec.Raw = _ABSENT
    suffix: msgspec.Raw = _ABSENT


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One text part of a message's content; images, audio and files are not implemented."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    # Honoured by a real model.
    tool_call_id: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    tool_calls: msgspec.Raw = _ABSENT  # decoded by `read_messages`

    # Optional message fields, mostly of assistant messages that a client sends back; rejected
    # unless empty.
    name: msgspec.Raw = _ABSENT
    refusal: msgspec.Raw = _ABSENT
    annotations: msgspec.Raw = _ABSENT
    audio: msgspec.Raw = _ABSENT
    function_call: msgspec.Raw = _ABSENT

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


class ChatBody(_CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: TokenLimit | None = None

    # Accepted without effect.
    metadata: msgspec.Raw = _ABSENT  # checked by `_check_metadata`
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    # Honoured by a real model.
    tool_choice: msgspec.Raw = _ABSENT  # decoded by `read_tools`
    tools: msgspec.Raw = _ABSENT
    top_logprobs: msgspec.Raw = _ABSENT

    # Rejected, except for neutral values.
    add_generation_prompt: msgspec.Raw = _ABSENT
    audio: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    continue_final_message: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT
    function_call: msgspec.Raw = _ABSENT
    functions: msgspec.Raw = _ABSENT
    modalities: msgspec.Raw = _ABSENT
    moderation: msgspec.Raw = _ABSENT
    prediction: msgspec.Raw = _ABSENT
    prompt_cache_options: msgspec.Raw = _ABSENT
    prompt_cache_retention: msgspec.Raw = _ABSENT
    reasoning_effort: msgspec.Raw = _ABSENT
    service_tier: msgspec.Raw = _ABSENT
    store: msgspec.Raw = _ABSENT
    verbosity: msgspec.Raw = _ABSENT
    web_search_options: msgspec.Raw = _ABSENT


_NUMBER: Final = re.compile(rb'"(\w{1,40})"[ \t\r\n]*:[ \t\r\n]*(-?(?:NaN|Infinity))')
_MALFORMED: Final = re.compile(r".*\(byte (\d+)\)")
_PATH: Final = re.compile(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_ENUM: Final = re.compile(r"Invalid (?:enum )?value ('.*')", re.DOTALL)
_INDEX: Final = re.compile(r"\[[0-9]+\]")
_CHOICES: Final = {
    "messages.role": "; send system, developer, user, assistant or tool",
    "messages.content.type": "; send text",
    "messages.tool_calls.type": "; send function",
    "response_format.type": "; send text, json_object or json_schema",
    "tools.type": "; send function",
}
"""Remedies for fields with few values; msgspec does not name the values."""
_MISSING: Final = re.compile(r"Object missing required field `(.*)`")

_CONTAINERS: Final = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?|[\[{]', re.DOTALL)
_STOPS: Final = msgspec.json.Decoder(
    Annotated[list[_Stop], msgspec.Meta(max_length=_MAX_STOPS)] | _Stop | None
)
_METADATA: Final = msgspec.json.Decoder(dict[str, str] | None)
COMPLETION_BODY: Final = msgspec.json.Decoder(CompletionBody)
CHAT_BODY: Final = msgspec.json.Decoder(ChatBody)

B = TypeVar("B", CompletionBody, ChatBody)
T = TypeVar("T")


def decode_body(data: bytes, decoder: msgspec.json.Decoder[B], *, computes: bool = False) -> B:
    """Decode a request's body.

    Args:
        data: the body.
        decoder: `COMPLETION_BODY` or `CHAT_BODY`.
        computes: True if the engine computes a real model, so that it honours more fields.

    Raises:
        APIError: 400 for a body that is not UTF-8 or not JSON, has a wrong type or an unknown
            field, or requests an unsupported feature; the error names the field.
    """
    _check_containers(data)
    require_utf8(data)
    try:
        body = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _decode_error(str(error)) from error
    except (ValueError, RecursionError) as error:
        _reject_not_a_number(data, str(error))
        raise bad_request(f"the body is not JSON: {error}") from error
    honoured = OF_REAL_MODELS if computes else frozenset()
    if body.stream_options is not None:
        reject_unsupported(body.stream_options, NEUTRAL_FOR_STREAMS, path="stream_options.")
    if isinstance(body, CompletionBody):
        reject_unsupported(body, NEUTRAL_FOR_COMPLETIONS, honoured=honoured)
    if isinstance(body, ChatBody):
        reject_unsupported(body, NEUTRAL_FOR_CHATS, honoured=honoured)
        _check_metadata(body.metadata)
        for index, message in enumerate(body.messages):
            path = f"messages[{index}]."
            reject_unsupported(message, NEUTRAL_FOR_MESSAGES, path=path, honoured=honoured)
            if not computes:
                _reject_tool_message(message, path)
    return body


def read_stops(body: CompletionBody | ChatBody) -> tuple[str, ...]:
    """Return the stop strings of a request.

    Raises:
        APIError: 400 if `stop` is neither a string nor a list of strings, or too long.
    """
    if len(body.stop) > _MAX_STOP_BYTES:
        raise bad_request(f"stop is longer than {_MAX_STOP_BYTES >> 10} KiB", "stop")
    if not len(body.stop):
        return ()
    stops = decode_field(body.stop, _STOPS, "stop")
    return (stops,) if isinstance(stops, str) else tuple(stops or ())


def request_body(options: dict[str, Any], prompt: bytes, *, chat: bool) -> bytes:
    """Return the body of a request.

    Args:
        options: every field except the prompt.
        prompt: the prompt of a completion, or the content of a chat's only user message, as JSON.
        chat: True for the chat endpoint.
    """
    head = msgspec.json.encode(options)[:-1]
    if chat:
        return b'%s,"messages":[{"role":"user","content":%s}]}' % (head, prompt)
    return b'%s,"prompt":%s}' % (head, prompt)


def response_body(
    text: str,
    *,
    chat: bool,
    completion_id: str,
    created: int,
    model: str,
    finish_reason: str,
    usage: dict[str, Any],
    token_ids: Sequence[int] | None = None,
    logprobs: bytes = b"null",
    tool_calls: Sequence[dict[str, Any]] = (),
) -> bytes:
    """Return the body of a response that is not streamed.

    Args:
        text: the output.
        chat: True for the chat endpoint.
        completion_id: the response's `id`.
        created: Unix seconds.
        model: the served name.
        finish_reason: the finish reason.
        usage: see `usage_object`.
        token_ids: ids of the output's tokens; None to send no ids.
        logprobs: their log-probabilities, as JSON.
        tool_calls: calls of tools in a chat; see `tool_call_object`.
    """
    content: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text, "refusal": None}}
        if chat
        else {"text": text}
    )
    if tool_calls:
        content["message"] |= {"content": text or None, "tool_calls": tool_calls}
    if token_ids is not None:
        content["token_ids"] = token_ids
    choice = {
        "index": 0,
        **content,
        "logprobs": msgspec.Raw(logprobs),
        "finish_reason": finish_reason,
    }
    return msgspec.json.encode(
        {
            "id": completion_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": model,
            "choices": [choice],
            "usage": usage,
        }
    )


def tool_call_object(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return OpenAI's form of a call of a tool; the arguments are a JSON object as a text."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def usage_object(*, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Return OpenAI's `usage`."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _check_containers(data: bytes) -> None:
    """Reject a body whose decoding would take many times the memory of the body.

    The body is scanned in slices or match by match, so that other threads can run in between.
    """
    if len(data) <= _UNCHECKED_BYTES:
        return
    count = 0
    for at in range(0, len(data), _SLICE_BYTES):
        end = at + _SLICE_BYTES
        count += data.count(b"{", at, end) + data.count(b"[", at, end)
        if count > _MAX_CONTAINERS:
            break
    else:
        return
    # Count again without the brackets inside strings.
    count = 0
    for match in _CONTAINERS.finditer(data):
        count += data[match.start()] != _QUOTE
        if count > _MAX_CONTAINERS:
            raise bad_request(f"the body has more than {_MAX_CONTAINERS} objects and lists")


def _reject_tool_message(message: ChatMessage, path: str) -> None:
    """Reject messages that only the chat template of a real model can write."""
    if message.role == "tool":
        field = f"{path}role"
        raise bad_request(f"{field} tool is not supported by an emulated device", field)
    if message.content is None:
        raise bad_request(f"{path}content is absent or null; send a text", f"{path}content")


def _check_metadata(raw: msgspec.Raw) -> None:
    if len(raw) > _MAX_METADATA_BYTES:
        raise bad_request(f"metadata is longer than {_MAX_METADATA_BYTES >> 10} KiB", "metadata")
    if len(raw):
        decode_field(raw, _METADATA, "metadata")


def decode_field(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], field: str) -> T:
    """Decode a field that was kept as JSON.

    Raises:
        APIError: 400 if the value has another type.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _decode_error(str(error), field) from error
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{field} is not JSON: {error}", field) from error


def _reject_not_a_number(data: bytes, error: str) -> None:
    """Name the field if the body is not JSON because of NaN or an infinite number."""
    if (malformed := _MALFORMED.fullmatch(error)) is None:
        return
    at = int(malformed[1])
    start = max(0, at - 100)
    for match in _NUMBER.finditer(data, start, at + len(b"-Infinity")):
        if match.start(2) <= at <= match.end(2):
            field = match[1].decode()
            raise bad_request(f"{field} is {match[2].decode()}, but must be a finite number", field)


def _decode_error(error: str, field: str = "") -> APIError:
    """Return the 400 for a msgspec error; its message begins with the field's path.

    Args:
        error: msgspec's message, such as "Expected `int`, got `str` - at `$.max_tokens`".
        field: the path of the decoded value; empty for the whole body.
    """
    match = _PATH.fullmatch(error)
    assert match is not None, "every part of the pattern is optional"
    # msgspec writes [...] for any key or value of an object.
    problem, path = match[1], (match[2] or "").removeprefix("[...]")
    path = f"{field}.{path}" if field and path[:1] not in {"", "["} else field + path
    if unknown := _UNKNOWN.fullmatch(problem):
        name = unknown[1][:100]
        name = f"{path}.{name}" if path else name
        return bad_request(f"{name} is not a field of this endpoint; remove it", name)
    if missing := _MISSING.fullmatch(problem):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"{name} is required", name)
    if value := _ENUM.fullmatch(problem):
        expected = _CHOICES.get(_INDEX.sub("", path), "")
        return bad_request(f"{path} is {value[1][:100]}, which is not supported{expected}", path)
    if not path:
        return bad_request(f"the body must be a JSON object: {_lower(problem)}")
    return bad_request(f"{path}: {_lower(problem)}", path)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
