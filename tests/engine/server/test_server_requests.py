"""Parsing of requests: valid ones, and the error for each invalid one."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from multidict import CIMultiDict

from goodput_core.placement.blockhash import block_hashes
from goodput_core.slo.targets import SLOClass
from goodput_core.units import NS_PER_MS
from goodput_engine import tokens
from goodput_engine.openai.encoding import require_utf8
from goodput_engine.openai.errors import APIError
from goodput_engine.openai.headers import ServiceClasses
from goodput_engine.server.requests import CompletionRequest, PromptLimits, RequestParser
from goodput_engine.tokens import encode, encode_chat

PARSER = RequestParser(
    model="chat",
    slo=ServiceClasses(
        classes={
            "interactive": SLOClass(name="interactive", ttft_ms=500, tpot_ms=50, e2e_ms=9000),
            "batch": SLOClass(name="batch", ttft_ms=30_000, tpot_ms=200, tbt_p99_ms=900),
        },
        default="interactive",
    ),
    limits=PromptLimits(vocab_size=1000, max_model_tokens=100, block_size=4),
    computes=False,
    tokenizer=tokens,
)


def read(body: bytes | dict[str, Any], headers: dict[str, str] | None = None) -> CompletionRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    chat = b'"messages"' in data
    return PARSER.parse(data, CIMultiDict(headers or {}), chat=chat, rid=7, arrival_ns=42)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": "hello", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "hi"}], **fields}


def rejection(
    body: bytes | dict[str, Any], headers: dict[str, str] | None = None, status: int = 400
) -> APIError:
    with pytest.raises(APIError) as caught:
        read(body, headers)
    assert caught.value.status == status
    return caught.value


@pytest.mark.parametrize(
    ("headers", "priority", "weight"),
    [
        pytest.param({}, 2, 1, id="of the default class"),
        pytest.param({"X-SLO-Class": "batch"}, -3, 4, id="of another class"),
        pytest.param({"X-Priority": "0"}, 0, 1, id="of the request"),
        pytest.param({"X-SLO-Class": "batch", "X-Priority": "7"}, 7, 4, id="of both"),
        pytest.param({"X-Priority": "-2147483648"}, -(2**31), 1, id="lowest of a trace"),
    ],
)
def test_a_request_has_the_weight_of_its_class_and_its_own_priority_if_it_has_one(
    headers: dict[str, str], priority: int, weight: int
) -> None:
    classes = {
        "interactive": SLOClass(name="interactive", ttft_ms=500, tpot_ms=50, priority=2),
        "batch": SLOClass(name="batch", ttft_ms=30_000, tpot_ms=200, priority=-3, weight=4),
    }
    parser = replace(PARSER, slo=ServiceClasses(classes=classes, default="interactive"))
    data = json.dumps(completion()).encode()
    submit = parser.parse(data, CIMultiDict(headers), chat=False, rid=7, arrival_ns=42).submit
    assert (submit.priority, submit.weight) == (priority, weight)


def test_a_text_prompt_becomes_a_length_and_hashes() -> None:
    text = "one two three four five"
    submit = read(completion(prompt=text)).submit
    assert (submit.rid, submit.arrival_ns, submit.input_tokens) == (7, 42, 5)
    assert tuple(submit.block_hashes) == block_hashes(encode(text), 4)
    assert submit.executor.token_ids == []


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5], [[1, 2, 3, 4, 5]]], ids=["ids", "one list"])
def test_token_ids_are_used_unchanged(prompt: list[Any]) -> None:
    submit = read(completion(prompt=prompt)).submit
    assert submit.input_tokens == 5
    assert tuple(submit.block_hashes) == block_hashes([1, 2, 3, 4, 5], 4)


def test_a_list_of_one_text_is_that_text() -> None:
    assert read(completion(prompt=["a b c"])).submit.input_tokens == 3


def test_the_tokens_of_a_chat_include_the_template() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "so"}],
        },
    ]
    expected = encode_chat([("system", "be brief"), ("user", "how so")])
    assert read(chat(messages=messages)).submit.input_tokens == len(expected)


def test_an_assistants_message_with_all_fields_of_a_client_library_is_valid() -> None:
    answer: dict[str, Any] = {
        "role": "assistant", "content": "hi", "refusal": None, "annotations": [],
        "audio": None, "function_call": None, "tool_calls": None,
    }  # fmt: skip
    read(chat(messages=[{"role": "user", "content": "x"}, answer]))


def test_sampling_options_are_accepted() -> None:
    harmless = {
        "temperature": 0.7, "top_p": 0.9, "seed": 1, "user": "me", "n": 1, "presence_penalty": 0,
        "frequency_penalty": 1, "logit_bias": {}, "logprobs": None, "stop": None,
    }  # fmt: skip
    read(completion(**harmless, best_of=1, echo=False, suffix=""))
    read(chat(**harmless, tools=[], tool_choice="none", response_format={"type": "text"}))
    names = {"metadata": {"a": "b"}, "safety_identifier": "me", "prompt_cache_key": "k"}
    defaults = {"service_tier": "auto", "prompt_cache_retention": "in_memory", "prediction": None}
    options = {"include_usage": True, "include_obfuscation": False}
    read(chat(**names, **defaults, stream=True, stream_options=options))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"n": 2}, "n", id="n=2"),
        pytest.param({"n": True}, "n", id="n is true"),
        pytest.param({"logprobs": 1}, "logprobs", id="logprobs"),
        pytest.param({"logprobs": 0}, "logprobs", id="logprobs of the sampled token"),
        pytest.param({"echo": True}, "echo", id="echo"),
        pytest.param({"best_of": 3}, "best_of", id="best_of"),
        pytest.param({"suffix": "end"}, "suffix", id="suffix"),
        pytest.param({"logit_bias": {"5": 1}}, "logit_bias", id="logit_bias"),
        pytest.param({"stop_token_ids": [5]}, "stop_token_ids", id="stop_token_ids"),
        pytest.param({"guided_json": {}}, "guided_json", id="another engine's field"),
        pytest.param({"max_token": 5}, "max_token", id="a typo"),
        pytest.param({"messages_": 1}, "messages_", id="an unknown field"),
        pytest.param({"model": None}, "model", id="no model"),
        pytest.param({"max_tokens": "5"}, "max_tokens", id="text for a number"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="no tokens"),
        pytest.param({"max_tokens": 5.5}, "max_tokens", id="a fraction of a token"),
        pytest.param({"max_tokens": 2**70}, "max_tokens", id="a very large number"),
        pytest.param({"min_tokens": -1}, "min_tokens", id="negative min_tokens"),
        pytest.param({"min_tokens": 9, "max_tokens": 8}, "min_tokens", id="min above max"),
        pytest.param({"temperature": 3}, "temperature", id="temperature above 2"),
        pytest.param({"stream": "yes"}, "stream", id="text for a bool"),
        pytest.param({"stop": ""}, "stop", id="an empty stop"),
        pytest.param({"stop": [""]}, "stop[0]", id="an empty stop in a list"),
        pytest.param({"stop": ["x"] * 17}, "stop", id="too many stops"),
        pytest.param({"stop": 5}, "stop", id="a number as stop"),
        pytest.param({"stream_options": {"include_usage": True}}, "stream_options", id="no stream"),
        pytest.param(
            {"stream": True, "stream_options": {"usage": 1}},
            "stream_options.usage",
            id="an unknown stream option",
        ),
        pytest.param({"slo_class": "gold"}, "slo_class", id="an unknown class"),
        pytest.param({"slo_class": 5}, "slo_class", id="a number as class"),
        pytest.param({"prompt": 5}, "prompt", id="a number as prompt"),
        pytest.param({"prompt": None}, "prompt", id="no prompt"),
        pytest.param({"prompt": ""}, "prompt", id="an empty prompt"),
        pytest.param({"prompt": " \n "}, "prompt", id="a blank prompt"),
        pytest.param({"prompt": []}, "prompt", id="an empty list"),
        pytest.param({"prompt": ["a", "b"]}, "prompt", id="two prompts"),
        pytest.param({"prompt": [[1], [2]]}, "prompt", id="two lists of ids"),
        pytest.param({"prompt": [[["a"]]]}, "prompt", id="nested twice"),
        pytest.param({"prompt": [1, "a"]}, "prompt", id="ids and text"),
        pytest.param({"prompt": [1, 2.5]}, "prompt", id="a fraction as id"),
        pytest.param({"prompt": [-1]}, "prompt", id="a negative id"),
        pytest.param({"prompt": [1000]}, "prompt", id="an id beyond the vocabulary"),
        pytest.param({"prompt": [2**40]}, "prompt", id="an id beyond 32 bits"),
        pytest.param({"prompt": {"a": 1}}, "prompt", id="an object as prompt"),
    ],
)
def test_an_invalid_completion_is_rejected_by_field(fields: dict[str, Any], param: str) -> None:
    error = rejection(completion(**fields))
    assert error.param == param
    assert param.split("[", maxsplit=1)[0] in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"tools": [{"type": "function"}]}, "tools", id="tools"),
        pytest.param({"tool_choice": "auto"}, "tool_choice", id="tool_choice"),
        pytest.param({"response_format": {"type": "json_object"}}, "response_format", id="json"),
        pytest.param({"logprobs": True}, "logprobs", id="logprobs"),
        pytest.param({"top_logprobs": 3}, "top_logprobs", id="top_logprobs"),
        pytest.param({"modalities": ["text", "audio"]}, "modalities", id="audio"),
        pytest.param({"reasoning_effort": "high"}, "reasoning_effort", id="reasoning"),
        pytest.param({"store": True}, "store", id="store"),
        pytest.param({"prediction": {"type": "content"}}, "prediction", id="prediction"),
        pytest.param({"service_tier": "priority"}, "service_tier", id="service_tier"),
        pytest.param({"service_tier": 5}, "service_tier", id="a number as service tier"),
        pytest.param(
            {"prompt_cache_retention": "24h"}, "prompt_cache_retention", id="cache retention"
        ),
        pytest.param(
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            id="obfuscation",
        ),
        pytest.param({"messages": []}, "messages", id="no messages"),
        pytest.param({"messages": "hi"}, "messages", id="a text for messages"),
        pytest.param(
            {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", id="a role"
        ),
        pytest.param(
            {"messages": [{"content": "x"}]}, "messages[0].role", id="a message without role"
        ),
        pytest.param(
            {"messages": [{"role": "user"}]}, "messages[0].content", id="a message without content"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages[0].content[0].type",
            id="an image",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "x", "name": "bob"}]},
            "messages[0].name",
            id="a name",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            id="tool calls",
        ),
        pytest.param(
            {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", id="two bounds"
        ),
        pytest.param({"prompt": "x"}, "prompt", id="a prompt beside messages"),
    ],
)
def test_an_invalid_chat_is_rejected_by_field(fields: dict[str, Any], param: str) -> None:
    error = rejection(chat(**fields))
    assert error.param == param
    assert param.split("[", maxsplit=1)[0] in error.message


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ({"role": "robot", "content": "x"}, "system, developer, user, assistant or tool"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "send text"),
    ],
    ids=["a role", "an image"],
)
def test_an_unsupported_value_is_named_with_the_supported_ones(
    message: dict[str, Any], values: str
) -> None:
    error = rejection(chat(messages=[{"role": "user", "content": "x"}, message]))
    assert str(error.param).startswith("messages[1].")
    assert ("'robot'" in error.message) != ("'image_url'" in error.message)
    assert values in error.message


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="cut short"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b'"text"', id="a text"),
        pytest.param(b"<html>", id="HTML"),
        pytest.param(b'{"model": "chat", "prompt": }', id="no value"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(b'{"model": "\xff", "prompt": "x"}', id="a string that is not UTF-8"),
        pytest.param(b'{"model": "chat", "prompt": "\\ud800"}', id="half a surrogate pair"),
        pytest.param(b'{"model": "chat", "prompt": ' + b"[" * 100_000, id="nested deeply"),
        pytest.param(b'{"model": "chat", "n": ' + b"[" * 100_000, id="nested deeply elsewhere"),
        pytest.param(b'{"model": "chat", "prompt": NaN}', id="NaN"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_rejected(data: bytes) -> None:
    assert len(rejection(data).message) < 300


@pytest.mark.parametrize(
    ("data", "field"),
    [
        pytest.param(b"|\xff\xfe", None, id="the whole body"),
        pytest.param(b'{"model": "|\xff", "prompt": "x"}', "model", id="the first field"),
        pytest.param(b'{"model":"chat","prompt":"caf|\xe9"}', "prompt", id="Latin-1"),
        pytest.param(b'{"model":"chat","prompt":"|\xed\xa0\x80"}', "prompt", id="a surrogate"),
        pytest.param(b'{"model":"chat","prompt":"a|\xe2\x82"}', "prompt", id="half a character"),
        pytest.param(b'{"prompt":"\xc3\xa9|\xff"}', "prompt", id="after another character"),
        pytest.param(b'{"prompt":"x","|\xff":1}', None, id="a name"),
        pytest.param(b'{"stop" : ["a", "|\xff"]}', "stop[1]", id="a list"),
        pytest.param(b'{"a":{"b":[1]},"user":"|\xff"}', "user", id="after an object"),
        pytest.param(b'{"user":"\\", \\"n\\": |\xff"}', "user", id="a text like a field"),
        pytest.param(b']{"user":"|\xff"}', "user", id="brackets that do not match"),
        pytest.param(
            b'{"messages":[{"role":"user"},{"role":"user","content":[{"text":"|\x80"}]}]}',
            "messages[1].content[0].text",
            id="a message",
        ),
        pytest.param(
            b'{"tools":[{"function":{"parameters":{"a\\"b":"|\xc0\xaf"}}}]}',
            'tools[0].function.parameters.a\\"b',
            id="a field that is not decoded",
        ),
        pytest.param(b'{"%b":"|\xff"}' % (b"n" * 200), "n" * 100, id="a long name"),
    ],
)
def test_a_body_that_is_not_utf8_names_the_field_and_the_byte(
    data: bytes, field: str | None
) -> None:
    """A bar marks the first byte that is not UTF-8."""
    error = rejection(data.replace(b"|", b""))
    where = "" if field is None else f"{field}: "
    at = data.index(b"|")
    assert error.param == field
    assert error.message == f"{where}byte {at} of the body is not UTF-8; encode the body as UTF-8"


@pytest.mark.parametrize("offset", range(-3, 4))
@pytest.mark.parametrize("wrong", [b"", b"\xff", b"\xe2\x82"], ids=["valid", "byte", "character"])
def test_a_large_body_is_decoded_in_slices(offset: int, wrong: bytes) -> None:
    """Characters and wrong bytes before and after the border of a slice of 256 KiB."""
    head = b'{"prompt":"'
    before = head + b"x" * ((1 << 18) + offset - len(head)) + "€".encode()
    if wrong:
        with pytest.raises(APIError, match=rf"^prompt: byte {len(before)} of the body is not "):
            require_utf8(before + wrong + b'"}')
    else:
        require_utf8(before + b'"}')


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity"])
def test_a_number_that_is_not_finite_names_its_field(value: bytes) -> None:
    error = rejection(b'{"model": "chat", "prompt": "x", "temperature" : %b}' % value)
    assert error.param == "temperature"
    assert error.message == f"temperature is {value.decode()}, but must be a finite number"


def test_a_field_within_a_text_is_not_named() -> None:
    error = rejection(b'{"model": "chat", "prompt": "\\"seed\\": NaN", "user": -}')
    assert error.message.startswith("the body is not JSON")


def test_an_unknown_model_is_404_and_the_served_one_is_named() -> None:
    error = rejection(completion(model="gpt-4"), status=404)
    assert error.code == "model_not_found"
    assert "'chat'" in error.message


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(completion(prompt="w " * 100), id="text"),
        pytest.param(completion(prompt=[1] * 100), id="ids"),
        pytest.param(chat(messages=[{"role": "user", "content": "w " * 100}]), id="chat"),
        pytest.param(completion(prompt="w " * 60, max_tokens=41), id="prompt and answer"),
    ],
)
def test_a_request_above_the_context_is_rejected_with_openais_code(body: dict[str, Any]) -> None:
    assert rejection(body).code == "context_length_exceeded"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_the_output_is_named_as_the_client_named_it(field: str) -> None:
    error = rejection(chat(**{field: 1000}))
    assert error.param == field
    assert error.message.startswith(f"{field} is 1000")
    error = rejection(chat(**{field: 3, "min_tokens": 5}))
    assert f"but {field} is 3" in error.message


def test_a_request_that_fills_the_context_is_valid() -> None:
    assert read(completion(prompt="w " * 60, max_tokens=40)).submit.max_output_tokens == 40
    assert read(completion(prompt="w " * 99)).submit.max_output_tokens is None


def test_the_class_comes_from_the_header_the_body_or_the_manifest() -> None:
    assert read(completion()).submit.slo_class == "interactive"
    assert read(completion(slo_class="batch")).submit.slo_class == "batch"
    submit = read(completion(), {"x-slo-class": "batch"}).submit
    assert submit.slo_class == "batch"
    assert submit.targets.ttft_ns == 30_000 * NS_PER_MS
    assert submit.targets.tbt_p99_ns == 900 * NS_PER_MS


def test_two_different_classes_are_rejected() -> None:
    error = rejection(completion(slo_class="batch"), {"X-SLO-Class": "interactive"})
    assert error.param == "slo_class"


def test_an_unknown_class_is_rejected_with_the_names_of_the_classes() -> None:
    error = rejection(completion(), {"X-SLO-Class": "gold"})
    assert "interactive, batch" in error.message
    assert error.param == "X-SLO-Class"


def test_a_requests_own_targets_override_its_class() -> None:
    headers = {"X-SLO-TTFT-Ms": "250.5", "X-SLO-E2E-Ms": "2000", "X-Priority": "-3"}
    submit = read(completion(), headers).submit
    assert submit.targets.ttft_ns == 250_500_000
    assert submit.targets.tpot_ns == 50 * NS_PER_MS
    assert submit.targets.e2e_ns == 2000 * NS_PER_MS
    assert submit.priority == -3


def test_only_the_executor_gets_the_true_length() -> None:
    hidden = read(completion(), {"X-Goodput-Output-Tokens": "33"}).submit
    assert hidden.executor.output_tokens == 33
    open_ = read(completion()).submit
    for field in hidden.__struct_fields__:
        if field != "executor":
            assert getattr(hidden, field) == getattr(open_, field)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-SLO-TTFT-Ms", "0"),
        ("X-SLO-TTFT-Ms", "-5"),
        ("X-SLO-TPOT-Ms", "nan"),
        ("X-SLO-TPOT-Ms", "50ms"),
        ("X-SLO-E2E-Ms", "1e9"),
        ("X-SLO-E2E-Ms", "99999999999"),
        ("X-SLO-E2E-Ms", ""),
        ("X-Priority", "high"),
        ("X-Priority", "1.5"),
        ("X-Priority", "2147483648"),
        ("X-Priority", "9" * 5000),
        ("X-Goodput-Output-Tokens", "0"),
        ("X-Goodput-Output-Tokens", "-1"),
        ("X-Goodput-Output-Tokens", "many"),
        ("X-Request-Id", "a b"),
        ("X-Request-Id", "x" * 129),
        ("X-Request-Id", ""),
    ],
)
def test_an_invalid_header_is_rejected_by_name(name: str, value: str) -> None:
    error = rejection(completion(), {name: value})
    assert error.param == name
    assert name in error.message
    assert len(error.message) < 300


def test_stop_strings_and_limits_are_parsed() -> None:
    call = read(completion(stop="\n", min_tokens=2, max_tokens=9, ignore_eos=True))
    assert (call.stops, call.min_tokens) == (("\n",), 2)
    assert call.submit.executor.min_tokens == 2
    assert call.submit.executor.ignore_eos
    assert read(chat(stop=["a", "b"], max_completion_tokens=4)).stops == ("a", "b")
    assert read(chat(max_completion_tokens=4)).submit.max_output_tokens == 4


SIZE = 4 << 20


def repeated(before: bytes, part: bytes, after: bytes) -> bytes:
    """A body of `SIZE` bytes."""
    return before + part * (SIZE // len(part)) + part.rstrip(b",") + after


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(repeated(b'{"model":"chat","prompt":[', b"[],", b"]}"), id="prompts"),
        pytest.param(repeated(b'{"model":"chat","prompt":[[', b"1000,", b"]]}"), id="one prompt"),
        pytest.param(repeated(b'{"model":"chat","prompt":[', b"1,", b"]}"), id="token ids"),
        pytest.param(
            repeated(b'{"model":"chat","prompt":"x","logit_bias":[', b"{},", b"]}"), id="objects"
        ),
        pytest.param(
            repeated(b'{"model":"chat","prompt":"x","tools":[', b"1,", b"]}"), id="numbers"
        ),
        pytest.param(
            repeated(b'{"model":"chat","prompt":"x","stop":[', b'"ab",', b"]}"), id="stops"
        ),
        pytest.param(
            repeated(b'{"model":"chat","messages":[', b'{"role":"user"},', b"]}"), id="messages"
        ),
        pytest.param(
            repeated(
                b'{"model":"chat","messages":[{"role":"user","content":[',
                b'{"type":"text","text":""},',
                b"]}]}",
            ),
            id="parts",
        ),
        pytest.param(
            repeated(
                b'{"model":"chat","messages":[{"role":"user","content":""}],"metadata":{',
                b'"a":"b",',
                b"}}",
            ),
            id="metadata",
        ),
    ],
)
def test_a_large_invalid_body_is_rejected_with_little_memory(data: bytes) -> None:
    """Complete decoding takes 10 to 30 times the size of these bodies."""
    tracemalloc.start()
    try:
        rejection(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * len(data)


def test_brackets_inside_a_string_do_not_count() -> None:
    limits = PromptLimits(vocab_size=1000, max_model_tokens=1 << 20, block_size=4)
    text = '[{\\"' * 400_000
    body = json.dumps(completion(prompt=text)).encode()
    assert replace(PARSER, limits=limits).parse(
        body, {}, chat=False, rid=1, arrival_ns=0
    ).submit.input_tokens == len(encode(text))
