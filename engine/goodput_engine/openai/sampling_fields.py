"""The fields of a request that choose the output tokens of a real model, and their defaults.

An emulated device does not sample, so these fields are read only if the engine computes a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from goodput_engine.messages import SamplingOptions
from goodput_engine.openai.bodies import (
    MAX_STOP_TOKEN_IDS,
    Probability,
    RepetitionPenalty,
    Temperature,
    TokenLimit,
    TopK,
    decode_field,
)
from goodput_engine.openai.errors import bad_request
from goodput_engine.openai.logprobs import read_logprobs

if TYPE_CHECKING:
    from goodput_engine.openai.bodies import ChatBody, CompletionBody

__all__ = ["OPENAI_DEFAULTS", "SamplingDefaults", "read_sampling"]

T = TypeVar("T")

_MAX_BYTES: Final = 64 << 10
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_STOP_IDS: Final = msgspec.json.Decoder(
    Annotated[list[_TokenId], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] | None
)
_BIAS: Final = msgspec.json.Decoder(
    dict[_TokenId, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None
)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the fields that a request leaves out; None for those of OpenAI's API.

    The names are those of `generation_config.json`. `max_new_tokens` is the default of
    `max_tokens`.
    """

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: TokenLimit | None = None

    def given(self) -> dict[str, float]:
        """Return the defaults that are not None."""
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }


OPENAI_DEFAULTS: Final = SamplingDefaults()


def read_sampling(
    body: CompletionBody | ChatBody,
    *,
    defaults: SamplingDefaults,
    vocab_size: int,
    random_seed: int,
) -> SamplingOptions:
    """Return the sampling options of a request.

    Args:
        body: the decoded body.
        defaults: values of the fields that the body does not have.
        vocab_size: number of token ids of the model.
        random_seed: the seed if the request has none.

    Raises:
        APIError: 400 naming the field that is invalid.
    """
    stop_ids = _read(body.stop_token_ids, _STOP_IDS, "stop_token_ids") or []
    bias = _read(body.logit_bias, _BIAS, "logit_bias") or {}
    for field, ids in (("stop_token_ids", stop_ids), ("logit_bias", list(bias))):
        if ids and max(ids) >= vocab_size:
            raise bad_request(
                f"{field} has the token id {max(ids)}; this model's token ids are below "
                f"{vocab_size}",
                field,
            )
    return SamplingOptions(
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_k=max(0, _first(body.top_k, defaults.top_k, 0)),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=random_seed if body.seed is None else body.seed,
        logit_bias=bias,
        stop_ids=stop_ids,
        logprobs=read_logprobs(body),
    )


def _first(given: T | None, default: T | None, otherwise: T) -> T:
    """Return the first value that is not None."""
    value = default if given is None else given
    return otherwise if value is None else value


def _read(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], field: str) -> T | None:
    if len(raw) > _MAX_BYTES:
        raise bad_request(f"{field} is longer than {_MAX_BYTES >> 10} KiB", field)
    return decode_field(raw, decoder, field) if len(raw) else None
