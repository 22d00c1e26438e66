"""Rejects bodies that are not UTF-8, with the field that contains the first wrong byte.

msgspec reports such bytes with Python's own words and an offset within the text, and only in the
fields that it decodes.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

from goodput_engine.openai.errors import bad_request

__all__ = ["require_utf8"]

_TOKENS: Final = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?|[\[\]{},:]', re.DOTALL)
_MAX_PATH: Final = 100
_SLICE_BYTES: Final = 1 << 18
_DECODER: Final = codecs.getincrementaldecoder("utf-8")


def require_utf8(data: bytes) -> None:
    """Reject a body that is not UTF-8.

    Raises:
        APIError: 400; the error names the field and the byte.
    """
    at = _first_wrong_byte(data)
    if at is not None:
        field = _field_at(data, at)
        where = f"{field}: byte" if field else "byte"
        raise bad_request(
            f"{where} {at} of the body is not UTF-8; encode the body as UTF-8", field or None
        )


def _first_wrong_byte(data: bytes) -> int | None:
    """Return the index of the first byte that is not UTF-8; None if there is none.

    A large body is decoded in slices, so that other threads can run in between.
    """
    decoder = _DECODER()
    for at in range(0, len(data), _SLICE_BYTES):
        pending, _ = decoder.getstate()
        end = at + _SLICE_BYTES
        try:
            decoder.decode(data[at:end], final=end >= len(data))
        except UnicodeDecodeError as error:
            return at - len(pending) + error.start
    return None


def _field_at(data: bytes, at: int) -> str:
    """Return the path of the value that contains a byte; empty if no value of a field does.

    Args:
        data: JSON, which is UTF-8 before the byte.
        at: index of the byte.
    """
    # The name or the index at each depth; an empty name between two fields.
    path: list[str | int] = []
    text = ""
    for match in _TOKENS.finditer(data, 0, at):
        token = match[0]
        if token in {b"{", b"["}:
            path.append("" if token == b"{" else 0)
        elif not path:
            continue
        elif token in {b"}", b"]"}:
            path.pop()
        elif token == b",":
            last = path[-1]
            path[-1] = last + 1 if isinstance(last, int) else ""
        elif token != b":":
            text = token[1 : _MAX_PATH + 1].decode(errors="replace").removesuffix('"')
        elif path[-1] == "":
            path[-1] = text
    names = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path if part != ""]
    return "".join(names).removeprefix(".")[:_MAX_PATH]
