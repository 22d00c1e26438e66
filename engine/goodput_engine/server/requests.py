"""Parsing of a request's bytes and headers into the message for the engine core.

All errors in the content of a request are detected here, before the request is sent to the core.
The code is synchronous and stateless, so a long prompt can be parsed in a thread.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, runtime_checkable

import msgspec

from goodput_core.errors import InputError, InternalError
from goodput_core.placement.blockhash import block_hashes
from goodput_engine.messages import ExecutorInput, SamplingOptions, Submit
from goodput_engine.openai.bodies import (
    CHAT_BODY,
    COMPLETION_BODY,
    ChatBody,
    CompletionBody,
    decode_body,
    read_stops,
)
from goodput_engine.openai.errors import APIError, bad_request, too_long, unavailable
from goodput_engine.openai.headers import ServiceClasses, read_headers
from goodput_engine.openai.response_format import read_grammar
from goodput_engine.openai.sampling_fields import (
    OPENAI_DEFAULTS,
    SamplingDefaults,
    read_sampling,
)
from goodput_engine.openai.tools import read_messages, read_tools
from goodput_engine.scheduler.admission import describe_long_output, describe_long_prompt
from goodput_engine.text.tool_calls import ToolFormat

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["CompletionRequest", "PromptLimits", "PromptTokenizer", "RequestParser"]

_TEXT: Final = msgspec.json.Decoder(str)
_IDS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]])
_WHITE_SPACE: Final = b" \t\r\n"
_SLICE_BYTES: Final = 1 << 18
_NO_TOKENIZER: Final = "the model's folder has no tokenizer"


class PromptTokenizer(Protocol):
    """Converts prompts to token ids; for the arguments, see `goodput_engine.tokens`."""

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        """Return the token ids of a text."""
        ...

    def encode_chat(
        self, messages: Iterable[tuple[str, str]], *, limit: int | None = None
    ) -> list[int]:
        """Return the token ids of a chat, up to the start of the output."""
        ...


@runtime_checkable
class _ToolTokenizer(PromptTokenizer, Protocol):
    """The tokenizer of a real model, whose chats can have tools."""

    tools: ToolFormat | None

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of a chat; see `goodput_engine.text.tokenizer`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A valid request.

    Args:
        chat: True for `/v1/chat/completions`.
        stream: True if the response is sent as server-sent events.
        include_usage: True if the stream ends with the usage.
        stops: strings that end the output.
        min_tokens: no stop string ends the output before this many tokens.
        request_id: the client's identifier; None if it sent none.
        returns_token_ids: True if the response has the ids of the output's tokens.
        tools: form of the calls of tools in the output; None if the request has no tools.
        submit: the message for the core.
    """

    chat: bool
    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    min_tokens: int
    request_id: str | None
    returns_token_ids: bool
    tools: ToolFormat | None = None
    submit: Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """Limits of the device on prompts.

    Args:
        vocab_size: size of the vocabulary; token ids are smaller.
        max_model_tokens: limit of prompt and output tokens together.
        block_size: tokens per KV block.
    """

    vocab_size: int
    max_model_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParser:
    """Validates requests.

    Args:
        model: the served model's name.
        slo: the SLO classes.
        limits: limits of the device.
        computes: True if the core computes a real model, so that it needs token ids.
        tokenizer: tokenizer of the model or the emulated device; None if the model has none.
        defaults: values of the sampling fields that a request leaves out.
        grammar_problem: reason why no output can follow a grammar; empty if outputs can.
    """

    model: str
    slo: ServiceClasses
    limits: PromptLimits
    computes: bool
    tokenizer: PromptTokenizer | None
    defaults: SamplingDefaults = OPENAI_DEFAULTS
    grammar_problem: str = ""

    def parse(
        self,
        data: bytes,
        headers: Mapping[str, str],
        *,
        chat: bool,
        rid: int,
        arrival_ns: int,
    ) -> CompletionRequest:
        """Validate a request.

        Args:
            data: the request's body.
            headers: the request's headers, case-insensitive.
            chat: True for `/v1/chat/completions`.
            rid: the request's number.
            arrival_ns: the request's arrival time.

        Raises:
            APIError: 400 or 404, naming the field or header; 503 if the process of the chat
                template was ended from outside.
        """
        from_headers = read_headers(headers)
        body = (
            decode_body(data, CHAT_BODY, computes=self.computes)
            if chat
            else decode_body(data, COMPLETION_BODY, computes=self.computes)
        )
        self._check_model(body.model)
        max_tokens, limit_field = _read_max_tokens(body)
        min_tokens = body.min_tokens or 0
        if max_tokens is not None and min_tokens > max_tokens:
            raise bad_request(
                f"min_tokens is {min_tokens}, but {limit_field} is {max_tokens}", "min_tokens"
            )
        options = body.stream_options
        if options is not None and not body.stream:
            raise bad_request("stream_options requires stream: true", "stream_options")
        sampling = SamplingOptions()
        if self.computes:
            sampling = read_sampling(
                body,
                defaults=self.defaults,
                vocab_size=self.limits.vocab_size,
                random_seed=secrets.randbits(63),
            )
        elif body.return_token_ids:
            raise bad_request(
                "return_token_ids is not supported by an emulated device, which computes no "
                "tokens; leave it out",
                "return_token_ids",
            )
        grammar = read_grammar(body) if self.computes else ""
        if grammar:
            self._require_grammars()
        stops = read_stops(body)
        if stops and self.tokenizer is None:
            raise bad_request(f"stop needs text, and {_NO_TOKENIZER}; leave it out", "stop")
        slo = self.slo.resolve(
            from_headers.targets,
            header=from_headers.slo_class,
            body=body.slo_class,
            priority=from_headers.priority,
        )
        ids, tools = self._read_prompt(body)
        if max_tokens is None:
            self._check_length(len(ids), min_tokens, "min_tokens")
        else:
            self._check_length(len(ids), max_tokens, limit_field)
        if max_tokens is None and self.defaults.max_new_tokens is not None:
            default = max(self.defaults.max_new_tokens, min_tokens)
            max_tokens = min(default, self.limits.max_model_tokens - len(ids))
        return CompletionRequest(
            chat=chat,
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            stops=stops,
            min_tokens=min_tokens,
            request_id=from_headers.request_id,
            returns_token_ids=self.tokenizer is None
            if body.return_token_ids is None
            else body.return_token_ids,
            tools=tools,
            submit=Submit(
                rid=rid,
                arrival_ns=arrival_ns,
                input_tokens=len(ids),
                max_output_tokens=max_tokens,
                block_hashes=list(block_hashes(ids, self.limits.block_size)),
                slo_class=slo.slo_class,
                targets=slo.targets,
                priority=slo.priority,
                weight=slo.weight,
                executor=ExecutorInput(
                    output_tokens=from_headers.output_tokens,
                    min_tokens=min_tokens,
                    ignore_eos=bool(body.ignore_eos),
                    token_ids=ids if self.computes else [],
                    sampling=sampling,
                    grammar=grammar,
                ),
            ),
        )

    def _require_grammars(self) -> None:
        if self.tokenizer is None:
            raise bad_request(
                f"response_format needs text, and {_NO_TOKENIZER}; leave it out", "response_format"
            )
        if self.grammar_problem:
            raise bad_request(
                "response_format is not supported for the tokenizer of this model: "
                f"{self.grammar_problem}; leave it out",
                "response_format",
            )

    def _check_model(self, name: str) -> None:
        if name != self.model:
            raise APIError(
                404,
                f"the model {name[:100]!r} is not served here, only {self.model!r}",
                param="model",
                code="model_not_found",
            )

    def _read_prompt(self, body: CompletionBody | ChatBody) -> tuple[list[int], ToolFormat | None]:
        """Return the token ids of a prompt, and the form of the calls of its tools."""
        if isinstance(body, ChatBody):
            if self.tokenizer is None:
                raise bad_request(
                    f"messages are text, and {_NO_TOKENIZER}; send token ids to /v1/completions",
                    "messages",
                )
            try:
                ids, tools = self._encode_chat(body)
            except InputError as error:
                raise bad_request(str(error), "messages") from error
            except InternalError as error:
                raise unavailable(str(error), "chat_template_unavailable") from error
            return self._require_fit(ids, "messages"), tools
        try:
            ids = self._read_completion_prompt(bytes(body.prompt))
            return self._require_fit(ids, "prompt"), None
        except InputError as error:
            raise bad_request(str(error), "prompt") from error
        except (ValueError, RecursionError) as error:  # not JSON, or of another type
            raise bad_request(
                "prompt must be a text, a list of token ids, or a list of one of these: "
                f"{str(error)[:200]}",
                "prompt",
            ) from error

    def _encode_chat(self, body: ChatBody) -> tuple[list[int], ToolFormat | None]:
        limit, tokenizer = self.limits.max_model_tokens, self.tokenizer
        if isinstance(tokenizer, _ToolTokenizer):
            tools = read_tools(body)
            if tools and tokenizer.tools is None:
                raise bad_request(
                    "tools are not supported by the chat template of this model; leave them out",
                    "tools",
                )
            ids = tokenizer.encode_messages(read_messages(body), tools or None, limit=limit)
            return ids, tokenizer.tools if tools else None
        assert tokenizer is not None
        chat = [(message.role, message.text) for message in body.messages]
        return tokenizer.encode_chat(chat, limit=limit), None

    def _read_completion_prompt(self, data: bytes) -> list[int]:
        if data.startswith(b"["):
            inner = data[1:-1].strip(_WHITE_SPACE)
            if inner[:1] not in {b'"', b"["}:
                return self._read_token_ids(data)
            data = inner
            if not _is_one_value(data):
                raise bad_request(
                    "prompt has several prompts; send a request for each of them", "prompt"
                )
        if data.startswith(b"["):
            return self._read_token_ids(data)
        text = _TEXT.decode(data)
        if self.tokenizer is None:
            raise bad_request(
                f"prompt is a text, and {_NO_TOKENIZER}; send a list of token ids", "prompt"
            )
        return self.tokenizer.encode(text, limit=self.limits.max_model_tokens)

    def _read_token_ids(self, data: bytes) -> list[int]:
        self._check_count(data)
        ids = _IDS.decode(data)
        vocab_size = self.limits.vocab_size
        if ids and max(ids) >= vocab_size:
            at, token_id = next((at, one) for at, one in enumerate(ids) if one >= vocab_size)
            raise bad_request(
                f"prompt[{at}] is the token id {token_id}; this model's token ids are below "
                f"{vocab_size}",
                "prompt",
            )
        return ids

    def _check_count(self, data: bytes) -> None:
        """Reject an overlong list before decoding, which takes ten times the memory of its text."""
        commas = 0
        for at in range(0, len(data), _SLICE_BYTES):
            commas += data.count(b",", at, at + _SLICE_BYTES)
            if commas >= self.limits.max_model_tokens:
                raise self._too_long_error("prompt")

    def _require_fit(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise bad_request(f"{param} has no tokens; send at least one", param)
        if len(ids) >= self.limits.max_model_tokens:
            raise self._too_long_error(param)
        if self.computes and max(ids) >= self.limits.vocab_size:
            raise bad_request(
                f"{param}: the tokenizer returns the token id {max(ids)}, but this model's token "
                f"ids are below {self.limits.vocab_size}; remove the special token",
                param,
            )
        return ids

    def _too_long_error(self, param: str) -> APIError:
        return too_long(describe_long_prompt(self.limits.max_model_tokens), param)

    def _check_length(self, input_tokens: int, output_tokens: int, field: str) -> None:
        context_tokens = self.limits.max_model_tokens
        if input_tokens + output_tokens > context_tokens:
            detail = describe_long_output(
                output_tokens,
                input_tokens=input_tokens,
                context_tokens=context_tokens,
                field=field,
            )
            raise too_long(detail, field)


def _read_max_tokens(body: CompletionBody | ChatBody) -> tuple[int | None, str]:
    """Return the limit of the output and the field that has it."""
    completion_tokens = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in {None, completion_tokens}:
        raise bad_request(
            f"max_tokens is {body.max_tokens}, but max_completion_tokens is {completion_tokens}; "
            "send only one of these fields",
            "max_completion_tokens",
        )
    return completion_tokens, "max_completion_tokens"


def _is_one_value(data: bytes) -> bool:
    """True if a JSON text or list is followed by nothing; False also if it is malformed."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True
