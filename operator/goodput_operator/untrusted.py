"""Decodes JSON of other processes, which is not trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import msgspec

__all__ = ["decode_untrusted"]

_MAX_MESSAGE: Final = 200
_Content = TypeVar("_Content")


def decode_untrusted(decoder: msgspec.json.Decoder[_Content], body: bytes) -> _Content:
    """Decode a JSON body.

    Args:
        decoder: decoder of the expected type.
        body: the body, of bounded length.

    Raises:
        ValueError: the body is not JSON of the expected type, or is nested too deeply.
    """
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        # msgspec's errors and invalid UTF-8 are ValueErrors.
        raise ValueError(str(error)[:_MAX_MESSAGE]) from error
