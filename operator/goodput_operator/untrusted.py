"""Reading what another process sent as JSON: one way for all of it, because none is trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import msgspec

__all__ = ["decoded"]

_MOST_WORDS: Final = 200
_Content = TypeVar("_Content")


def decoded(decoder: msgspec.json.Decoder[_Content], body: bytes) -> _Content:
    """The content of a body.

    Args:
        decoder: of the form that it should have.
        body: as it came, of bounded length.

    Raises:
        ValueError: it has another form, or brackets without end.
    """
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        # msgspec's own errors, and bytes that are no UTF-8, are ValueErrors.
        raise ValueError(str(error)[:_MOST_WORDS]) from error
