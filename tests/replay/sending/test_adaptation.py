"""Targets that reject parts of a request which others accept: the run adapts, and says so."""

from __future__ import annotations

import asyncio
import sys
import uuid
from asyncio.subprocess import PIPE
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from tests.builders.traces import steady_rows
from tests.replay.sending.stand_ins import (
    DONE,
    Answer,
    StandIn,
    finish,
    running,
    text,
    tokens,
    usage,
)

from goodput_replay.runs.length_pinning import LengthPinning
from goodput_replay.runs.record_rows import read_records
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.replay.sending.builders import WriteTrace

FINISHED = {0, 3}
"""Exit codes of a run. On a busy machine, the requests may be late and the run invalid."""


def half(count: int) -> Iterable[bytes]:
    """Stream half of the tokens, and end as a model does."""
    kept = max(1, count // 2)
    return [*tokens(kept), finish("stop"), usage(kept), DONE]


@dataclass(frozen=True, kw_only=True)
class Strict(StandIn):
    """Rejects requests that other servers accept.

    Args:
        wants_uuid: reject an X-Request-Id that is not a UUID, with an empty body.
        wants_known: reject parameters that OpenAI's API does not have.
        lists_models: False for an internal error in place of the list of models.
        requests: accepted bodies by request id.
    """

    answer: Answer = half
    wants_uuid: bool = False
    wants_known: bool = False
    lists_models: bool = True
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def list_models(self, request: web.Request) -> web.Response:
        if self.lists_models:
            return await super().list_models(request)
        return web.Response(status=500, text="Internal Server Error")

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = request.headers["X-Request-Id"]
        if self.wants_uuid:
            try:
                uuid.UUID(name)
            except ValueError:
                return web.Response(status=400)
        if self.wants_known and "ignore_eos" in body:
            return web.json_response({"detail": "Unexpected fields: ignore_eos"}, status=422)
        self.requests[name] = body
        return await super().respond(request)


async def replayed(server: StandIn, trace: Path, folder: Path, *more: str) -> tuple[int, str]:
    """Replay a trace against a server; returns the exit code and the output."""
    async with running(server) as url:
        command = ["-m", "goodput_core", "replay", "--trace", trace, "--target", url]
        command += ["--out", folder, "--no-report", *more]
        child = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, command), stdout=PIPE, stderr=PIPE
        )
        out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, " ".join((out + err).decode().split())


@pytest.fixture
def trace(trace_of: WriteTrace) -> Path:
    return trace_of(steady_rows(10, input_tokens=8, output_tokens=6))


@pytest.mark.parametrize("wants_known", [False, True], ids=["every field", "known fields only"])
async def test_a_target_that_wants_uuids_gets_one_for_each_id(
    trace: Path, tmp_path: Path, *, wants_known: bool
) -> None:
    server = Strict(wants_uuid=True, wants_known=wants_known)
    code, output = await replayed(server, trace, tmp_path / "run")
    assert code in FINISHED, output
    assert "the target rejects the ids of the trace, so X-Request-Id is a UUID" in output
    assert len(server.requests) == 1 + 10, "the probe and ten rows"
    assert {r.status for r in read_records(tmp_path / "run")} == {200}


async def test_a_target_without_extension_parameters_gets_limits(
    trace: Path, tmp_path: Path
) -> None:
    server = Strict(wants_known=True)
    code, output = await replayed(server, trace, tmp_path / "run")
    assert code in FINISHED, output
    assert "so outputs are limited by max_tokens alone and may be shorter" in output
    rows = [body for name, body in server.requests.items() if name.startswith("row-")]
    assert [body["max_tokens"] for body in rows] == [6] * 10
    assert not any("min_tokens" in body for body in rows)
    assert read_summary(tmp_path / "run").target.pinning is LengthPinning.LIMIT
    for record in read_records(tmp_path / "run"):
        assert (record.output_tokens, record.pinned_output_tokens) == (3, None)
        assert record.deviations == ()


async def test_a_limit_is_enforced(trace: Path, tmp_path: Path) -> None:
    """Outputs beyond their limit are named, as with pinned lengths."""
    server = Strict(wants_known=True, answer=lambda n: [text(" a")] * (n + 2) + [finish(), DONE])
    await replayed(server, trace, tmp_path / "run", "--length-pinning", "limit")
    (deviation, *_) = read_summary(tmp_path / "run").validity.deviations
    assert (deviation.kind, deviation.count) == ("exceeded_limit", 10)


@dataclass(frozen=True, kw_only=True)
class FailsAtFirst(StandIn):
    """Fails the first requests, and sometimes a later one.

    Args:
        status: status of the failures.
        failing: numbers of the failing requests, from 1.
        arrived: ids of the requests.
    """

    status: int
    failing: frozenset[int]
    arrived: list[str] = field(default_factory=list)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        self.arrived.append(request.headers["X-Request-Id"])
        if len(self.arrived) in self.failing:
            return web.json_response({"error": {"message": "busy"}}, status=self.status)
        return await super().respond(request)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_target_that_sheds_at_random_is_not_taken_for_one_without_token_ids(
    trace: Path, tmp_path: Path, status: int
) -> None:
    server = FailsAtFirst(status=status, failing=frozenset({1, 3, 5, 7}), answer=half)
    code, output = await replayed(server, trace, tmp_path / "run")
    assert code in FINISHED, output
    assert f"failed (HTTP {status}: busy); the run starts anyway" in output
    assert len(server.arrived) == 1 + 10


async def test_a_target_that_fails_at_random_is_not_taken_for_one_without_token_ids(
    trace: Path, tmp_path: Path
) -> None:
    server = FailsAtFirst(status=500, failing=frozenset({1, 3}), answer=half)
    code, output = await replayed(server, trace, tmp_path / "run")
    assert code in FINISHED, output
    assert "failed (HTTP 500: busy); the run starts anyway" in output
    assert len(server.arrived) == 5 + 10


async def test_required_lengths_are_not_given_up(trace: Path, tmp_path: Path) -> None:
    server = Strict(wants_known=True)
    options = ("--length-pinning", "max-tokens")
    code, output = await replayed(server, trace, tmp_path / "run", *options)
    assert code == 64
    assert "HTTP 422: Unexpected fields: ignore_eos" in output
    assert not server.requests


async def test_a_target_without_a_list_of_models_needs_a_model(trace: Path, tmp_path: Path) -> None:
    server = Strict(lists_models=False)
    code, output = await replayed(server, trace, tmp_path / "run")
    assert code == 64
    assert "HTTP 500 (Internal Server Error)" in output
    assert "--model" in output
    code, output = await replayed(server, trace, tmp_path / "run", "--model", "local/m")
    assert code in FINISHED, output
    assert {body["model"] for body in server.requests.values()} == {"local/m"}
