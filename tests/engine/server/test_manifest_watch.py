"""Changes of the manifest while an engine runs."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.engine.conftest import manifest_text

from goodput_core.slo.targets import SLOClass
from goodput_engine.manifest_file import read_manifest
from goodput_engine.messages import FollowManifest
from goodput_engine.openai.headers import ServiceClasses
from goodput_engine.server import manifest_watch
from goodput_engine.server.manifest_watch import FollowedFields, watch_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import StartEngine

    from goodput_core.spec.llmservice import LLMService

PATIENCE_S = 20.0
CORE = FollowManifest(min_token_budget=64, max_token_budget=8192, budget_law="model")
KNOWN = FollowedFields(
    slo=ServiceClasses(classes={"a": SLOClass(name="a", ttft_ms=5, tpot_ms=5)}, default="a"),
    core=CORE,
)


def manifest(*, budget: str = "{}", **ttft_ms: int) -> str:
    classes = ", ".join(f"{{name: {n}, ttftMs: {t}, tpotMs: 5}}" for n, t in ttft_ms.items())
    return (
        "apiVersion: goodput.dev/v1alpha1\nkind: LLMService\nmetadata: {name: chat}\n"
        f"spec: {{model: {{source: 'emulated://unit'}}, slo: {{classes: [{classes}]}}, "
        f"engine: {{tokenBudget: {budget}}}, control: {{mode: Auto}}}}\n"
    )


def replace(path: Path, text: str) -> None:
    """Replace a file atomically, as a kubelet does."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class AppliedFields(list[FollowedFields]):
    """The fields that were applied, and an event for each."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def __call__(self, found: FollowedFields) -> None:
        self.append(found)
        self.changed.set()


async def test_changed_fields_are_applied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_read = threading.Event()

    def read(path: Path) -> LLMService:
        found = read_manifest(path)
        was_read.set()
        return found

    monkeypatch.setattr(manifest_watch, "read_manifest", read)
    path = tmp_path / "chat.yaml"
    replace(path, manifest(a=5) + "# the same\n")
    applied = AppliedFields()
    task = asyncio.create_task(watch_manifest(path, KNOWN, applied, every_s=0.005))
    assert await asyncio.to_thread(was_read.wait, 10)
    replace(path, manifest(a=7, b=9, budget="{max: 4096, law: ema}"))
    await asyncio.wait_for(applied.changed.wait(), 10)
    task.cancel()
    (found,) = applied
    assert {name: c.ttft_ms for name, c in found.slo.classes.items()} == {"a": 7, "b": 9}
    assert found.core == FollowManifest(
        min_token_budget=64, max_token_budget=4096, budget_law="ema"
    )


async def test_a_change_during_the_start_is_applied(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    replace(path, manifest(a=5, budget="{max: 4096}"))
    applied = AppliedFields()
    task = asyncio.create_task(watch_manifest(path, KNOWN, applied, every_s=0.005))
    await asyncio.wait_for(applied.changed.wait(), 10)
    task.cancel()
    assert [found.core.max_token_budget for found in applied] == [4096]


@pytest.mark.parametrize("bad", ["[", "kind: Pod\n", None], ids=["broken", "another", "gone"])
async def test_an_invalid_file_changes_nothing(
    tmp_path: Path, bad: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "chat.yaml"
    replace(path, manifest(a=5))
    applied = AppliedFields()
    task = asyncio.create_task(watch_manifest(path, KNOWN, applied, every_s=0.005))
    await asyncio.sleep(0)
    if bad is None:
        path.unlink()
    else:
        replace(path, bad)
    async with asyncio.timeout(10):
        while not caplog.records:  # noqa: ASYNC110 - a log is polled
            await asyncio.sleep(0.005)
    assert [r.message for r in caplog.records] == ["manifest not followed"]
    assert applied == []
    caplog.clear()
    replace(path, manifest(b=1))
    await asyncio.wait_for(applied.changed.wait(), 10)
    task.cancel()


async def test_a_running_engine_serves_a_class_that_was_added(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start_engine()
    body = {"model": "chat", "prompt": [1, 2], "max_tokens": 1, "slo_class": "added"}
    async with aiohttp.ClientSession(engine.url) as client:

        async def ask() -> int:
            async with client.post("/v1/completions", json=body) as response:
                return response.status

        assert await ask() == 400
        path = tmp_path / "0.yaml"
        replace(path, path.read_text(encoding="utf-8").replace("name: batch", "name: added"))
        async with asyncio.timeout(20):
            while await ask() != 200:  # noqa: ASYNC110 - the engine is polled
                await asyncio.sleep(0.1)


async def test_a_running_engine_applies_bounds_and_mode_and_loses_no_token(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start_engine(mode="Manual")

    async def set_limits(**limits: int) -> int:
        return (await engine.patch_limits(limits))[0]

    def change(mode: str, **budget: int) -> None:
        replace(tmp_path / "0.yaml", manifest_text(mode=mode, tokenBudget=budget))

    # Six seconds of device time, during which the manifest changes twice.
    body = {"model": "chat", "prompt": [1] * 100, "max_tokens": 6000, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip

    async def stream() -> int:
        async with (
            aiohttp.ClientSession(engine.url) as http,
            http.post("/v1/completions", json=body) as answer,
        ):
            events = (await answer.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        tokens: int = json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"]
        return tokens

    async with asyncio.TaskGroup() as group:
        streaming = group.create_task(stream())
        await engine.state_when(lambda state: state["running"] == 1)
        assert await set_limits(revision=1, token_budget=16_000) == 400

        change("Auto", min=512, max=16_384)
        state = await engine.state_when(lambda state: state["budget_law"] == "model")
        assert state["bounds"]["token_budget"] == [512, 16_384]
        assert (state["token_budget"], state["limits_revision"]) == (2048, 0)
        assert await set_limits(revision=1, token_budget=16_000, safety_percent=70) == 200
        state = await engine.state_when(lambda state: state["limits_revision"] == 1)
        assert (state["token_budget"], state["safety_percent"]) == (16_000, 70)

        change("Manual", min=512, max=4096)
        state = await engine.state_when(lambda state: not state["budget_law"])
        assert (state["token_budget"], state["limits_revision"]) == (4096, 1)
        assert await set_limits(revision=1, token_budget=2048) == 409
        assert await set_limits(revision=2, token_budget=16_000) == 400
        assert await set_limits(revision=2, safety_percent=70) == 400
    assert streaming.result() == 6000
