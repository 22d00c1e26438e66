"""Foreign servers: what they send is counted, named and never becomes a verdict by mistake."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from tests.builders.traces import steady_rows
from tests.replay.sending.stand_ins import (
    DONE,
    StandIn,
    delta,
    event,
    finish,
    running,
    text,
    tokens,
    usage,
)
from yarl import URL

from goodput_core.slo.conformance import Deviation
from goodput_core.slo.judging import JudgementKind, MissReason, judge, judge_favourably
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import SLOClass, Targets
from goodput_core.slo.verdict import Reason, Verdict, VerdictKind, decide
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.openai.sse import TokenObserver
from goodput_replay.runs.record_rows import read_records
from goodput_replay.runs.summary import read_summary
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.client.request import RequestClient, SendingPolicy
from goodput_replay.statistics.evidence import gather

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.replay.sending.builders import Prepared, WriteTrace
    from tests.replay.sending.stand_ins import Answer

    from goodput_replay.sending.body import PreparedRequest

LENGTH = 8
"""Output tokens of every request."""
EARLY, CUT = Deviation.ENDED_EARLY, Deviation.CUT_OFF
EXCEEDED, WRONG = Deviation.EXCEEDED_LIMIT, Deviation.WRONG_USAGE
NO_USAGE, SEVERAL = Deviation.NO_USAGE, Deviation.SEVERAL_TOKENS_PER_EVENT


def body(*pieces: bytes) -> Answer:
    return lambda _count: pieces


def complete(pieces: Iterable[bytes], count: int, reported: object = None) -> list[bytes]:
    """Complete the events of an output with a finish reason, a usage and [DONE]."""
    return [*pieces, finish(), usage(count if reported is None else reported), DONE]


def with_usages(count: int) -> Iterable[bytes]:
    """Report the usage so far in every event."""
    for number in range(1, count + 1):
        reason = "length" if number == count else None
        yield text(" a", reason, usage={"completion_tokens": number})
    yield DONE


def chat(count: int) -> Iterable[bytes]:
    """Reason first, then respond, as vLLM does with `include_usage`."""
    yield delta(role="assistant", content="")
    yield event({"choices": [], "usage": None})
    for _ in range(count // 2):
        yield delta(reasoning_content="hm", content=None)
    for _ in range(count - count // 2):
        yield delta(content=" a")
    yield delta("length")
    yield usage(count)
    yield DONE


def held_back(count: int) -> Iterable[bytes]:
    """Hold back the text of half of the tokens, also of the last one, as vLLM does."""
    yield delta(role="assistant", content="")
    for number in range(count - 1):
        yield delta(content="ab" if number % 2 == 0 else "")
    yield delta("stop", content="")
    yield usage(count)
    yield DONE


def spoiled(events: Iterable[bytes], old: bytes, new: bytes) -> list[bytes]:
    """Replace bytes of a response."""
    return [b"".join(events).replace(old, new)]


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


# Servers whose responses are judged without a doubt: answer, tokens, deviations.
UNDERSTOOD: dict[str, tuple[Answer, int, tuple[Deviation, ...]]] = {
    "usage in the last event": (lambda n: complete(tokens(n), n), LENGTH, ()),
    "usage so far in every event": (with_usages, LENGTH, ()),
    "a role, null usages and reasoning": (chat, LENGTH, ()),
    "two tokens an event": (lambda n: complete(tokens(n, per_event=2), n), LENGTH, (SEVERAL,)),
    "all tokens in one event": (lambda n: complete(tokens(n, per_event=n), n), LENGTH, (SEVERAL,)),
    "a usage of 80 for 8 tokens": (lambda n: complete(tokens(n), n, 10 * n), LENGTH, (WRONG,)),
    "a negative usage": (lambda n: complete(tokens(n), n, -3), LENGTH, (WRONG,)),
    "a usage in words": (lambda n: complete(tokens(n), n, "eight"), LENGTH, (WRONG,)),
    "a usage of 10^30": (lambda n: complete(tokens(n), n, 10**30), LENGTH, (WRONG,)),
    "no usage": (lambda n: [*tokens(n), finish(), DONE], LENGTH, (NO_USAGE,)),
    "a null usage": (
        lambda n: [*tokens(n), event({"choices": [], "usage": None}), finish(), DONE],
        LENGTH,
        (NO_USAGE,),
    ),
    "no [DONE]": (lambda n: complete(tokens(n), n)[:-1], LENGTH, ()),
    "no finish reason": (lambda n: [*tokens(n), usage(n), DONE], LENGTH, ()),
    "a padded [DONE]": (lambda n: [*tokens(n), usage(n), event(b" [DONE] ")], LENGTH, ()),
    "tokens without text": (
        lambda n: complete([text(""), text(""), *tokens(n - 3), text("")], n),
        LENGTH,
        (SEVERAL,),
    ),
    "tokens whose text is held back": (held_back, LENGTH, ()),
    "comments between the events": (
        lambda n: [b": ping\n\n", *complete((b": ping\n\n" + t for t in tokens(n)), n)],
        LENGTH,
        (),
    ),
    "events without data": (
        lambda n: [b"data:\n\n", *complete((t + b"data: \n\n" for t in tokens(n)), n)],
        LENGTH,
        (),
    ),
    "named events": (
        lambda n: complete((b"event: completion\nid: 7\n" + t for t in tokens(n)), n),
        LENGTH,
        (),
    ),
    "CRLF": (lambda n: spoiled(complete(tokens(n), n), b"\n", b"\r\n"), LENGTH, ()),
    "no space after data": (
        lambda n: spoiled(complete(tokens(n), n), b"data: ", b"data:"),
        LENGTH,
        (),
    ),
    "UTF-8 split inside a character": (
        lambda n: in_pieces(
            b"".join(complete((t.replace(b" a", "é…🙂".encode()) for t in tokens(n)), n)), 5
        ),
        LENGTH,
        (),
    ),
    "parts of content": (
        lambda n: complete([delta(content=[{"type": "text", "text": "a"}])] * n, n),
        LENGTH,
        (),
    ),
    "tool calls": (
        lambda n: complete([delta(tool_calls=[{"index": 0}])] * n, n),
        LENGTH,
        (),
    ),
    "null choices": (
        lambda n: complete([*tokens(n), event({"choices": None})], n),
        LENGTH,
        (),
    ),
    "keep-alive events of several forms": (
        lambda n: [
            b": OPENROUTER PROCESSING\n\n",
            b"event: ping\ndata: 2026-03-04T05:06:07Z\n\n",
            b'event: heartbeat\ndata: {"seconds": 3}\n\n',
            event({}),
            event({"type": "ping"}),
            event({"object": "keepalive"}),
            *complete(tokens(n), n),
        ],
        LENGTH,
        (),
    ),
    "Azure's filter results": (
        lambda n: [
            event({"choices": [], "prompt_filter_results": [{"prompt_index": 0}]}),
            event({"prompt_filter_results": [{"prompt_index": 0}]}),
            *tokens(n),
            event({"choices": [{"finish_reason": None, "content_filter_offsets": {}}]}),
            *complete([], n),
        ],
        LENGTH,
        (),
    ),
    "llama.cpp's timings": (
        lambda n: complete([*tokens(n), event({"timings": {"predicted_n": n}})], n),
        LENGTH,
        (),
    ),
    "a usage without choices": (
        lambda n: [*tokens(n), finish(), event({"usage": {"completion_tokens": n}}), DONE],
        LENGTH,
        (),
    ),
    "an event of a completion without choices": (
        lambda n: complete([event({"object": "chat.completion.chunk"}), *tokens(n)], n),
        LENGTH,
        (),
    ),
    "an empty error in every event": (
        lambda n: complete([text(" a", error=None, errors=[], detail=None)] * n, n),
        LENGTH,
        (),
    ),
    "NaN in a field that is not used": (
        lambda n: complete([text(" a", logprobs={"token": [float("nan")]})] * n, n),
        LENGTH,
        (),
    ),
    "NaN and minus infinity beside escaped texts": (
        lambda n: complete([text('NaN "Infinity" é', low=float("-inf"), x=float("nan"))] * n, n),
        LENGTH,
        (),
    ),
    "the usage is cut off": (lambda n: [*tokens(n), finish(), usage(n)[:20]], LENGTH, (NO_USAGE,)),
    "a finish reason in capitals": (
        lambda n: [*tokens(n), finish("STOP"), usage(n), DONE],
        LENGTH,
        (),
    ),
}


async def respond(
    server: StandIn, request: PreparedRequest, *, pinned: bool = True
) -> RequestRecord:
    body = json.dumps({"stream": True, "max_tokens": request.planned.output_tokens}).encode()
    request = replace(request, body=body)
    async with running(server) as url, open_session({}) as session:
        client = RequestClient(
            session,
            [URL(f"{url}/v1/completions")],
            SendingPolicy(timeout_ns=60 * NS_PER_S, pinned=pinned),
        )
        return await client.run(request, time.monotonic_ns())


@pytest.mark.parametrize(("answer", "count", "deviations"), UNDERSTOOD.values(), ids=UNDERSTOOD)
async def test_the_tokens_of_a_foreign_server_are_counted(
    prepared: Prepared, answer: Answer, count: int, deviations: tuple[Deviation, ...]
) -> None:
    record = await respond(StandIn(answer=answer), prepared(output_tokens=LENGTH))
    assert (record.outcome, record.output_tokens) == (Outcome.OK, count)
    assert record.most_output_tokens is None
    assert record.deviations == deviations
    assert record.first_token_ns is not None
    if SEVERAL not in deviations:
        assert len(record.gaps_us) == count - 1
    observer = TokenObserver(keep_gaps=True)
    for piece in answer(LENGTH):
        observer.feed(piece, 1)
    observer.end(2)
    assert len(observer.gaps_us) == len(record.gaps_us), "the router counts as the replayer does"


async def test_a_server_that_ends_no_response_is_not_waited_for(prepared: Prepared) -> None:
    silent = StandIn(answer=lambda n: [*tokens(n), finish()], keeps_open=True)
    record = await respond(silent, prepared(output_tokens=LENGTH))
    assert (record.outcome, record.output_tokens) == (Outcome.OK, LENGTH)
    assert record.e2e_ns is not None
    assert record.e2e_ns < 4 * NS_PER_S, "the response ended with its finish reason"


ERRORS: dict[str, tuple[Answer, Outcome, str]] = {
    "an object of type error": (
        body(*tokens(2), event({"object": "error", "message": "out of memory", "code": 500}), DONE),
        Outcome.ERROR,
        "the stream reported: out of memory",
    ),
    "an event named error": (
        body(*tokens(2), b'event: error\ndata: {"message": "out of memory"}\n\n', DONE),
        Outcome.ERROR,
        "the stream reported: out of memory",
    ),
    "an event named error, in pieces": (
        body(b"event: error\n", b'data: {"message": "out ', b'of memory"}\n', b"\n", DONE),
        Outcome.ERROR,
        "the stream reported: out of memory",
    ),
    "an event named error, in words": (
        body(b"event: error\ndata: out of memory\n\n"),
        Outcome.ERROR,
        "the stream reported: out of memory",
    ),
    "an event named error, without data": (
        body(b"event: error\n\n", finish(), DONE),
        Outcome.ERROR,
        "the stream reported: an error",
    ),
    "a finish reason error": (
        body(*tokens(2), finish("error"), DONE),
        Outcome.ERROR,
        "the stream ended with 'error'",
    ),
    "a finish reason abort": (
        body(*tokens(2), finish("abort"), DONE),
        Outcome.ERROR,
        "the stream ended with 'abort'",
    ),
    "a finish reason that begins with error": (
        body(*tokens(LENGTH), finish("error: oom"), usage(LENGTH), DONE),
        Outcome.ERROR,
        "the stream ended with 'error: oom'",
    ),
    "a finish reason Aborted": (
        body(*tokens(LENGTH), finish("Aborted"), usage(LENGTH), DONE),
        Outcome.ERROR,
        "the stream ended with 'Aborted'",
    ),
    "FastAPI's detail after a complete output": (
        body(*complete(tokens(LENGTH), LENGTH)[:-1], event({"detail": "worker lost"}), DONE),
        Outcome.ERROR,
        "the stream reported: worker lost",
    ),
    "FastAPI's list of details": (
        body(*tokens(LENGTH), finish(), event({"detail": [{"msg": "field required"}]}), DONE),
        Outcome.ERROR,
        'the stream reported: {"detail": [{"msg": "field required"}]}',
    ),
    "a list of errors": (
        body(*complete(tokens(LENGTH), LENGTH)[:-1], event({"errors": ["out of memory"]}), DONE),
        Outcome.ERROR,
        'the stream reported: {"error":["out of memory"]}',
    ),
    "errors beside choices": (
        body(*tokens(LENGTH), event({"choices": [], "errors": [{"code": 500}]}), finish(), DONE),
        Outcome.ERROR,
        'the stream reported: {"error":[{"code": 500}]}',
    ),
    "errors of a choice": (
        body(*tokens(LENGTH), event({"choices": [{"errors": ["oom"], "text": ""}]}), finish()),
        Outcome.ERROR,
        'the stream reported: {"error":["oom"]}',
    ),
    "a message and a code": (
        body(*complete(tokens(LENGTH), LENGTH)[:-1], event({"message": "oom", "code": 500})),
        Outcome.ERROR,
        "the stream reported: oom",
    ),
    "a message with NaN": (
        body(*complete(tokens(LENGTH), LENGTH)[:-1], event({"message": "oom", "x": float("nan")})),
        Outcome.ERROR,
        "the stream reported: oom",
    ),
    "an overload beside no error": (
        body(event({"message": "busy", "code": 429}), *complete(tokens(LENGTH), LENGTH)),
        Outcome.SHED,
        "the stream reported: busy",
    ),
    "an event that is of no completion": (
        body(*complete(tokens(LENGTH), LENGTH)[:-1], event({"status": "FAILED"}), DONE),
        Outcome.ERROR,
        'the stream reported: {"status": "FAILED"}',
    ),
    "an error as the last event, without its blank line": (
        body(*complete(tokens(LENGTH), LENGTH)[:-1], event({"error": "late"})[:-1]),
        Outcome.ERROR,
        "the stream reported: late",
    ),
    "an error of a choice": (
        body(event({"choices": [{"text": "", "error": {"message": "overheated"}}]}), DONE),
        Outcome.ERROR,
        "the stream reported: overheated",
    ),
    "an error as text": (
        body(event({"error": "out of memory", "error_type": "generation"})),
        Outcome.ERROR,
        "the stream reported: out of memory",
    ),
    "an overload": (
        body(event({"object": "error", "message": "queue full", "code": 429})),
        Outcome.SHED,
        "the stream reported: queue full",
    ),
    "an overload in an event named error": (
        body(b'event: error\ndata: {"error": {"message": "full", "type": "rate_limit_error"}}\n\n'),
        Outcome.SHED,
        "the stream reported: full",
    ),
}


@pytest.mark.parametrize(("answer", "outcome", "detail"), ERRORS.values(), ids=ERRORS)
async def test_an_error_in_a_stream_with_status_200_is_a_failure(
    prepared: Prepared, answer: Answer, outcome: Outcome, detail: str
) -> None:
    record = await respond(StandIn(answer=answer), prepared(output_tokens=LENGTH))
    assert (record.outcome, record.status) == (outcome, 200)
    assert record.detail.startswith(detail)
    assert record.deviations == (Deviation.ERROR_IN_STREAM,)


REPORTED: dict[str, tuple[object, int, bool]] = {
    "a wrong key as a number": (401, 401, True),
    "a prompt that is too long as a text": ("400", 400, True),
    "a generation that failed": (424, 424, False),
    "an error of the server": (500, 200, False),
    "a word": ("invalid_api_key", 200, False),
    "true": (True, 200, False),
    "a number of 40 digits": ("4" * 40, 200, False),
    "no status": (4000, 200, False),
    "a fraction": (401.5, 200, False),
}


@pytest.mark.parametrize(("code", "status", "is_client_error"), REPORTED.values(), ids=REPORTED)
async def test_an_error_before_the_first_token_has_the_status_in_its_code(
    prepared: Prepared, code: object, status: int, is_client_error: bool
) -> None:
    error = event({"error": {"message": "no", "code": code}})
    record = await respond(StandIn(answer=body(error, DONE)), prepared(output_tokens=LENGTH))
    assert (record.outcome, record.status) == (Outcome.ERROR, status)
    assert record.client_error is is_client_error
    late = await respond(StandIn(answer=body(*tokens(2), error)), prepared(output_tokens=LENGTH))
    assert (late.outcome, late.status, late.client_error) == (Outcome.ERROR, 200, False)


TYPES: dict[str, tuple[dict[str, object], int]] = {
    "a prompt that is too long": (
        {"type": "invalid_request_error", "code": "context_length_exceeded"},
        400,
    ),
    "a number that is no status": ({"type": "invalid_request_error", "code": 20015}, 400),
    "a number of other errors as text": ({"type": "invalid_request_error", "code": "001"}, 400),
    "a truth value": ({"type": "invalid_request_error", "code": False}, 400),
    "a wrong key": ({"type": "authentication_error"}, 401),
    "an unknown model": ({"type": "not_found_error", "code": None}, 404),
    "an error of the server that is called one of the request": (
        {"type": "invalid_request_error", "code": 500},
        200,
    ),
    "an error of the server": ({"type": "server_error"}, 200),
    "no type": ({"type": ["invalid_request_error"]}, 200),
}


@pytest.mark.parametrize(("fields", "status"), TYPES.values(), ids=TYPES)
async def test_an_error_without_a_status_has_the_one_of_its_type(
    prepared: Prepared, fields: dict[str, object], status: int
) -> None:
    error = event({"error": {"message": "no", **fields}})
    record = await respond(StandIn(answer=body(error, DONE)), prepared(output_tokens=LENGTH))
    assert (record.outcome, record.status) == (Outcome.ERROR, status)
    assert record.client_error is (status != 200)


async def test_an_unknown_finish_reason_leaves_doubt(prepared: Prepared) -> None:
    answer = body(*tokens(LENGTH), finish("insufficient_system_resource"), usage(LENGTH), DONE)
    record = await respond(StandIn(answer=answer), prepared(output_tokens=LENGTH))
    assert (record.outcome, record.output_tokens) == (Outcome.ERROR, LENGTH)
    assert record.detail == "the stream ended with 'insufficient_system_resource'"
    assert record.deviations == (Deviation.UNKNOWN_FINISH_REASON,)
    targets = Targets(ttft_ns=NS_PER_S)
    assert judge(record, targets).kind is JudgementKind.MISSED
    assert judge_favourably(record, targets).kind is JudgementKind.ATTAINED
    assert judge_favourably(record, Targets(ttft_ns=1)).reasons == (MissReason.TTFT,)


@pytest.mark.parametrize(
    "word", ['"error"', '{"error": "x"}', '\\"object\\": \\"error\\"', "event: error"]
)
async def test_a_text_about_errors_is_a_text(prepared: Prepared, word: str) -> None:
    answer = body(*complete([text(word)] * LENGTH, LENGTH), event({"error": None, "choices": []}))
    record = await respond(StandIn(answer=answer), prepared(output_tokens=LENGTH))
    assert (record.outcome, record.output_tokens) == (Outcome.OK, LENGTH)


COMPLETION = json.dumps({"object": "text_completion", "choices": [{"text": "a b c"}]}).encode()
BODIES: dict[str, tuple[StandIn, str, Deviation]] = {
    "a JSON body": (
        StandIn(answer=body(COMPLETION), content_type="application/json"),
        "the response is application/json, not an event stream",
        Deviation.NOT_STREAMED,
    ),
    "a JSON body of a megabyte": (
        StandIn(answer=body(COMPLETION, b" " * (1 << 20)), content_type="application/json"),
        "the response is application/json, not an event stream",
        Deviation.NOT_STREAMED,
    ),
    "gzip": (
        StandIn(answer=lambda n: complete(tokens(n), n), compressed=True),
        "the response is compressed (gzip), which was not requested",
        Deviation.COMPRESSED,
    ),
    "an error in a JSON body": (
        StandIn(answer=body(b'{"error": {"message": "boom"}}'), content_type="application/json"),
        "the response reported: boom",
        Deviation.ERROR_IN_STREAM,
    ),
}


@pytest.mark.parametrize(("server", "detail", "deviation"), BODIES.values(), ids=BODIES)
async def test_a_response_that_is_no_plain_stream_is_an_error_and_named(
    prepared: Prepared, server: StandIn, detail: str, deviation: Deviation
) -> None:
    record = await respond(server, prepared(output_tokens=LENGTH))
    assert (record.outcome, record.detail) == (Outcome.ERROR, detail)
    assert record.deviations == (deviation,)


SLO = SLOClass(name="chat", ttft_ms=5_000, tpot_ms=50, objective=Fraction("0.99"))
PERIOD_NS = 100 * NS_PER_MS


def five_minutes_of(record: RequestRecord, *, period_ns: int = PERIOD_NS) -> Verdict:
    """Judge five minutes of requests with this response, whose events came at equal distances."""
    events = len(record.gaps_us) + 1
    paced = replace(
        record,
        slo_class="chat",
        sent_ns=0,
        first_token_ns=None if record.first_token_ns is None else period_ns,
        last_token_ns=None if record.last_token_ns is None else events * period_ns,
        end_ns=events * period_ns,
        gaps_us=(period_ns // 1000,) * (events - 1),
    )

    def at(second: int) -> RequestRecord:
        start = second * NS_PER_S
        times = {
            name: at_ns + start
            for name in ("scheduled_ns", "sent_ns", "first_token_ns", "last_token_ns", "end_ns")
            if (at_ns := getattr(paced, name)) is not None
        }
        return replace(paced, request_id=str(second), **times)

    found = gather(map(at, range(300)), classes=[SLO], window_ns=300 * NS_PER_S)
    return decide(found.classes, found.validity)


VERDICTS: dict[str, tuple[Answer, int, VerdictKind, Reason]] = {
    "8 events of 40 ms pass": (
        lambda n: complete(tokens(n), n), 40, VerdictKind.PASS, Reason.ATTAINED,
    ),
    "8 events of 103 ms fail": (
        lambda n: complete(tokens(n), n), 103, VerdictKind.FAIL, Reason.BELOW_OBJECTIVE,
    ),
    "a usage of 80 for 8 events of 103 ms fails": (
        lambda n: complete(tokens(n), n, 10 * n),
        103, VerdictKind.FAIL, Reason.BELOW_OBJECTIVE,
    ),
    "two tokens an event of 80 ms pass": (
        lambda n: complete(tokens(n, per_event=2), n), 80, VerdictKind.PASS, Reason.ATTAINED,
    ),
    "two tokens an event without usage are not understood": (
        lambda n: [*tokens(n, per_event=2), finish(), DONE],
        40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "two tokens an event without usage, too slow in any case": (
        lambda n: [*tokens(n, per_event=2), finish(), DONE],
        400, VerdictKind.FAIL, Reason.BELOW_OBJECTIVE,
    ),
    "a usage of 80 for 4 events is not understood": (
        lambda n: complete(tokens(n, per_event=2), n, 10 * n),
        40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "outputs that ended early": (
        lambda n: [*tokens(n - 3), finish("stop"), usage(n - 3), DONE],
        40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "outputs that ended before their first token": (
        lambda _: [finish("stop"), usage(0), DONE],
        40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "outputs that were cut off": (
        lambda n: [*tokens(n - 3), finish(), usage(n - 3), DONE],
        40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "interrupted outputs": (
        lambda n: [*tokens(n - 3), DONE], 40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "outputs that were interrupted before their first token": (
        lambda _: [DONE], 40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "complete outputs without a finish reason or [DONE]": (
        lambda n: [*tokens(n), usage(n)], 40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "complete outputs without a finish reason, [DONE] or usage": (
        lambda n: [*tokens(n)], 40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "slow outputs without a finish reason or [DONE]": (
        lambda n: [*tokens(n), usage(n)], 103, VerdictKind.FAIL, Reason.BELOW_OBJECTIVE,
    ),
    "interrupted outputs without [DONE]": (
        lambda n: [*tokens(n - 3)], 40, VerdictKind.FAIL, Reason.BELOW_OBJECTIVE,
    ),
    "slow outputs that were interrupted": (
        lambda n: [*tokens(n - 3), DONE], 400, VerdictKind.FAIL, Reason.BELOW_OBJECTIVE,
    ),
    "outputs that ended early and were slow": (
        lambda n: [*tokens(n - 3), finish("stop"), usage(n - 3), DONE],
        103, VerdictKind.FAIL, Reason.BELOW_OBJECTIVE,
    ),
    "outputs beyond their limit pass": (
        lambda n: complete(tokens(5 * n), 5 * n), 40, VerdictKind.PASS, Reason.ATTAINED,
    ),
    "slow outputs beyond their limit": (
        lambda n: complete(tokens(5 * n), 5 * n),
        103, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "outputs in a field that is not of OpenAI's API": (
        lambda n: complete([delta(thinking="hm")] * n, n),
        40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "tokens without text": (
        lambda n: complete([text("")] * n, n), 40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "tokens without text or usage": (
        lambda n: [*[text("")] * n, finish(), DONE],
        40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "empty outputs": (
        lambda _: [text(""), finish("stop"), usage(0), DONE],
        40, VerdictKind.INVALID, Reason.NON_CONFORMING,
    ),
    "errors in the stream fail": (
        body(*tokens(2), event({"object": "error", "message": "no"})),
        40, VerdictKind.FAIL, Reason.BELOW_OBJECTIVE,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "period_ms", "kind", "reason"), VERDICTS.values(), ids=VERDICTS)
async def test_a_deviation_does_not_decide_a_verdict(
    prepared: Prepared, answer: Answer, period_ms: int, kind: VerdictKind, reason: Reason
) -> None:
    record = await respond(StandIn(answer=answer), prepared(output_tokens=LENGTH))
    verdict = five_minutes_of(record, period_ns=period_ms * NS_PER_MS)
    assert (verdict.kind, verdict.reason) == (kind, reason)


async def test_a_few_deviations_leave_the_verdict_alone(prepared: Prepared) -> None:
    """One output of 300 ended early: a miss, and the run passes or fails as without it."""
    early = await respond(
        StandIn(answer=lambda n: [*tokens(n - 1), finish("stop"), usage(n - 1), DONE]),
        prepared(output_tokens=LENGTH),
    )
    good = await respond(
        StandIn(answer=lambda n: complete(tokens(n), n)), prepared(output_tokens=LENGTH)
    )
    records = [
        replace(early if k == 700 else good, request_id=str(k), slo_class="chat")
        for k in range(1500)
    ]
    records = [
        replace(
            r,
            scheduled_ns=k * NS_PER_S // 5,
            sent_ns=k * NS_PER_S // 5,
            first_token_ns=k * NS_PER_S // 5 + 1,
            last_token_ns=k * NS_PER_S // 5 + 1,
            end_ns=k * NS_PER_S // 5 + 1,
        )
        for k, r in enumerate(records)
    ]
    found = gather(records, classes=[SLO], window_ns=300 * NS_PER_S)
    assert found.validity.deviations == {Deviation.ENDED_EARLY: 1}
    assert found.classes[0].attainment.good == 1499
    assert decide(found.classes, found.validity).kind is VerdictKind.PASS


async def test_outputs_without_a_required_length_may_end_anywhere(prepared: Prepared) -> None:
    stops = StandIn(answer=lambda n: [*tokens(n - 3), finish("stop"), usage(n - 3), DONE])
    record = await respond(stops, prepared(output_tokens=LENGTH), pinned=False)
    assert record.deviations == ()
    assert five_minutes_of(record, period_ns=40 * NS_PER_MS).kind is VerdictKind.PASS


async def replayed(server: StandIn, trace: Path, folder: Path, *more: object) -> tuple[int, str]:
    """Replay a trace against a server; returns the exit code and the error output."""
    async with running(server) as url:
        command = ["-m", "goodput_core", "replay", "--trace", trace, "--target", url]
        command += ["--out", folder, "--no-report", "--gate", *more]
        child = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, command), stdout=PIPE, stderr=PIPE
        )
        out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode() + err.decode()


@pytest.fixture
def trace(trace_of: WriteTrace) -> Path:
    return trace_of(steady_rows(40, input_tokens=8, output_tokens=LENGTH))


@pytest.fixture
def slo(tmp_path: Path) -> Path:
    path = tmp_path / "slo.yaml"
    path.write_text("classes: [{name: chat, ttftMs: 5000, tpotMs: 5000, objective: '50%'}]")
    return path


async def test_a_target_that_is_not_understood_is_named_and_the_run_is_invalid(
    trace: Path, slo: Path, tmp_path: Path
) -> None:
    server = StandIn(answer=lambda n: [*tokens(n, per_event=2), finish(), DONE])
    code, output = await replayed(server, trace, tmp_path / "run", "--slo", slo)
    assert code == VerdictKind.INVALID.exit_code
    assert "target: 40 responses have no usage" in " ".join(output.split())
    summary = read_summary(tmp_path / "run")
    (deviation,) = summary.validity.deviations
    assert (deviation.kind, deviation.count) == (Deviation.NO_USAGE, 40)
    assert "chat could be INCONCLUSIVE instead of FAIL" in summary.verdict.sentence
    records = list(read_records(tmp_path / "run"))
    assert {(r.output_tokens, r.most_output_tokens) for r in records} == {(4, 8)}
    assert {r.deviations for r in records} == {(Deviation.NO_USAGE,)}


async def test_a_target_whose_outputs_cannot_be_read_is_named_before_the_run(
    trace: Path, slo: Path, tmp_path: Path
) -> None:
    server = StandIn(answer=lambda n: complete([delta(thinking="hm")] * n, n))
    code, output = await replayed(server, trace, tmp_path / "run", "--slo", slo)
    assert code == VerdictKind.INVALID.exit_code
    told = " ".join(output.split())
    assert "the response to the probe request of class 'chat' reports output tokens, but" in told
    assert "target: 40 responses report output tokens without an event that has text" in told


@pytest.mark.parametrize("name", ["a JSON body", "gzip"])
async def test_a_target_without_plain_streams_is_reported_before_the_run(
    trace: Path, slo: Path, tmp_path: Path, name: str
) -> None:
    server, detail, _ = BODIES[name]
    code, output = await replayed(server, trace, tmp_path / "run", "--slo", slo)
    assert code == 64
    assert f"the target did not stream the probe request of class 'chat': {detail}" in output
    assert not (tmp_path / "run").exists()
