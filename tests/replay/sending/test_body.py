"""Bodies and headers of rendered requests, and how they pin output lengths."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from goodput_core.contract import (
    HEADER_OUTPUT_TOKENS,
    HEADER_PRIORITY,
    HEADER_REQUEST_ID,
    HEADER_SLO_CLASS,
    HEADER_SLO_TPOT_MS,
    HEADER_SLO_TTFT_MS,
)
from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Endpoint
from goodput_replay.runs.summary import LengthPinning
from goodput_replay.sending.body import RequestRenderer
from goodput_replay.sending.prompts import TokenIdPrompts, WordPrompts

if TYPE_CHECKING:
    from tests.replay.sending.builders import Planned

    from goodput_replay.plan import PlannedRequest


def renderer(
    pinning: LengthPinning = LengthPinning.HEADER, endpoint: Endpoint = Endpoint.COMPLETIONS
) -> RequestRenderer:
    prompts = (
        TokenIdPrompts(b"s")
        if endpoint is Endpoint.COMPLETIONS
        else WordPrompts(b"s", overhead_tokens=7)
    )
    return RequestRenderer(
        endpoint=endpoint, prompts=prompts, pinning=pinning, model_for=lambda name: f"served-{name}"
    )


def body_of(request: PlannedRequest, **options: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(renderer(**options).render(request).body)
    return decoded


def test_a_completion_requests_a_stream_with_usage(planned: Planned) -> None:
    body = body_of(planned(model_name="x"))
    assert len(body.pop("prompt")) == 8
    assert body == {
        "model": "served-x",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_chat_has_one_user_message(planned: Planned) -> None:
    body = body_of(planned(), endpoint=Endpoint.CHAT)
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 1
    assert "prompt" not in body


@pytest.mark.parametrize("bound", [None, 4096])
def test_a_goodput_engine_gets_the_length_in_a_header_and_never_in_the_body(
    planned: Planned, bound: int | None
) -> None:
    short, long = (
        renderer().render(planned(output_tokens=n, max_output_tokens=bound)) for n in (3, 999)
    )
    assert short.body == long.body
    assert json.loads(short.body).get("max_tokens") == bound
    assert (short.headers[HEADER_OUTPUT_TOKENS], long.headers[HEADER_OUTPUT_TOKENS]) == ("3", "999")


def test_another_server_gets_the_length_as_bounds(planned: Planned) -> None:
    request = planned(output_tokens=77, max_output_tokens=4096)
    body = body_of(request, pinning=LengthPinning.MAX_TOKENS)
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (77, 77, True)
    headers = renderer(LengthPinning.MAX_TOKENS).render(request).headers
    assert HEADER_OUTPUT_TOKENS not in headers


def test_a_length_that_is_not_pinned_is_not_sent(planned: Planned) -> None:
    request = renderer(LengthPinning.NONE).render(planned(output_tokens=777))
    assert b"777" not in request.body.partition(b'"prompt"')[0]
    assert "777" not in request.headers.values()


def test_class_targets_and_priority_of_a_row_are_headers(planned: Planned) -> None:
    targets = Targets(ttft_ns=1_500_000, tpot_ns=50_000_000)
    headers = renderer().render(planned(slo_class="fast", targets=targets, priority=-2)).headers
    assert headers[HEADER_SLO_CLASS] == "fast"
    assert headers[HEADER_SLO_TTFT_MS] == "1.5"
    assert headers[HEADER_SLO_TPOT_MS] == "50"
    assert headers[HEADER_PRIORITY] == "-2"


def test_missing_values_of_a_row_have_no_header(planned: Planned) -> None:
    assert set(renderer().render(planned()).headers) == {HEADER_REQUEST_ID, HEADER_OUTPUT_TOKENS}


@pytest.mark.parametrize(
    "name",
    ["a\r\nX-Evil: 1", "naïve", "x" * 500, "\x00"],
    ids=["injection", "latin", "long", "nul"],
)
def test_any_request_id_becomes_a_valid_header(planned: Planned, name: str) -> None:
    value = renderer().render(planned(request_id=name)).headers[HEADER_REQUEST_ID]
    assert value.isascii()
    assert value.isprintable()
    assert len(value) <= 128
