"""Chunks of a server are decoded within bounds, and its texts are made printable."""

from __future__ import annotations

import pytest

from goodput_replay.sending.client.chunks import MalformedChunkError, decode_chunk, error_sentence
from goodput_replay.sending.client.request import _printable

DEEP = b'{"choices":' + b"[" * 100_000


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"usage":{"completion_tokens":99999999999999999999}}', id="huge"),
        pytest.param(b'{"usage":{"completion_tokens":-3}}', id="negative"),
        pytest.param(b'{"usage":{"prompt_tokens_details":{"cached_tokens":-1}}}', id="cached"),
        pytest.param(DEEP, id="deeply nested"),
        pytest.param(b'{"unknown":' + b"[" * 100_000, id="deeply nested in an unknown field"),
    ],
)
def test_a_chunk_with_counts_or_nesting_out_of_bounds_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedChunkError):
        decode_chunk(data)


def test_an_error_nested_too_deeply_still_has_a_message() -> None:
    assert error_sentence(b'{"error":' + b"[" * 100_000)


def test_control_and_invalid_characters_of_a_header_are_replaced() -> None:
    assert _printable("chat-\udcff\x00\x1b[31m") == "chat-\ufffd\ufffd\ufffd[31m"
