"""The keys of a prompt: hashes of its tokens if they are known, else of its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.placement import MAX_KEYS
from goodput_core.placement.blockhash import byte_block_hashes
from goodput_core.slo.targets import SLOClass
from goodput_engine import tokens
from goodput_engine.openai.headers import ServiceClasses
from goodput_engine.router.prompt_keys import BYTES_PER_BLOCK, PromptForm, prompt_keys
from goodput_engine.server.requests import PromptLimits, RequestParser

PARSER = RequestParser(
    model="chat",
    slo=ServiceClasses(classes={"a": SLOClass(name="a", ttft_ms=5, tpot_ms=5)}, default="a"),
    limits=PromptLimits(vocab_size=1 << 32, max_model_tokens=1 << 20, block_size=16),
    computes=False,
    tokenizer=tokens,
)
WORDS = PromptForm(block_size=16, counts_words=True)
BYTES = PromptForm(block_size=16)


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "chat", **fields, "stream": True}).encode()


def engine_keys(body: bytes) -> list[int]:
    """Return the engine's own hashes of the same request's blocks."""
    request = PARSER.parse(body, {}, chat=b'"messages"' in body, rid=1, arrival_ns=0)
    return list(request.submit.block_hashes)


TEXT = "Grüße, dear reader of \U0001f600 tokens " * 40
CHAT = [
    {"role": "system", "content": "You are kind. " * 30},
    {"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": "?"}]},
]


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        pytest.param(WORDS, {"prompt": TEXT}, id="text"),
        pytest.param(WORDS, {"prompt": [TEXT]}, id="a list of one text"),
        pytest.param(WORDS, {"messages": CHAT}, id="chat"),
        pytest.param(WORDS, {"prompt": list(range(300))}, id="token ids"),
        pytest.param(BYTES, {"prompt": list(range(300))}, id="token ids of a foreign model"),
    ],
)
def test_known_tokens_have_the_engines_keys(form: PromptForm, fields: dict[str, Any]) -> None:
    body = body_of(**fields)
    keys = prompt_keys(body, form)
    assert len(keys) > 10
    assert list(keys) == engine_keys(body)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"prompt": list(range(20_000))}, id="token ids"),
        pytest.param({"prompt": "word " * 20_000}, id="text"),
        pytest.param({"messages": [{"role": "user", "content": "word " * 20_000}]}, id="chat"),
    ],
)
def test_only_the_first_blocks_have_keys(fields: dict[str, Any]) -> None:
    body = body_of(**fields)
    assert list(prompt_keys(body, WORDS)) == engine_keys(body)[:MAX_KEYS]


def test_ids_after_the_last_key_are_not_read() -> None:
    ids = ", ".join(map(str, range(4_000_000_000, 4_000_012_000))).encode()
    whole = prompt_keys(b'{"prompt":[%b]}' % ids, BYTES)
    assert len(whole) == MAX_KEYS
    assert prompt_keys(b'{"prompt":[%b, "x"]}' % ids, BYTES) == whole


def test_a_text_without_known_tokens_has_the_keys_of_its_bytes() -> None:
    text = "x" * 1_000
    keys = prompt_keys(b'{"prompt":"%b"}' % text.encode(), BYTES)
    assert keys == byte_block_hashes(f'"{text}"'.encode(), BYTES_PER_BLOCK)


@pytest.mark.parametrize("form", [WORDS, BYTES], ids=["tokens", "bytes"])
def test_the_next_turn_begins_with_the_keys_of_the_previous_turn(form: PromptForm) -> None:
    chat = [{"role": "user", "content": "Tell me of the sea. " * 40}]
    first = prompt_keys(body_of(messages=chat), form)
    chat += [
        {"role": "assistant", "content": "It is wide. " * 40},
        {"role": "user", "content": "?"},
    ]
    second = prompt_keys(body_of(messages=chat, temperature=0.5), form)
    # The last block may contain the end of the chat template or of the JSON.
    same = len(first) - 1
    assert same >= 2
    assert second[:same] == first[:same]
    assert len(second) > len(first)


@pytest.mark.parametrize("form", [WORDS, BYTES], ids=["tokens", "bytes"])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[1]", id="a list"),
        pytest.param(b'{"prompt":' + b"[" * 100_000, id="deep"),
        pytest.param(b'{"prompt":"' + b"x" * 1_000, id="cut off"),
        pytest.param(b'{"prompt":null,"messages":3}', id="wrong types"),
        pytest.param(b'{"prompt":[]}', id="empty"),
        pytest.param(b'{"prompt":"%b"}' % (b"x" * (5 << 20)), id="huge"),
    ],
)
def test_an_invalid_body_has_no_keys(form: PromptForm, body: bytes) -> None:
    assert prompt_keys(body, form) == ()


@given(body=st.binary(max_size=60), counts_words=st.booleans())
def test_any_bytes_have_a_bounded_number_of_keys(body: bytes, counts_words: bool) -> None:
    form = PromptForm(block_size=1, counts_words=counts_words)
    for prompt in (body, b'{"prompt":%b}' % body, b'{"messages":[%b]}' % body):
        assert len(prompt_keys(prompt, form)) <= MAX_KEYS
