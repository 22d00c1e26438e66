"""A GGUF file is converted once into a checksummed folder, which serves the same model."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import aiohttp
from safetensors.numpy import load_file
from tests.builders.gguf_models import write_gguf
from tests.builders.torch_models import make_folder
from tests.engine.server.test_real_text import TEMPLATE, VOCABULARY, make_tokenizer
from transformers import AutoTokenizer

from goodput_core.errors import InputError
from goodput_engine.executor.torch import gguf_conversion
from goodput_engine.weights.fetch import fetch_weights
from goodput_engine.weights.gguf import converted_folder
from goodput_engine.weights.progress import FetchProgress
from goodput_engine.weights.source import WeightsSource

if TYPE_CHECKING:
    from pathlib import Path

    import gguf
    from tests.engine.conftest import RunEngine, StartEngine

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Hugging Face's format."""
    return make_folder(tmp_path_factory.mktemp("tiny"), "Llama", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def file(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a GGUF file."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf"
    write_gguf(file, original, make_tokenizer(), TEMPLATE)
    return file


def convert(file: Path, cache: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Convert a file; return the folder and the lines of its progress."""
    out = io.StringIO()
    folder = converted_folder(file, dtype="float32", cache=cache, progress=FetchProgress(out))
    return folder, [json.loads(line) for line in out.getvalue().splitlines()]


def phases(lines: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(line["phase"] for line in lines if "phase" in line))


def test_weights_tokenizer_and_template_survive_the_conversion(
    original: Path, file: Path, tmp_path: Path
) -> None:
    folder, lines = convert(file, tmp_path)
    assert phases(lines) == ["read tiny.F32.gguf", "convert tiny.F32.gguf to float32"]
    found, expected = (load_file(one / "model.safetensors") for one in (folder, original))
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "user: the quick brown Grüße 🦊"
    assert (
        tokenizer(text, add_special_tokens=False)["input_ids"] == make_tokenizer().encode(text).ids
    )
    assert tokenizer.chat_template == TEMPLATE


def test_a_converted_file_is_used_again_until_it_is_damaged_or_the_source_changes(
    file: Path, tmp_path: Path
) -> None:
    folder, _ = convert(file, tmp_path)
    weights = folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    again, lines = convert(file, tmp_path)
    assert (again, weights.stat().st_mtime_ns) == (folder, written)
    assert phases(lines) == ["read tiny.F32.gguf", "check the converted weights"]

    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    damaged, lines = convert(file, tmp_path)
    assert damaged == folder
    (warning,) = (line["warning"] for line in lines if "warning" in line)
    assert warning.startswith(f"model.safetensors in {folder} is damaged, so")
    content[-1] ^= 1
    assert weights.read_bytes() == content

    (folder / "checksums.json").write_text("[]")
    _, lines = convert(file, tmp_path)
    assert any("checksums.json" in line.get("warning", "") for line in lines)

    copy = tmp_path / "other.gguf"
    shutil.copy(file, copy)
    with copy.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\0\0\0?")
    assert convert(copy, tmp_path)[0] != folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"PK" + data[2:], "is not a GGUF file; download it again"),
        (lambda data: data[: len(data) // 2], "damaged or incomplete; download it again"),
        (lambda data: data[:40], "damaged or incomplete; download it again"),
        (lambda data: data.replace(b"llama", b"lamma"), "of the architecture 'lamma'"),
        (
            lambda data: data.replace(b"ffn_up", b"ffn_ab"),
            r"has no place for the tensor blk.0.ffn_ab.weight in a llama model",
        ),
    ],
    ids=["another format", "half a file", "half a header", "unknown", "an unknown tensor"],
)
def test_an_invalid_file_is_refused_with_its_name(
    file: Path, tmp_path: Path, change: Any, message: str
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(change(file.read_bytes()))
    with pytest.raises(InputError, match=message) as caught:
        convert(bad, tmp_path / "cache")
    assert str(bad) in str(caught.value)
    assert not [one for one in (tmp_path / "cache").glob("*") if one.suffix != ".lock"]


def test_a_file_without_a_tensor_is_refused_with_its_name(original: Path, tmp_path: Path) -> None:
    def remove(writer: gguf.GGUFWriter) -> None:
        del writer.tensors[0]["blk.0.ffn_up.weight"]

    bad = tmp_path / "bad.gguf"
    write_gguf(bad, original, make_tokenizer(), TEMPLATE, change=remove)
    with pytest.raises(InputError, match=r"does not have model\.layers\.0\.mlp\.up_proj\.weight"):
        convert(bad, tmp_path / "cache")


@pytest.mark.parametrize("first", [True, False], ids=["the first", "a later one"])
def test_a_part_of_a_divided_model_is_refused_with_the_remedy(
    original: Path, tmp_path: Path, first: bool
) -> None:
    part = tmp_path / "tiny-00001-of-00003.gguf"
    write_gguf(part, original, make_tokenizer(), TEMPLATE, parts=3)
    if not first:  # later parts have no architecture
        part.write_bytes(part.read_bytes().replace(b"general.arch", b"general.else"))
    with pytest.raises(InputError, match="is one of 3 parts of a model; merge them with"):
        convert(part, tmp_path / "cache")


def test_a_model_larger_than_the_memory_is_not_converted(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_conversion, "available_bytes", lambda: 1000)
    with pytest.raises(InputError, match=r"the conversion needs 0\.0 GiB of memory"):
        convert(file, tmp_path)


async def test_an_engine_serves_a_gguf_file(
    start_engine: StartEngine,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("GOODPUT_CACHE", str(tmp_path))
    await fetch_weights(WeightsSource(name=str(file), dtype="float32"))
    phases = [record.phase for record in caplog.records if hasattr(record, "phase")]
    assert "convert tiny.F32.gguf to float32" in phases
    engine = start_engine(*("--kv-blocks", "40", "--threads", "1"), source=f"file://{file}")
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": "the fox"}],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        answer = await response.json()
    assert answer["usage"]["completion_tokens"] == 4
    assert 'phase="check the converted weights"' in engine.stderr()
    assert (await engine.state())["device"]["name"] == "tiny.F32.gguf"


def test_a_missing_file_ends_the_engine_with_one_sentence(
    run_engine: RunEngine, tmp_path: Path
) -> None:
    result = run_engine(source=f"file://{tmp_path}/none.gguf")
    assert result.returncode == 64
    assert result.stderr.splitlines()[-1] == (
        f"error: {tmp_path}/none.gguf: the GGUF file cannot be read (No such file or directory)"
    )
