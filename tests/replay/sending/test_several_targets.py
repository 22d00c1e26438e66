"""Several targets, time limits of classes, retries, TLS, and keys that stay out of run folders."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from aiohttp import web
from tests.builders.traces import steady_rows
from tests.replay.sending.stand_ins import (
    DONE,
    StandIn,
    event,
    finish,
    running,
    text,
    tokens,
    usage,
)
from yarl import URL

from goodput_core.errors import UsageError
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.verdict import Reason
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.options import parse_options
from goodput_replay.runs.files import RECORDS_FILE
from goodput_replay.runs.record_rows import read_records
from goodput_replay.runs.summary import read_summary
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.client.redaction import Redaction
from goodput_replay.sending.client.request import RequestClient, SendingPolicy
from goodput_replay.sending.preflight import ServedModels, join_models

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.replay.sending.builders import Prepared, WriteTrace

    from goodput_replay.sending.body import PreparedRequest


def complete(count: int) -> Iterable[bytes]:
    return [*tokens(count), finish(), usage(count), DONE]


@dataclass(frozen=True, kw_only=True)
class Flaky(StandIn):
    """Fails the first requests: a status, `close` for no response, or pieces of a stream.

    Args:
        failures: the failures, in order; later requests are served.
        retry_after: header of the failures; None for none.
    """

    failures: list[int | str | list[bytes]] = field(default_factory=list)
    retry_after: str | None = None
    arrivals: list[float] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        self.arrivals.append(time.monotonic())
        self.arrived.set()
        if not self.failures:
            return await super().respond(request)
        failure = self.failures.pop(0)
        if isinstance(failure, list):
            return await StandIn(answer=lambda _: failure).respond(request)
        headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
        if isinstance(failure, int):
            body: dict[str, Any] = (
                {"error": {"message": "not now"}} if failure != 200 else {"choices": []}
            )
            return web.json_response(body, status=failure, headers=headers)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


async def send(
    server: StandIn, request: PreparedRequest, *, lag_ns: int = 0, **policy: Any
) -> RequestRecord:
    rules: dict[str, Any] = {"timeout_ns": 60 * NS_PER_S, "pinned": True, "retries": 3}
    request = replace(request, body=b'{"max_tokens": 3}')
    async with running(server) as url, open_session({}) as session:
        urls = [URL(f"{url}/v1/completions")]
        client = RequestClient(session, urls, SendingPolicy(**(rules | policy)))
        return await client.run(request, time.monotonic_ns() - lag_ns)


RETRIED: dict[str, list[int | str | list[bytes]]] = {
    "500": [500],
    "503 and 429": [503, 429],
    "no response": ["close", "close"],
    "an error before the first token": [[event({"error": {"message": "busy"}})]],
    "an end before the first token": [[b": hello\n\n"]],
    "408": [408],
    "424, a generation that failed": [424],
}


@pytest.mark.parametrize("failures", RETRIED.values(), ids=RETRIED)
async def test_a_failure_before_the_first_token_is_retried_and_recorded(
    prepared: Prepared, failures: list[int | str | list[bytes]]
) -> None:
    count = len(failures)
    record = await send(Flaky(answer=complete, failures=list(failures)), prepared())
    assert (record.outcome, record.detail, record.retries) == (Outcome.OK, "", count)
    assert record.output_tokens == 3


FINAL: dict[str, tuple[list[int | str | list[bytes]], Outcome]] = {
    "404": ([404], Outcome.ERROR),
    "401": ([401], Outcome.ERROR),
    "a response that is not streamed": ([200], Outcome.ERROR),
    "an error after the first token": ([[text(), event({"error": "no"})]], Outcome.ERROR),
    "an end after the first token": ([[text()]], Outcome.ERROR),
}


@pytest.mark.parametrize(("failures", "outcome"), FINAL.values(), ids=FINAL)
async def test_other_failures_are_final(
    prepared: Prepared, failures: list[int | str | list[bytes]], outcome: Outcome
) -> None:
    record = await send(Flaky(answer=complete, failures=list(failures)), prepared())
    assert (record.outcome, record.retries) == (outcome, 0)


async def test_without_retries_a_failure_is_final(prepared: Prepared) -> None:
    record = await send(Flaky(answer=complete, failures=[503]), prepared(), retries=0)
    assert (record.outcome, record.retries, record.status) == (Outcome.SHED, 0, 503)


async def test_the_last_failure_is_recorded_when_no_retry_is_left(prepared: Prepared) -> None:
    record = await send(Flaky(answer=complete, failures=[503, 500, 429, 500]), prepared())
    assert (record.outcome, record.status, record.retries) == (Outcome.ERROR, 500, 3)
    assert record.detail == "HTTP 500: not now"


async def test_latencies_of_a_retried_request_count_from_its_scheduled_arrival(
    prepared: Prepared,
) -> None:
    server = Flaky(answer=complete, failures=[503, 503])
    record = await send(server, prepared(), lag_ns=50 * NS_PER_MS)
    first, second, third = server.arrivals
    assert second - first >= 0.1
    assert third - second >= 0.2, "the wait doubles"
    assert record.ttft_ns is not None
    assert record.ttft_ns >= 350 * NS_PER_MS
    assert record.lag_ns is not None
    assert 50 * NS_PER_MS <= record.lag_ns < (third - first) * NS_PER_S, "of the first send"


async def test_the_server_may_say_when_to_retry(prepared: Prepared) -> None:
    server = Flaky(answer=complete, failures=[429], retry_after="1")
    record = await send(server, prepared())
    assert record.outcome is Outcome.OK
    first, second = server.arrivals
    assert second - first >= 1


@pytest.mark.parametrize(
    "retry_after", ["999999", "-1", "9" * 400, "Wed, 21 Oct 2026 07:28:00 GMT"]
)
async def test_a_wait_beyond_the_time_limit_is_not_begun_and_nonsense_is_ignored(
    prepared: Prepared, retry_after: str
) -> None:
    server = Flaky(answer=complete, failures=[429], retry_after=retry_after)
    record = await send(server, prepared())
    retried = retry_after != "999999"
    assert record.outcome is (Outcome.OK if retried else Outcome.SHED)
    assert record.retries == retried


async def test_a_run_that_stops_during_a_wait_records_the_request_as_cancelled(
    prepared: Prepared,
) -> None:
    server = Flaky(answer=complete, failures=[429], retry_after="30")
    task = asyncio.ensure_future(send(server, prepared()))
    await server.arrived.wait()
    await asyncio.sleep(0.1)  # until the response was read
    task.cancel()
    record = await task
    assert (record.outcome, record.detail) == (Outcome.CANCELLED, "the run was stopped")


async def test_a_class_has_its_own_time_limit(prepared: Prepared) -> None:
    silent = StandIn(answer=lambda _: [text()], keeps_open=True)
    policy: dict[str, Any] = {"class_timeouts_ns": {"chat": NS_PER_S, "batch": 60 * NS_PER_S}}
    record = await send(silent, prepared(slo_class="chat"), **policy)
    assert (record.outcome, record.detail) == (Outcome.TIMEOUT, "nothing complete within 1 s")


SECRETS = {
    "the value": ("the key is Bearer sk-12345!", "the key is ***!"),
    "the token alone": ("invalid key sk-12345", "invalid key ***"),
    "several": ("sk-12345 sk-12345 hunter2", "*** *** ***"),
    "cut off": ("invalid key sk-12", "invalid key ***"),
    "cut off before the end": ("to pk-98765432, which", "to ***, which"),
    "cut off after eight characters": ("to /login?k=a+b/c3==, which", "to /login?k=***, which"),
    "percent-encoded": ("to ?k=a%2Bb%2Fc3%3D%3Dxyz", "to ?k=***"),
    "too short to be known": ("invalid key sk-", "invalid key sk-"),
    "another text": ("invalid key", "invalid key"),
    "the tenant is short": ("tenant eu", "tenant eu"),
}


@pytest.mark.parametrize(("found", "masked"), SECRETS.values(), ids=SECRETS)
def test_secrets_are_masked(found: str, masked: str) -> None:
    keys = ["Bearer sk-12345", "hunter2", "eu", "pk-98765432-long", "a+b/c3==xyz"]
    assert Redaction.of(keys).mask(found) == masked


def test_targets_must_serve_a_common_model() -> None:
    ab = ServedModels(models=("a", "b"), goodput=True)
    bc = ServedModels(models=("b", "c"), goodput=False)
    assert join_models({"x": ab}) == ab
    assert join_models({"x": ab, "y": bc}) == ServedModels(models=("b",), goodput=False)
    with pytest.raises(UsageError, match="x serves a, b, and z serves d; give targets with the"):
        join_models({"x": ab, "y": bc, "z": ServedModels(models=("d",), goodput=True)})


def test_options_of_targets_are_parsed() -> None:
    options = parse_options(
        ["--trace", "t", "--target", "http://a:1", "--target", "https://b/v1", "--retries", "2",
         "--timeout", "30s", "--timeout", "chat=5s", "--timeout", "a=b=1m", "--ca-file", "ca.pem"]
    )  # fmt: skip
    assert [target.url for target in options.targets] == ["http://a:1", "https://b"]
    assert (options.timeout_ns, options.retries) == (30 * NS_PER_S, 2)
    assert options.class_timeouts_ns == {"chat": 5 * NS_PER_S, "a=b": 60 * NS_PER_S}


HERE = ["--trace", "t", "--target", "http://127.0.0.1:1"]
VIRTUAL = ["--trace", "t", "--emulate", "m"]
REJECTED = {
    "two time limits": ([*HERE, "--timeout", "1s", "--timeout", "2s"], "--timeout is given twice;"),
    "two of a class": (
        [*HERE, "--timeout", "a=1s", "--timeout", "a=2s"],
        "--timeout is given twice for class 'a'",
    ),
    "a short one": ([*HERE, "--timeout", "a=1ms"], "'1ms' is out of range"),
    "eleven retries": ([*HERE, "--retries", "11"], "'11' is not a number of retries in 0 to 10"),
    "a CA without TLS": ([*HERE, "--ca-file", "f"], "only supported with an https:// target"),
    "virtual retries": ([*VIRTUAL, "--retries", "1"], "--retries and --emulate are mutually"),
    "virtual time limits": ([*VIRTUAL, "--timeout", "a=1s"], "one --timeout TIME applies"),
}


@pytest.mark.parametrize(("argv", "sentence"), REJECTED.values(), ids=REJECTED)
def test_conflicting_options_of_targets_are_named(argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(argv)
    assert sentence in str(caught.value)


async def replay(*arguments: object, **environment: str) -> tuple[int, str]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "goodput_core", "replay"), *map(str, arguments),
        stdout=PIPE, stderr=PIPE, env={**os.environ, "COLUMNS": "200", **environment},
    )  # fmt: skip
    output, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, (output + err).decode()


@pytest.fixture
def trace(trace_of: WriteTrace) -> Path:
    return trace_of(steady_rows(20, input_tokens=8, output_tokens=2, slo_class="chat"))


async def test_requests_go_to_the_targets_in_turn(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    async with running(Flaky(answer=complete)) as one, running(Flaky(answer=complete)) as two:
        code, output = await replay(
            "--trace", trace, "--target", one, "--target", two, "--out", out
        )
    assert code in {0, 3}, output  # a busy machine may send too late to be valid
    assert read_summary(out).target.url == f"{one}, {two}"
    counts = Counter(record.replica for record in read_records(out))
    assert counts == {one.removeprefix("http://"): 10, two.removeprefix("http://"): 10}


async def test_a_second_target_that_rejects_the_key_gives_no_verdict(
    trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    wrong = Flaky(answer=complete, failures=[401] * 100)
    async with running(Flaky(answer=complete)) as one, running(wrong) as two:
        code, output = await replay(
            "--trace", trace, "--target", one, "--target", two, "--out", out, "--no-probe",
            "--slo-class", "chat:ttft=9s,tpot=9s,objective=90%", "--retries", 2, "--gate",
        )  # fmt: skip
    assert code == 3, output
    summary = read_summary(out)
    assert summary.verdict.reason is Reason.CLIENT_ERROR
    assert (summary.validity.client_errors, summary.retried) == (10, 0)


async def test_an_unreachable_second_target_is_reported_before_the_run(
    trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    async with running(Flaky(answer=complete)) as url:
        code, output = await replay(
            "--trace", trace, "--target", url, "--target", "http://127.0.0.1:9", "--out", out
        )
    assert code == 64
    assert "error: http://127.0.0.1:9/v1/models: could not connect" in output
    assert not out.exists()


async def test_a_time_limit_of_an_unknown_class_is_rejected(trace: Path, tmp_path: Path) -> None:
    code, output = await replay("--trace", trace, *HERE[2:], "--timeout", "chta=5s")
    assert code == 64
    assert "no request has the class 'chta'; classes are chat" in output


async def test_retries_are_counted_in_the_summary(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    server = Flaky(answer=complete, failures=[503] * 4)
    async with running(server) as url:
        code, output = await replay(
            "--trace", trace, "--target", url, "--out", out, "--retries", 1, "--no-probe",
            "--no-report",
        )  # fmt: skip
    assert code in {0, 3}, output
    summary = read_summary(out)
    assert (summary.run.retries, summary.retried) == (1, sum(r.retries for r in read_records(out)))
    assert summary.retried > 0
    assert f"retries: {summary.retried} requests were sent more than once" in output


class Echo(StandIn):
    """Quotes the request's headers in every text that is recorded."""

    async def respond(self, request: web.Request) -> web.StreamResponse:
        quoted = " ".join(request.headers.getall("Authorization") + request.headers.getall("X-Key"))
        number = len(ECHOED)
        ECHOED.append(quoted)
        message = {"error": {"message": f"wrong key {quoted}"}}
        if number % 4 == 0:
            return web.json_response(message, status=500)
        if number % 4 == 1:
            return web.json_response({"error": {"message": "x" * 140 + quoted}}, status=500)
        if number % 4 == 2:
            return web.Response(
                text=f"data: {json.dumps(message)}\n\n", content_type="text/event-stream"
            )
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Goodput-Replica": quoted}
        )
        await response.prepare(request)
        await response.write(b"".join(complete(2)))
        return response


ECHOED: list[str] = []


@dataclass(frozen=True, kw_only=True)
class EchoModels(StandIn):
    """Quotes the key instead of a list of models, in an error or a redirect."""

    status: int

    async def list_models(self, request: web.Request) -> web.Response:
        key = request.headers["Authorization"]
        headers = {"Location": f"/login?key={quote(key)}"} if self.status == 307 else {}
        message = {"error": {"message": f"wrong key {key}"}}
        return web.json_response(message, status=self.status, headers=headers)


@pytest.mark.parametrize("status", [307, 500])
async def test_keys_never_reach_the_error_about_a_list_of_models(
    status: int, trace: Path, tmp_path: Path
) -> None:
    async with running(EchoModels(answer=complete, status=status)) as url:
        code, output = await replay(
            "--trace", trace, "--target", url, "--out", tmp_path / "run",
            "--api-key-env", "LLM_KEY", LLM_KEY="sk-very+secret",
        )  # fmt: skip
    assert code == 64
    assert f"HTTP {status}" in output
    assert "***" in output
    assert "sk-very" not in output


async def test_targets_behind_one_gateway_have_names_with_their_paths(
    trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    async with running(Flaky(answer=complete)) as url:
        await replay("--trace", trace, "--target", f"{url}/a", "--target", f"{url}/b", "-o", out)
    host = url.removeprefix("http://")
    assert {record.replica for record in read_records(out)} == {f"{host}/a", f"{host}/b"}


async def test_keys_never_reach_a_run_folder(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ECHOED.clear()
    async with running(Echo(answer=complete)) as url:
        code, output = await replay(
            "--trace", trace, "--target", url, "--out", out, "--no-probe",
            "--api-key-env", "LLM_KEY", "--header", "X-Key: hunter2-secret",
            LLM_KEY="sk-verysecret",
        )  # fmt: skip
    assert code in {0, 3}, output
    assert ECHOED[0] == "Bearer sk-verysecret hunter2-secret"
    rows = str(pq.read_table(out / RECORDS_FILE).to_pylist())
    assert "wrong key ***" in rows
    written = "".join(
        p.read_text(errors="replace") for p in out.iterdir() if p.name != RECORDS_FILE
    )
    for secret in ("sk-verysecret", "hunter2", "sk-very", "Bearer sk"):
        assert secret not in rows + written + output


async def test_a_target_with_a_certificate_of_its_own_ca_is_trusted_only_with_the_ca_file(
    trace: Path, certificate: Path, tmp_path: Path
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    out = tmp_path / "run"
    async with running(StandIn(answer=complete), tls) as url:
        command = ("--trace", trace, "--target", url, "--out", out, "--no-report")
        code, output = await replay(*command)
        assert code == 64
        assert "its certificate is not trusted: self-signed certificate" in output
        code, output = await replay(*command, "--ca-file", certificate / "cert.pem")
    assert code in {0, 3}, output
    assert read_summary(out).overall.outcomes == {"ok": 20}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "No such file or directory; check --ca-file"), ("hello", "no PEM certificates")],
)
async def test_an_unusable_ca_file_is_named(
    trace: Path, tmp_path: Path, content: str | None, sentence: str
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    code, output = await replay(
        "--trace", trace, "--target", "https://127.0.0.1:9", "--ca-file", file
    )
    assert code == 64
    assert f"error: {file}: {sentence}" in output
