"""The fields of a request that are known but not implemented, and the values that are accepted.

Clients and libraries often send every field, with the value that requests the normal behaviour.
Such a value is accepted. Any other value would change the response, so it is rejected by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from goodput_engine.openai.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "NEUTRAL_FOR_CHATS",
    "NEUTRAL_FOR_COMPLETIONS",
    "NEUTRAL_FOR_MESSAGES",
    "NEUTRAL_FOR_STREAMS",
    "OF_REAL_MODELS",
    "reject_unsupported",
]

_MAX_BYTES: Final = 64
_NULL: Final = msgspec.Raw(b"null")

OF_REAL_MODELS: Final = frozenset(
    {
        "logit_bias",
        "logprobs",
        "response_format",
        "stop_token_ids",
        "tool_calls",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
"""Fields that a real model honours."""

# The accepted values of each field; null is always accepted.
_COMMON: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
    # Fields of vLLM.
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "priority": (0,),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
NEUTRAL_FOR_COMPLETIONS: Final[Mapping[str, tuple[object, ...]]] = {
    **_COMMON,
    "add_special_tokens": (True,),
    "best_of": (1,),
    "suffix": ("",),
}
NEUTRAL_FOR_CHATS: Final[Mapping[str, tuple[object, ...]]] = {
    **_COMMON,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
NEUTRAL_FOR_MESSAGES: Final[Mapping[str, tuple[object, ...]]] = {
    "name": (),
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
}
NEUTRAL_FOR_STREAMS: Final[Mapping[str, tuple[object, ...]]] = {"include_obfuscation": (False,)}


def reject_unsupported(
    value: msgspec.Struct,
    neutral: Mapping[str, tuple[object, ...]],
    *,
    path: str = "",
    honoured: frozenset[str] = frozenset(),
) -> None:
    """Reject a request that needs a field that is not implemented.

    Args:
        value: the body or a message; its fields in `neutral` are raw JSON.
        neutral: accepted values of each field.
        path: path of the value in the body, for the error.
        honoured: fields of `neutral` that the engine implements.

    Raises:
        APIError: 400 naming the field.
    """
    for field, accepted in neutral.items():
        if field in honoured:
            continue
        raw: msgspec.Raw = getattr(value, field)
        if not len(raw) or raw == _NULL or _is_one_of(raw, accepted):
            continue
        remedy = f" or send {_to_json(accepted[0])}" if accepted else ""
        raise bad_request(
            f"{path}{field} is not supported by this engine; leave it out{remedy}", path + field
        )


def _is_one_of(raw: msgspec.Raw, accepted: tuple[object, ...]) -> bool:
    if len(raw) > _MAX_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return False
    # `True == 1` in Python, but not in JSON.
    return any(value == entry and type(value) is type(entry) for entry in accepted)


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
