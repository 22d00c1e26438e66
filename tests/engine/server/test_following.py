"""Promises that change while an engine runs: it takes them over, and nothing else of the file."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from goodput_core.slo import SLOClass
from goodput_engine.server.following import follow_promises
from goodput_engine.server.promise import SLOBook

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import StartEngine

KNOWN = SLOBook(classes={"a": SLOClass(name="a", ttft_ms=5, tpot_ms=5)}, default="a")


def manifest(**ttft_ms: int) -> str:
    classes = ", ".join(f"{{name: {n}, ttftMs: {t}, tpotMs: 5}}" for n, t in ttft_ms.items())
    return (
        "apiVersion: goodput.dev/v1alpha1\nkind: LLMService\nmetadata: {name: chat}\n"
        f"spec: {{model: {{source: 'emulated://unit'}}, slo: {{classes: [{classes}]}}}}\n"
    )


def replace(path: Path, text: str) -> None:
    """As a kubelet does it: another file in the same place."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


async def test_changed_promises_are_handed_over_once(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    replace(path, manifest(a=5))
    found: list[SLOBook] = []
    came = asyncio.Event()

    def apply(book: SLOBook) -> None:
        found.append(book)
        came.set()

    task = asyncio.create_task(follow_promises(path, KNOWN, apply, every_s=0.005))
    replace(path, manifest(a=5) + "# the same\n")
    await asyncio.sleep(0.05)
    assert found == []
    replace(path, manifest(a=7, b=9))
    await asyncio.wait_for(came.wait(), 10)
    task.cancel()
    (book,) = found
    assert {name: c.ttft_ms for name, c in book.classes.items()} == {"a": 7, "b": 9}


@pytest.mark.parametrize("bad", ["[", "kind: Pod\n", None], ids=["broken", "another", "gone"])
async def test_a_file_that_cannot_be_used_changes_nothing(
    tmp_path: Path, bad: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "chat.yaml"
    replace(path, manifest(a=5))
    came = asyncio.Event()
    task = asyncio.create_task(
        follow_promises(path, KNOWN, lambda _book: came.set(), every_s=0.005)
    )
    await asyncio.sleep(0)
    if bad is None:
        path.unlink()
    else:
        replace(path, bad)
    async with asyncio.timeout(10):
        while not caplog.records:  # noqa: ASYNC110 - a log is polled
            await asyncio.sleep(0.005)
    assert [r.message for r in caplog.records] == ["promises kept"]
    assert not came.is_set()
    caplog.clear()
    replace(path, manifest(b=1))
    await asyncio.wait_for(came.wait(), 10)
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
