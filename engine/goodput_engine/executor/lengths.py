"""How long an answer of a device that computes nothing is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from goodput_engine.messages import Submit

__all__ = ["stop_length"]

_SHORTEST: Final = 64
_SPREAD: Final = 193
_KNUTH: Final = 2_654_435_761


def stop_length(submit: Submit) -> int | None:
    """Tokens after which this answer ends by itself; None: it runs to its bound.

    A replayed row ends where the real one did. Else `ignore_eos` runs to the bound, and any other
    answer has 64 to 256 tokens, a fixed scatter of the prompt's length (Knuth's multiplicative
    hash), but at least `min_tokens`: the same request gets the same answer on every replica.
    An end at the client's bound is the bound's: finish reason "length", not "stop".
    """
    known = submit.executor
    if known.output_tokens is not None:
        length = max(1, known.output_tokens)
    elif known.ignore_eos:
        return None
    else:
        scatter = submit.input_tokens * _KNUTH % 2**32 % _SPREAD
        length = max(_SHORTEST + scatter, known.min_tokens)
    bound = submit.max_output_tokens
    return None if bound is not None and length >= bound else length
