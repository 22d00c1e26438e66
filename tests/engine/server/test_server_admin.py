"""The admin port: changes of limits, metrics and the engine's state."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.builders.http import connect
from tests.engine.conftest import CONTROL_TOKEN

from goodput_core.contract import HEADER_LOAD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.engine.conftest import RunningEngine, StartEngine


@pytest.fixture
async def admin(engine: RunningEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(engine.admin_url) as session:
        yield session


async def test_the_state_has_the_core_the_device_and_the_bounds(engine: RunningEngine) -> None:
    state = await engine.state()
    assert state["llmservice"] == "chat"
    assert state["replica"] == "replica-7"
    assert state["revision"] == "r1"
    assert state["phase"] == "serving"
    assert state["device"]["name"] == "unit"
    assert state["device"]["step_time"] == {
        "form": "unit", "unit_ns": 1_000_000, "chunk_tokens": None,
    }  # fmt: skip
    assert state["bounds"]["token_budget"] == [64, 8192]
    assert state["kv_total_blocks"] == 4096
    assert state["max_waiting"] == 1024
    assert state["saturated"] is False
    assert state["startup_seconds"] > 0


async def test_the_state_sums_the_lengths_of_finished_requests(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    before = await engine.state()
    # Lengths are grouped by powers of two: 20 and 30 tokens are one group, 40 are another.
    await _ask(engine.url, stream=False)
    state = await engine.state()
    assert sorted(state["answered"]) == [[1, 40, 0, 7], [2, 50, 0, 12]]
    # The second time, whole blocks of 16 come from the prefix cache.
    await _ask(engine.url, stream=True)
    state = await engine.state()
    assert sorted(state["answered"]) == [[2, 80, 32, 14], [4, 100, 32, 24]]
    assert state["epoch"] == before["epoch"]


async def _ask(url: str, *, stream: bool) -> None:
    async with aiohttp.ClientSession(url) as http:
        for prompt, tokens in (([7] * 20, 5), ([8] * 30, 7), ([9] * 40, 7)):
            body = {"model": "chat", "prompt": prompt, "max_tokens": tokens, "stream": stream}
            async with http.post("/v1/completions", json=body) as response:
                assert response.status == 200
                await response.read()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_response_reports_the_load_with_the_fields_of_the_state(
    engine: RunningEngine, stream: bool
) -> None:
    async with aiohttp.ClientSession(engine.url) as http:
        # Long enough to be running when its head is sent with the first token.
        tokens = 1000 if stream else 2
        body = {"model": "chat", "prompt": [1] * 100, "max_tokens": tokens, "stream": stream}
        async with http.post("/v1/completions", json=body) as answer:
            reported = json.loads(answer.headers[HEADER_LOAD])
    state = await engine.state()
    assert set(reported) <= set(state)
    assert {
        k: reported[k] for k in ("max_waiting", "kv_total_blocks", "saturated", "draining")
    } == {k: state[k] for k in ("max_waiting", "kv_total_blocks", "saturated", "draining")}
    assert (state["block_size"], state["tokenizer"]) == (16, "emulated")
    if stream:
        assert reported["running"] >= 1
        assert reported["kv_total_blocks"] - reported["kv_free_blocks"] >= 100 // 16


async def test_metrics_count_steps_and_tokens_with_the_contracts_labels(
    engine: RunningEngine, admin: aiohttp.ClientSession
) -> None:
    async def samples() -> dict[str, float]:
        async with admin.get("/metrics") as response:
            assert response.content_type == "text/plain"
            families = list(text_string_to_metric_families(await response.text()))
        labels = {"llmservice": "chat", "revision": "r1", "role": "engine"}
        found = [
            sample
            for family in families
            if family.name.startswith("goodput_engine")
            for sample in family.samples
        ]
        assert all(labels.items() <= sample.labels.items() for sample in found)
        return {s.name + s.labels.get("state", ""): s.value for s in found}

    before = await samples()
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post(
            "/v1/completions", json={"model": "chat", "prompt": "a b", "max_tokens": 5}
        ) as response,
    ):
        assert response.status == 200
    after = await samples()
    assert after["goodput_engine_output_tokens_total"] == (
        before["goodput_engine_output_tokens_total"] + 5
    )
    assert after["goodput_engine_step_seconds_count"] > before["goodput_engine_step_seconds_count"]
    assert after["goodput_engine_token_budget"] == 2048
    state = await engine.state()
    assert after["goodput_engine_max_num_seqs"] == state["max_num_seqs"] > 0
    assert after["goodput_engine_safety_ratio"] == state["safety_percent"] / 100
    blocks = [after[f"goodput_engine_kv_blocks{state}"] for state in ("used", "cached", "empty")]
    assert sum(blocks) == 4096


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer wrong", "Basic a token of the tests", "Bearer \u00e9"],
    ids=["none", "empty", "no token", "a wrong token", "another scheme", "not ASCII"],
)
async def test_limits_cannot_be_changed_without_the_token(
    engine: RunningEngine, authorization: str | None
) -> None:
    status, body = await engine.patch_limits({"revision": 9, "token_budget": 512}, authorization)
    assert status == 401
    assert body["error"]["code"] == "invalid_token"
    assert (await engine.state())["limits_revision"] == 0


async def test_a_token_that_is_not_utf_8_is_wrong(engine: RunningEngine) -> None:
    request = b"PATCH /control/limits HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n"
    async with connect(engine.admin_url) as (reader, writer):
        writer.write(request)
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")


async def test_without_a_configured_token_limits_never_change(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(environment={"GOODPUT_CONTROL_TOKEN": ""})
    for authorization in (None, "Bearer ", f"Bearer {CONTROL_TOKEN}"):
        status, body = await engine.patch_limits({"revision": 1}, authorization)
        assert status == 403
        assert body["error"]["code"] == "control_disabled"


async def test_limits_change_only_with_a_higher_revision(start_engine: StartEngine) -> None:
    engine = start_engine()
    change = {"revision": 5, "token_budget": 512, "max_num_seqs": 8, "max_waiting": 0}
    assert await engine.patch_limits(change) == (200, {"revision": 5})
    for stale in (5, 4):
        status, body = await engine.patch_limits({"revision": stale, "token_budget": 300})
        assert status == 409
        assert body["error"]["code"] == "stale_revision"
    assert (await engine.patch_limits({"revision": 6, "max_num_seqs": 9}))[0] == 200
    state = await engine.state_when(lambda state: state["limits_revision"] == 6)
    assert (state["token_budget"], state["max_num_seqs"], state["max_waiting"]) == (512, 9, 0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"revision": 1, "token_budget": 63}, id="below the manifest's budget"),
        pytest.param({"revision": 1, "token_budget": 8193}, id="above the manifest's budget"),
        pytest.param({"revision": 1, "max_num_seqs": 0}, id="no requests"),
        pytest.param({"revision": 1, "max_num_seqs": 257}, id="above the manifest's batch"),
        pytest.param({"revision": 1, "max_waiting": -1}, id="a negative queue"),
        pytest.param({"revision": 1, "max_waiting": 1025}, id="above the manifest's queue"),
        pytest.param({"revision": 1, "safety_percent": 80}, id="a safety factor without a law"),
        pytest.param({"revision": 1, "budget_law": "ema"}, id="a law under Manual"),
        pytest.param({"revision": 0}, id="revision 0"),
        pytest.param({"token_budget": 512}, id="no revision"),
        pytest.param({"revision": 1, "tokenBudget": 512}, id="a misspelt field"),
        pytest.param({"revision": 1, "token_budget": "512"}, id="a string"),
        pytest.param([], id="no object"),
    ],
)
async def test_a_change_outside_the_manifests_bounds_is_rejected(
    engine: RunningEngine, change: object
) -> None:
    status, body = await engine.patch_limits(change)
    assert status == 400, body
    assert (await engine.state())["limits_revision"] == 0


async def test_a_change_that_is_not_utf8_names_its_field(engine: RunningEngine) -> None:
    headers = {"Authorization": f"Bearer {CONTROL_TOKEN}"}
    body = b'{"revision":1,"budget_law":"\xff"}'
    async with (
        aiohttp.ClientSession(engine.admin_url) as admin,
        admin.patch("/control/limits", data=body, headers=headers) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "budget_law")
    assert error["message"].startswith("budget_law: byte 28 of the body is not UTF-8")


@pytest.mark.parametrize(
    "revision", [2**63 - 1, 2**63, 10**19], ids=["the highest", "one more", "20 digits"]
)
async def test_an_implausible_revision_is_rejected_and_blocks_no_later_one(
    start_engine: StartEngine, revision: int
) -> None:
    engine = start_engine()
    status, body = await engine.patch_limits({"revision": revision, "token_budget": 512})
    assert status == 400, body
    for later in (1, 2, 1_000_000, time.time_ns()):
        assert await engine.patch_limits({"revision": later}) == (200, {"revision": later})


async def test_under_auto_the_budget_law_and_its_safety_factor_can_be_changed(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(mode="Auto", tokenBudget={"law": "ema"})
    state = await engine.state()
    assert (state["budget_law"], state["safety_percent"]) == ("ema", 90)
    for bad in ({"budget_law": "pid"}, {"safety_percent": 0}, {"safety_percent": 101}):
        status, body = await engine.patch_limits({"revision": 1, **bad})
        assert status == 400, body
    change = {"revision": 1, "budget_law": "model", "safety_percent": 75}
    assert await engine.patch_limits(change) == (200, {"revision": 1})
    state = await engine.state_when(lambda state: state["limits_revision"] == 1)
    assert (state["budget_law"], state["safety_percent"]) == ("model", 75)


async def test_the_admin_port_serves_no_completions(admin: aiohttp.ClientSession) -> None:
    async with admin.post("/v1/completions", json={}) as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("stored", "now"),
    [
        ({"revision": 7, "token_budget": 512, "max_num_seqs": 9}, (7, 512, 9)),
        ({"revision": 7, "token_budget": 9**9, "max_num_seqs": 9**9, "more": 1}, (7, 8192, 256)),
        ({"revision": 0, "token_budget": 512}, (0, 2048, 256)),
        ("[", (0, 2048, 256)),
        (None, (0, 2048, 256)),
    ],
    ids=["valid", "out of bounds", "no revision", "damaged", "missing"],
)
async def test_an_engine_starts_with_the_limits_in_its_file(
    start_engine: StartEngine, tmp_path: Path, stored: object, now: tuple[int, int, int]
) -> None:
    path = tmp_path / "limits.json"
    if stored is not None:
        path.write_text(stored if isinstance(stored, str) else json.dumps(stored), encoding="utf-8")
    engine = start_engine("--limits", str(path))
    state = await engine.state_when(lambda state: state["limits_revision"] == now[0])
    assert (state["token_budget"], state["max_num_seqs"]) == now[1:]
    if now[0]:
        status, _ = await engine.patch_limits({"revision": now[0]})
        assert status == 409, "the revision in the file is in force"
    status, _ = await engine.patch_limits({"revision": now[0] + 1})
    assert status == 200
    assert ("last limits unusable" in engine.stderr()) == (now[0] == 0 and stored is not None)
