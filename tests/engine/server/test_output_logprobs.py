"""Log-probabilities of a response: one entry per token of its text, sent with that text."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.tokenizers import KINDS
from tests.engine.server.test_server_requests import PARSER, chat, completion

from goodput_engine.openai.errors import APIError
from goodput_engine.openai.logprobs import TokenEntry, chat_logprobs, completion_logprobs
from goodput_engine.scheduler.plan import TokenLogprobs
from goodput_engine.server.output_logprobs import OutputLogprobs
from goodput_engine.server.output_text import CompletionText, ModelText
from goodput_engine.server.requests import PromptLimits, RequestParser
from goodput_engine.text.tokenizer import load_model_tokenizer

if TYPE_CHECKING:
    from goodput_engine.text.tokenizer import ModelTokenizer

TEXTS = ("the replica of the engine", "Grüße 🦊 aus 東京", "a\ufffdb", " <|endoftext|>", "x")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    KINDS["byte-level BPE"][0]().save(str(folder / "tokenizer.json"))
    loaded = load_model_tokenizer(folder)
    assert loaded is not None
    return loaded


class GeneratedText:
    """A response whose tokens are given, taken in pieces."""

    def __init__(
        self, tokenizer: ModelTokenizer, ids: list[int], stops: list[str], *, is_chat: bool
    ) -> None:
        logprobs = [
            TokenLogprobs(-float(at), [token_id], [-0.5]) for at, token_id in enumerate(ids)
        ]
        source = ModelText(tokenizer.detokenizer(continues=not is_chat), ids)
        self._logprobs = OutputLogprobs(source, ids, logprobs, tokenizer, chat=is_chat, count=1)
        self._text = CompletionText(self._logprobs, stops, min_tokens=0)
        self._left = len(ids)
        self.text = ""
        self.entries: list[TokenEntry] = []
        self.stopped = False

    def take(self, counts: list[int]) -> None:
        """Take tokens in pieces until the output ends."""
        pieces = iter(counts)
        while self._left and not self.stopped:
            count = min(next(pieces, self._left), self._left)
            self._left -= count
            self.text += (piece := self._text.take(count, last=not self._left))
            self.stopped = self._text.stopped
            complete = not self._left and not self.stopped
            new = self._logprobs.send(piece, complete=complete)
            assert complete or all(entry.offset < len(self.text) for entry in new)
            self.entries += new


IDS = st.lists(st.integers(0, 299), min_size=1, max_size=12)
COUNTS = st.lists(st.integers(1, 4), max_size=12)
STOPS = st.lists(st.sampled_from(["e", "th", "🦊", "the", "\ufffd", "!"]), max_size=2)


@settings(deadline=None)
@given(ids=IDS, text=st.sampled_from(TEXTS), counts=COUNTS, stops=STOPS, is_chat=st.booleans())
def test_entries_cover_the_text_and_no_token_behind_it(
    tokenizer: ModelTokenizer,
    ids: list[int],
    text: str,
    counts: list[int],
    stops: list[str],
    is_chat: bool,
) -> None:
    ids = [*tokenizer.encode(text), *ids]
    pieces = GeneratedText(tokenizer, ids, stops, is_chat=is_chat)
    pieces.take(counts)
    whole = GeneratedText(tokenizer, ids, stops, is_chat=is_chat)
    whole.take([])
    assert pieces.text == whole.text
    assert pieces.entries == whole.entries
    labels = [entry.label for entry in whole.entries]
    joined = b"".join(label for label in labels if isinstance(label, bytes))
    assert [entry.logprob for entry in whole.entries] == [-at for at in range(len(labels))]
    if whole.stopped:
        # Invalid bytes become one character each or fewer, so only the start can be compared.
        assert joined.decode(errors="replace").startswith(whole.text)
        assert all(entry.offset < len(whole.text) for entry in whole.entries)
        unstopped = GeneratedText(tokenizer, ids, [], is_chat=is_chat)
        unstopped.take([])
        assert unstopped.entries[: len(labels)] == whole.entries
        left = unstopped.entries[len(labels) :]
        assert all(entry.offset >= len(whole.text) for entry in left)
    else:
        assert len(labels) == len(ids)
        assert joined.decode(errors="replace") == whole.text


def test_a_token_without_text_has_a_name_and_no_bytes(tokenizer: ModelTokenizer) -> None:
    response = GeneratedText(tokenizer, [0, *tokenizer.encode("the"), 10**6], [], is_chat=True)
    response.take([])
    first, *_, unknown = chat_logprobs(response.entries)["content"]
    assert (first["token"], first["bytes"]) == ("<|endoftext|>", None)
    assert (unknown["token"], unknown["bytes"]) == ("token_id:1000000", None)


def test_a_part_of_a_character_is_written_as_bytes() -> None:
    entry = TokenEntry(b"\xf0\x9f", -1.5, [(b"\xf0\x9f", -1.5), (b"a", -2.0)], 7)
    (token,) = chat_logprobs([entry])["content"]
    assert token == {
        "token": "\\xf0\\x9f",
        "logprob": -1.5,
        "bytes": [240, 159],
        "top_logprobs": [
            {"token": "\\xf0\\x9f", "logprob": -1.5, "bytes": [240, 159]},
            {"token": "a", "logprob": -2.0, "bytes": [97]},
        ],
    }
    assert completion_logprobs([entry], count=2) == {
        "tokens": ["bytes:\\xf0\\x9f"],
        "token_logprobs": [-1.5],
        "top_logprobs": [{"bytes:\\xf0\\x9f": -1.5, "a": -2.0}],
        "text_offset": [7],
    }


def test_an_improbable_output_token_is_added_to_the_most_probable_ones() -> None:
    entry = TokenEntry(b"z", -float("inf"), [(b"a", -0.1), (b"b", -3.0), (b"a", -4.0)], 0)
    assert completion_logprobs([entry], count=3)["top_logprobs"] == [
        {"a": -0.1, "b": -3.0, "z": -9999.0}
    ]
    assert completion_logprobs([entry], count=0)["top_logprobs"] is None
    json.dumps(chat_logprobs([entry]), allow_nan=False)


REAL = RequestParser(
    model=PARSER.model,
    slo=PARSER.slo,
    limits=PromptLimits(vocab_size=1 << 32, max_model_tokens=1000, block_size=16),
    computes=True,
    tokenizer=PARSER.tokenizer,
)


def requested(body: dict[str, Any]) -> int | None:
    """Return the number of log-probabilities that a request to a real model asks for."""
    data = json.dumps(body).encode()
    call = REAL.parse(data, {}, chat="messages" in body, rid=1, arrival_ns=0)
    return call.submit.executor.sampling.logprobs


@pytest.mark.parametrize(
    ("body", "count"),
    [
        pytest.param(completion(), None, id="absent"),
        pytest.param(completion(logprobs=None), None, id="null"),
        pytest.param(completion(logprobs=False), None, id="false"),
        pytest.param(completion(logprobs=0), 0, id="none but the output token"),
        pytest.param(completion(logprobs=5), 5, id="the most of a completion"),
        pytest.param(chat(logprobs=False, top_logprobs=0), None, id="a chat without"),
        pytest.param(chat(logprobs=True), 0, id="a chat"),
        pytest.param(chat(logprobs=True, top_logprobs=None), 0, id="a chat with null"),
        pytest.param(chat(logprobs=True, top_logprobs=20), 20, id="the most of a chat"),
    ],
)
def test_the_number_of_log_probabilities_is_read(body: dict[str, Any], count: int | None) -> None:
    assert requested(body) == count


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        pytest.param(completion(logprobs=6), "logprobs", "<= 5", id="too many"),
        pytest.param(completion(logprobs=-1), "logprobs", ">= 0", id="a negative number"),
        pytest.param(completion(logprobs=True), "logprobs", "0 to 5, not true", id="true"),
        pytest.param(completion(logprobs="5"), "logprobs", "`str`", id="a text"),
        pytest.param(completion(logprobs=1.5), "logprobs", "float", id="a fraction"),
        pytest.param(completion(logprobs=10**30), "logprobs", "logprobs", id="a huge number"),
        pytest.param(completion(top_logprobs=1), "top_logprobs", "not a field", id="of a chat"),
        pytest.param(chat(logprobs=2), "logprobs", "`int`", id="a number in a chat"),
        pytest.param(
            chat(logprobs=True, top_logprobs=21), "top_logprobs", "<= 20", id="too many in a chat"
        ),
        pytest.param(
            chat(logprobs=True, top_logprobs=True), "top_logprobs", "`bool`", id="true as number"
        ),
        pytest.param(
            chat(top_logprobs=3), "top_logprobs", "requires logprobs: true", id="without logprobs"
        ),
        pytest.param(
            chat(logprobs=False, top_logprobs=3), "top_logprobs", "requires", id="with false"
        ),
    ],
)
def test_an_invalid_number_of_log_probabilities_is_rejected(
    body: dict[str, Any], param: str, part: str
) -> None:
    with pytest.raises(APIError, match=re.escape(part)) as caught:
        requested(body)
    assert caught.value.param == param
