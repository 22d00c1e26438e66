"""Hostile names in the formats of a gate's result, and the answers of rollout controllers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from goodput_core.slo.gate import GateRule
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_replay.compare.gate import CheckResult, GateClassResult, GateResult
from goodput_replay.compare.outputs import junit_xml, markdown
from goodput_replay.compare.serving import make_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOSTILE = "<script>|`*]\x00\x1b[31m\u202e&\"'"


def result(verdict: VerdictKind = VerdictKind.FAIL, *, name: str = "chat") -> GateResult:
    check = CheckResult(
        rule=GateRule.OBJECTIVE,
        verdict=verdict,
        reason=Reason.BELOW_OBJECTIVE,
        sentence=f"{name}: 5 of 10 requests met their targets",
    )
    return GateResult(
        verdict=verdict,
        reason=Reason.BELOW_OBJECTIVE,
        sentence=f"{name}: 5 of 10 requests met their targets.",
        exit_code=verdict.exit_code,
        confidence=0.95,
        margin=None,
        virtual=False,
        candidates=("run",),
        baselines=(),
        dropped=0,
        classes=(
            GateClassResult(
                name=name,
                objective="99%",
                good=5,
                total=10,
                attainment=0.5,
                lower=0.2,
                upper=0.8,
                checks=(check,),
            ),
        ),
    )


def test_markdown_has_no_markup_of_a_class_name() -> None:
    text = markdown(result(name=HOSTILE))
    assert "<script>" not in text
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("| &#60;script")]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 6


def test_junit_is_xml_with_any_class_name() -> None:
    suite = ET.fromstring(junit_xml(result(name=HOSTILE)))[0]
    (case,) = suite
    assert case.get("classname", "").startswith("<script>")
    assert case[0].tag == "failure"


def test_an_invalid_comparison_is_one_error_in_junit() -> None:
    suite = ET.fromstring(junit_xml(result(VerdictKind.INVALID)))[0]
    assert (suite.get("tests"), suite.get("errors"), suite.get("failures")) == ("1", "1", "0")


@pytest.mark.parametrize("verdict", list(VerdictKind))
async def test_argo_reads_the_verdict_and_flagger_the_status(verdict: VerdictKind) -> None:
    async with TestClient(TestServer(make_app(result(verdict)))) as client:
        async with client.get("/") as response:
            value: dict[str, Any] = msgspec.json.decode(await response.read())
            assert (response.status, value["verdict"]) == (200, verdict.value)
        async with client.post("/", json={"name": "chat", "phase": "Progressing"}) as response:
            assert response.status == (200 if verdict is VerdictKind.PASS else 409)


@pytest.mark.parametrize(
    ("method", "path", "status", "sentence"),
    [
        ("GET", "/any/path", 404, "there is no such path; the result of the gate is at /\n"),
        ("POST", "/hooks?x=1", 404, "there is no such path; the result of the gate is at /\n"),
        ("DELETE", "/", 405, "DELETE is not supported; use GET or POST\n"),
    ],
)
async def test_only_the_documented_path_is_answered(
    method: str, path: str, status: int, sentence: str
) -> None:
    async with (
        TestClient(TestServer(make_app(result(VerdictKind.PASS)))) as client,
        client.request(method, URL(path, encoded=True)) as response,
    ):
        assert (response.status, await response.text()) == (status, sentence)


async def test_a_body_is_bounded_in_size_and_time() -> None:
    never = asyncio.Event()

    async def unfinished() -> AsyncIterator[bytes]:
        yield b"{"
        await never.wait()

    app = make_app(result(VerdictKind.PASS), body_s=0.1)
    async with TestClient(TestServer(app)) as client:
        async with client.post("/", data=b"x" * 100_000) as response:
            assert response.status == 413
        async with client.post("/", data=unfinished()) as response:
            assert response.status == 408
            assert "the body did not arrive within 0.1 s" in await response.text()
