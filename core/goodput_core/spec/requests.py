"""The form of the requests of a replay: fields that a gate and the target of a TraceReplay share.

Their names and values are those of the options of `replay`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.declaration import (
    Cel,
    CrossFieldRule,
    claim_path_rule,
    recordings_field,
    spec_field,
)
from goodput_core.spec.choices import Endpoint, PromptEncoding

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_core.spec.rollout import GateSpec
    from goodput_core.spec.tracereplay import ReplayTargetSpec

__all__ = [
    "REQUEST_RULES",
    "endpoint_field",
    "model_field",
    "prompt_field",
    "request_options",
    "tokenizer_field",
]


def model_field() -> Any:
    """Declare the model name of the requests."""
    return spec_field(
        "Model name to send; default: the only served model.",
        default=None,
        min_length=1,
        max_length=512,
    )


def endpoint_field() -> Any:
    """Declare the API that is called."""
    return spec_field(
        "API to call: completions is /v1/completions, chat is /v1/chat/completions.",
        default=Endpoint.COMPLETIONS,
    )


def prompt_field() -> Any:
    """Declare the form of the prompts."""
    return spec_field(
        "tokens sends token ids, whose number is exact on every server that accepts them. text "
        "sends words, whose number of tokens is exact with tokenizer. Default: tokens for "
        "completions without tokenizer, otherwise text.",
        default=None,
    )


def tokenizer_field(*, files: bool = False) -> Any:
    """Declare the tokenizer of the served model.

    Args:
        files: True to accept `file://PATH`, too.
    """
    local = ", or file://PATH outside a cluster" if files else ""
    return recordings_field(
        "Tokenizer of the served model, from whose words prompts of an exact length are made: a "
        f"tokenizer.json or its folder, as pvc://CLAIM/PATH{local}. Needed for an exact number of "
        "tokens on a server that rejects token ids.",
        files=files,
    )


def _check_chat(form: GateSpec | ReplayTargetSpec) -> str | None:
    if form.prompt is not PromptEncoding.TOKENS or form.endpoint is not Endpoint.CHAT:
        return None
    return "is tokens, but with endpoint chat the messages are text; write text"


def _check_tokenizer(form: GateSpec | ReplayTargetSpec) -> str | None:
    if form.prompt is not PromptEncoding.TOKENS or form.tokenizer is None:
        return None
    return "must be absent with prompt tokens, because token ids need no tokenizer"


REQUEST_RULES: Final = (
    CrossFieldRule(
        field="prompt",
        cel=Cel(
            rule="!has(self.prompt) || self.prompt != 'tokens' || self.endpoint != 'chat'",
            message="must be text with endpoint chat",
        ),
        problem=_check_chat,
    ),
    CrossFieldRule(
        field="tokenizer",
        cel=Cel(
            rule="!has(self.tokenizer) || !has(self.prompt) || self.prompt != 'tokens'",
            message="must be absent with prompt tokens",
        ),
        problem=_check_tokenizer,
    ),
    claim_path_rule("tokenizer", optional=True),
)
"""Rules between the fields of this module."""


def request_options(
    form: GateSpec | ReplayTargetSpec,
    path_of: Callable[[str], str],
    word_of: Callable[[str], str] = str,
) -> list[str]:
    """Return the options of `replay` for these fields.

    Args:
        form: the fields.
        path_of: returns the path of a place on the machine that sends.
        word_of: returns the word of a command that yields a text.
    """
    options: list[str] = []
    if form.model is not None:
        options += ["--model", word_of(form.model)]
    if form.endpoint is not Endpoint.COMPLETIONS:
        options += ["--endpoint", form.endpoint.value]
    if form.prompt is not None:
        options += ["--prompt", form.prompt.value]
    if form.tokenizer is not None:
        options += ["--tokenizer", path_of(form.tokenizer)]
    return options
