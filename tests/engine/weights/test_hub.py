"""Weights from a hub on this machine: pinned, resumed, compared with checksums, reused offline."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.hubs import COMMIT, REPO, LocalHub, open_hub

from goodput_core.errors import GoodputError, InputError, InternalError
from goodput_engine.weights.fetch import fetch_weights
from goodput_engine.weights.source import WeightsSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MIB = 1 << 20
# The library writes parts of 10 MB.
PART = 10 * 1024 * 1024
LARGE = bytes(range(256)) * (24 * MIB // 256)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * (3 * MIB // 256),
    "pytorch_model.bin": b"pickled",
    "README.md": b"# A model",
}
SERVED = {"config.json", "tokenizer.json", "model.safetensors"}
PINNED = WeightsSource(name=REPO, revision=COMMIT)


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalHub]:
    """A hub, and an empty cache."""
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    async with open_hub(dict(FILES)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def partial(tmp_path: Path) -> Path | None:
    """Return the file of an incomplete download."""
    return next((tmp_path / "cache").rglob("*.goodput-partial"), None)


async def error_of(source: WeightsSource) -> GoodputError:
    with pytest.raises(GoodputError) as caught:
        await fetch_weights(source)
    assert "\n" not in str(caught.value)
    return caught.value


async def test_a_pinned_model_is_downloaded_once_and_then_needs_no_hub(
    hub: LocalHub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = Path(await fetch_weights(PINNED))
    assert set(os.listdir(folder)) == SERVED  # noqa: PTH208
    assert all((folder / name).read_bytes() == FILES[name] for name in SERVED)
    logged = [record.phase for record in caplog.records if hasattr(record, "phase")]
    assert list(dict.fromkeys(logged)) == [f"download {COMMIT[:12]}", "check the weights"]
    asked = hub.requests
    assert Path(await fetch_weights(PINNED)) == folder
    assert hub.requests == asked


async def test_a_branch_is_resolved_and_the_commit_is_logged(
    hub: LocalHub, caplog: pytest.LogCaptureFixture
) -> None:
    folder = await fetch_weights(WeightsSource(name=REPO))
    assert folder.endswith(COMMIT)
    (warning,) = (record.warning for record in caplog.records if hasattr(record, "warning"))
    assert warning.startswith(f"spec.model.revision: main of hf://{REPO} is the commit {COMMIT}")
    offline = WeightsSource(name=REPO, offline=True)
    assert await fetch_weights(offline) == folder


async def cache_weights_only() -> None:
    """Fill the cache as `AutoModelForCausalLM.from_pretrained` does: without a tokenizer."""
    code = (
        "import huggingface_hub as hub\n"
        "for name in ('config.json', 'model.safetensors'):\n"
        f"    hub.hf_hub_download({REPO!r}, name, revision={COMMIT!r})\n"
        f"    hub.hf_hub_download({REPO!r}, name)\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.warning for record in caplog.records if hasattr(record, "warning")]


@pytest.mark.parametrize("revision", [COMMIT, None], ids=["pinned", "a branch"])
async def test_files_that_another_program_did_not_download_are_downloaded(
    hub: LocalHub, revision: str | None
) -> None:
    await cache_weights_only()
    folder = await fetch_weights(WeightsSource(name=REPO, revision=revision))
    assert set(os.listdir(folder)) == SERVED  # noqa: PTH208


@pytest.mark.parametrize(
    ("revision", "url", "problem"),
    [
        (COMMIT, "http://127.0.0.1:9", "http://127.0.0.1:9 cannot be reached"),
        ("main", None, "the Hub answers with 410"),
    ],
    ids=["pinned", "a branch"],
)
async def test_without_a_hub_the_cache_of_another_program_is_served_with_a_warning(
    hub: LocalHub,
    revision: str,
    url: str | None,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await cache_weights_only()
    await fetch_weights(WeightsSource(name=REPO, revision=revision, offline=True))
    (warning,) = warnings(caplog)
    assert f"has the weights of revision {revision}, but no tokenizer.json; fetch" in warning
    hub.status = 410
    monkeypatch.setenv("HF_ENDPOINT", url or hub.url)
    folder = await fetch_weights(WeightsSource(name=REPO, revision=revision))
    assert folder.endswith(COMMIT)
    warning = warnings(caplog)[-1]
    assert problem in warning
    assert "served from the cache, which may lack files, for example tokenizer.json" in warning


async def test_the_files_of_weights_are_those_that_the_index_names(hub: LocalHub) -> None:
    shards = {f"weights.{index}.safetensors": bytes([index]) * 2 * MIB for index in range(2)}
    index = {"weight_map": dict(zip("abc", [*shards, "../x.safetensors"], strict=True))}
    del hub.files["model.safetensors"]
    hub.files |= shards
    hub.files["consolidated.safetensors"] = b"the same weights again"
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    folder = Path(await fetch_weights(PINNED))
    served = {"config.json", "tokenizer.json", "model.safetensors.index.json", *shards}
    assert set(os.listdir(folder)) == served  # noqa: PTH208
    asked = hub.requests
    assert Path(await fetch_weights(PINNED)) == folder
    assert hub.requests == asked
    damaged = folder / "weights.1.safetensors"
    damaged.resolve().write_bytes(bytes(2 * MIB))
    assert "weights.1.safetensors was damaged in the cache" in str(await error_of(PINNED))
    await fetch_weights(PINNED)
    assert damaged.read_bytes() == shards[damaged.name]


async def test_a_lost_connection_is_resumed(hub: LocalHub) -> None:
    hub.files["model.safetensors"] = LARGE
    hub.closes_after = 12 * MIB
    folder = Path(await fetch_weights(PINNED))
    assert hub.ranges == [None, f"bytes={PART}-"]
    assert (folder / "model.safetensors").read_bytes() == LARGE


async def test_a_killed_download_continues_at_the_next_start(hub: LocalHub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = LARGE
    hub.stalls_after = 12 * MIB
    first = asyncio.ensure_future(fetch_weights(PINNED))
    while (file := partial(tmp_path)) is None or file.stat().st_size < PART:
        assert not first.done(), first.exception()
        await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.wait([first])
    hub.stalls_after = None
    folder = Path(await fetch_weights(PINNED))
    assert hub.ranges == [None, f"bytes={PART}-"]
    assert (folder / "model.safetensors").read_bytes() == LARGE


async def test_a_file_with_another_checksum_never_enters_the_cache(
    hub: LocalHub, tmp_path: Path
) -> None:
    hub.altered["model.safetensors"] = bytes(3 * MIB)
    error = await error_of(PINNED)
    assert "model.safetensors has another checksum than the Hub states" in str(error)
    assert partial(tmp_path) is None
    hub.altered.clear()
    assert (Path(await fetch_weights(PINNED)) / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
async def test_a_file_that_was_damaged_in_the_cache_is_downloaded_again(
    hub: LocalHub, name: str
) -> None:
    file = Path(await fetch_weights(PINNED)) / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.resolve().write_bytes(content)
    assert f"{name} was damaged in the cache" in str(await error_of(PINNED))
    await fetch_weights(PINNED)
    assert file.read_bytes() == FILES[name]


@pytest.mark.parametrize(
    ("change", "source", "message"),
    [
        ({}, WeightsSource(name="tiny/none"), "the Hub has no such model, or it is private"),
        ({}, WeightsSource(name=REPO, revision="v9"), "the Hub has no revision 'v9' of it"),
        ({"gated": True}, PINNED, "the model is gated; request access at"),
        ({"token": "right"}, PINNED, "the Hub has no such model, or it is private"),
        ({"status": 401}, PINNED, "the Hub refuses access (401); set HF_TOKEN"),
        ({"status": 403}, PINNED, "the Hub refuses access (403); set HF_TOKEN"),
        ({"status": 410}, PINNED, "the Hub answers with 410; start again later"),
        ({"files": {"pytorch_model.bin": b""}}, PINNED, "has no model.safetensors"),
        (
            {"files": {"model.safetensors": b"", "vocab.json": b""}},
            PINNED,
            "the tokenizer in vocab.json has no tokenizer.json; create it with",
        ),
        ({}, WeightsSource(name=REPO, offline=True), "and downloads are off"),
    ],
    ids=[
        "unknown", "unknown revision", "gated", "private", "unauthorized", "forbidden", "broken",
        "pickled", "an old tokenizer", "offline",
    ],
)  # fmt: skip
async def test_a_refused_download_is_one_sentence(
    hub: LocalHub, change: dict[str, Any], source: WeightsSource, message: str
) -> None:
    for name, value in change.items():
        setattr(hub, name, value)
    error = await error_of(source)
    assert isinstance(error, InputError)
    assert str(error).startswith(f"hf://{source.name}: ")
    assert message in str(error)


async def test_a_token_of_the_environment_is_sent_and_never_logged(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.token = "hf_secretsecret"
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrong")
    error = await error_of(PINNED)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    await fetch_weights(PINNED)
    assert "secretsecret" not in caplog.text
    assert "wrongwrong" not in f"{error}{caplog.text}"


async def test_an_unreachable_hub_is_named(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    await fetch_weights(PINNED)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert (await fetch_weights(PINNED)).endswith(COMMIT)
    error = await error_of(WeightsSource(name=REPO, revision="main"))
    assert "http://127.0.0.1:9 cannot be reached" in str(error)


async def test_a_cache_that_cannot_be_written_is_named(hub: LocalHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file where the cache should be")
    error = await error_of(PINNED)
    assert isinstance(error, InternalError)
    assert "the cache cannot be written" in str(error)
    assert "set HF_HOME to another folder" in str(error)
