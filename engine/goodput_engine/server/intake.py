"""From the bytes and headers of a request to the call that the engine answers.

Everything a client can get wrong is found here, before anything is reserved for it. It is
synchronous and keeps no state, so that a long prompt can be read in a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_engine.messages import ExecutorInput, Submit
from goodput_engine.server.body import ChatBody, CompletionBody, decode_body
from goodput_engine.server.promise import SLOBook, read_headers
from goodput_engine.server.prompt import PromptLimits, chat_prompt, completion_prompt
from goodput_engine.server.refusals import Refusal, bad_request, too_long

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_engine.server.promise import HeaderValues
    from goodput_engine.server.prompt import Prompt

__all__ = ["Call", "Intake"]

_COMPLETION: Final = msgspec.json.Decoder(CompletionBody)
_CHAT: Final = msgspec.json.Decoder(ChatBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A valid request.

    Args:
        chat: of `/v1/chat/completions`.
        stream: answered as server-sent events.
        include_usage: the stream ends with the usage.
        stops: strings that end the answer.
        min_tokens: before so many tokens no string ends it.
        request_id: the client's name for it; None: it gave none.
        submit: what the core gets.
    """

    chat: bool
    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    min_tokens: int
    request_id: str | None
    submit: Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What requests are held against.

    Args:
        model: the name that clients ask for.
        slo: the classes.
        limits: what the device takes.
    """

    model: str
    slo: SLOBook
    limits: PromptLimits

    def read(
        self,
        data: bytes | bytearray,
        headers: Mapping[str, str],
        *,
        chat: bool,
        rid: int,
        arrival_ns: int,
    ) -> Call:
        """Validate a request.

        Args:
            data: its body.
            headers: its headers, case-insensitive.
            chat: of `/v1/chat/completions`.
            rid: the number to give it.
            arrival_ns: when it came.

        Raises:
            Refusal: 400 or 404, naming the field or header.
        """
        asked = read_headers(headers)
        body = decode_body(data, _CHAT) if chat else decode_body(data, _COMPLETION)
        self._check_model(body.model)
        max_tokens = _max_tokens(body)
        min_tokens = body.min_tokens or 0
        if max_tokens is not None and min_tokens > max_tokens:
            raise bad_request(
                f"min_tokens, {min_tokens}, is above max_tokens, {max_tokens}", "min_tokens"
            )
        options = body.stream_options
        if options is not None and not body.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        prompt = (
            chat_prompt(body.messages, self.limits)
            if isinstance(body, ChatBody)
            else completion_prompt(body.prompt, self.limits)
        )
        self._check_length(prompt, max_tokens)
        return Call(
            chat=chat,
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            min_tokens=min_tokens,
            request_id=asked.request_id,
            submit=self._submit(body, asked, prompt, max_tokens, rid=rid, arrival_ns=arrival_ns),
        )

    def _submit(
        self,
        body: CompletionBody | ChatBody,
        asked: HeaderValues,
        prompt: Prompt,
        max_tokens: int | None,
        *,
        rid: int,
        arrival_ns: int,
    ) -> Submit:
        slo_class, targets = self.slo.promised(asked, body.slo_class)
        return Submit(
            rid=rid,
            arrival_ns=arrival_ns,
            input_tokens=prompt.input_tokens,
            max_output_tokens=max_tokens,
            block_hashes=prompt.block_hashes,
            slo_class=slo_class,
            ttft_ns=targets.ttft_ns,
            tpot_ns=targets.tpot_ns,
            tbt_p99_ns=targets.tbt_p99_ns,
            e2e_ns=targets.e2e_ns,
            priority=asked.priority,
            executor=ExecutorInput(
                output_tokens=asked.output_tokens,
                min_tokens=body.min_tokens or 0,
                ignore_eos=bool(body.ignore_eos),
            ),
        )

    def _check_model(self, asked: str) -> None:
        if asked != self.model:
            raise Refusal(
                404,
                f"the model {asked[:100]!r} is not served here; {self.model!r} is",
                param="model",
                code="model_not_found",
            )

    def _check_length(self, prompt: Prompt, max_tokens: int | None) -> None:
        room = self.limits.max_model_tokens - prompt.input_tokens
        if max_tokens is not None and max_tokens > room:
            raise too_long(
                f"max_tokens is {max_tokens}, but after a prompt of {prompt.input_tokens} tokens "
                f"this model's context of {self.limits.max_model_tokens} has room for {room}",
                "max_tokens",
            )


def _max_tokens(body: CompletionBody | ChatBody) -> int | None:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if newer is None:
        return body.max_tokens
    if body.max_tokens not in {None, newer}:
        raise bad_request(
            f"max_tokens is {body.max_tokens} but max_completion_tokens is {newer}; "
            "send one of them",
            "max_completion_tokens",
        )
    return newer
