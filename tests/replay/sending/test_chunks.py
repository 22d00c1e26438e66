"""Chunks of a server are decoded within bounds, and its texts are made printable."""

from __future__ import annotations

import pytest

from goodput_replay.sending.client.chunks import (
    MalformedChunkError,
    Usage,
    decode_chunk,
    decode_usage,
    error_sentence,
    has_output,
)
from goodput_replay.sending.client.request import _printable

DEEP = b'{"choices":' + b"[" * 100_000


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(DEEP, id="deeply nested"),
        pytest.param(b'{"unknown":' + b"[" * 100_000, id="deeply nested in an unknown field"),
    ],
)
def test_a_chunk_nested_too_deeply_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedChunkError):
        decode_chunk(data)


@pytest.mark.parametrize(
    "usage",
    [
        pytest.param(b'{"completion_tokens":99999999999999999999}', id="huge"),
        pytest.param(b'{"completion_tokens":-3}', id="negative"),
        pytest.param(b'{"completion_tokens":2.5}', id="half"),
        pytest.param(
            b'{"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":-1}}', id="cached"
        ),
        pytest.param(b"[1, 2]", id="list"),
    ],
)
def test_a_usage_out_of_bounds_is_no_usage_of_any_token(usage: bytes) -> None:
    chunk = decode_chunk(b'{"choices":[],"usage":%b}' % usage)
    assert chunk.has_usage
    assert decode_usage(chunk.usage) == Usage(completion_tokens=0)


def test_a_choice_with_token_ids_and_without_text_has_output() -> None:
    for ids, expected in ((b"[7]", True), (b"[]", False), (b"null", False)):
        chunk = decode_chunk(b'{"choices":[{"text":"","token_ids":%b}]}' % ids)
        assert chunk.choices is not None
        assert has_output(chunk.choices[0]) is expected


def test_an_error_nested_too_deeply_still_has_a_message() -> None:
    assert error_sentence(b'{"error":' + b"[" * 100_000)


def test_control_and_invalid_characters_of_a_header_are_replaced() -> None:
    assert _printable("chat-\udcff\x00\x1b[31m") == "chat-\ufffd\ufffd\ufffd[31m"
