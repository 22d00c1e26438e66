"""The converted model of a GGUF file has the logits of the original, or the file is refused."""

from __future__ import annotations

import io
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tests.builders.gguf_models import write_gguf
from tests.builders.torch_models import CONTEXT, make_folder
from tests.engine.server.test_real_text import TEMPLATE, VOCABULARY, make_tokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from goodput_core.errors import InputError
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.weights.gguf import converted_folder
from goodput_engine.weights.progress import FetchProgress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[gguf.GGUFWriter], None]

pytestmark = pytest.mark.torch

THETA = 10_000.0
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}


def write(
    tmp_path: Path, architecture: str, change: Change, *, split: str = "gpt-2", **values: Any
) -> Path:
    """Write a model in both formats; return the GGUF file beside the folder `original`."""
    original = make_folder(tmp_path / "original", architecture, vocab_size=VOCABULARY, **values)
    # New biases are zero and new norms are one, so their loss would change nothing.
    weights = load_file(original / "model.safetensors")
    random = np.random.default_rng(7)
    for name, one in weights.items():
        if one.ndim == 1:
            weights[name] = one + random.normal(scale=0.3, size=one.shape).astype(one.dtype)
    save_file(weights, original / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "tiny.gguf"
    write_gguf(file, original, make_tokenizer(), TEMPLATE, split=split, change=change)
    return file


def convert(file: Path) -> tuple[Path, list[str]]:
    """Convert a file; return the folder and the warnings."""
    out = io.StringIO()
    folder = converted_folder(
        file, dtype="float32", cache=file.parent / "cache", progress=FetchProgress(out)
    )
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    return folder, [line["warning"] for line in lines if "warning" in line]


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.arange(100)[None] % 89
        return model(ids).logits


def llama3_factors(writer: gguf.GGUFWriter) -> None:
    """Add the factors that llama.cpp computes for a Llama 3 with heads of 8."""
    factors = []
    for at in range(0, 8, 2):
        length = 2 * math.pi * THETA ** (at / 8)
        smooth = min(max((64 / length - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def linear_beside_windows(writer: gguf.GGUFWriter) -> None:
    linear(writer)
    writer.add_rope_freq_base_swa(5_000.0)


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(CONTEXT / 64) / math.log(64)))
    for name in ("short", "long"):
        factors = np.array(LONG[f"{name}_factor"], dtype=np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)


def nothing(_: gguf.GGUFWriter) -> None:
    """Add nothing."""


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": THETA, **values}}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
GEMMA3_LINEAR = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
    },
    "sliding_window": 7,
    "num_hidden_layers": 7,
}
PHI3_LONG = {
    **rope("longrope", original_max_position_embeddings=64, **LONG),
    "original_max_position_embeddings": 64,
}
CONVERTED: dict[str, tuple[str, Change, dict[str, Any]]] = {
    "llama": ("Llama", nothing, {}),
    "llama with the factors of Llama 3": ("Llama", llama3_factors, LLAMA3),
    "llama with linear scaling": ("Llama", linear, rope("linear", factor=4.0)),
    "llama with yarn": (
        "Llama",
        yarn,
        rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama with biases": ("Llama", nothing, {"attention_bias": True, "mlp_bias": True}),
    "llama with other heads": ("Llama", nothing, {"head_dim": 16}),
    "qwen2": ("Qwen2", nothing, {}),
    "qwen2 with yarn": (
        "Qwen2",
        yarn,
        rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "qwen3": ("Qwen3", nothing, {"head_dim": 16}),
    "phi3": ("Phi3", nothing, {}),
    "phi3 with a window": ("Phi3", nothing, {"sliding_window": 7}),
    "phi3 with a part of each head": ("Phi3", nothing, rope("default", partial_rotary_factor=0.5)),
    "phi3 with long factors": ("Phi3", longrope, PHI3_LONG),
    "gemma2": ("Gemma2", nothing, {"final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", nothing, {"num_hidden_layers": 7}),
    "gemma3 with linear scaling": (
        "Gemma3Text",
        linear_beside_windows,
        GEMMA3_LINEAR,
    ),
    "starcoder2": ("Starcoder2", nothing, {"sliding_window": None, **rope("default")}),
    "starcoder2 with a base": (
        "Starcoder2",
        nothing,
        {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_model_has_the_logits_of_the_original(name: str, tmp_path: Path) -> None:
    architecture, change, values = CONVERTED[name]
    file = write(tmp_path, architecture, change, **values)
    folder, _ = convert(file)
    torch.testing.assert_close(logits(folder), logits(tmp_path / "original"), rtol=1e-4, atol=1e-4)
    load_model(folder, max_model_tokens=64)


def biases(writer: gguf.GGUFWriter) -> None:
    """Add biases of queries, keys and values, but none of the outputs."""
    for layer in range(2):
        for name, size in (("q", 32), ("k", 16), ("v", 16)):
            writer.add_tensor(f"blk.{layer}.attn_{name}.bias", np.ones(size, dtype=np.float32))


def yarn_with_a_multiplier(writer: gguf.GGUFWriter) -> None:
    yarn(writer)
    writer.add_rope_scaling_yarn_log_mul(0.1)


def short_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_factors_short.weight", np.ones(4, dtype=np.float32))


def scaled_factors(writer: gguf.GGUFWriter) -> None:
    llama3_factors(writer)
    linear(writer)


REFUSED: dict[str, tuple[str, Change, str]] = {
    "biases": ("Llama", biases, "no place for the tensor blk.0.attn_k.bias in a llama model"),
    "a window": (
        "Llama",
        lambda writer: writer.add_sliding_window(7),
        "would ignore llama.attention.sliding_window of",
    ),
    "a window of some layers": (
        "Qwen2",
        lambda writer: writer.add_sliding_window(7),
        "would ignore qwen2.attention.sliding_window of",
    ),
    "a pattern of windows": (
        "Gemma3Text",
        lambda writer: writer.add_sliding_window_pattern(3),
        "would ignore gemma3.attention.sliding_window_pattern of",
    ),
    "a scale": (
        "Llama",
        lambda writer: writer.add_logit_scale(0.5),
        "would ignore llama.logit_scale of",
    ),
    "another scaling": (
        "Llama",
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        "would ignore llama.rope.scaling.type of",
    ),
    "a multiplier": (
        "Llama",
        yarn_with_a_multiplier,
        "would ignore llama.rope.scaling.yarn_log_multiplier of",
    ),
    "some of two factors": ("Phi3", short_factors, "would ignore rope_factors_short.weight of"),
    "factors and a scaling": (
        "Llama",
        scaled_factors,
        "would ignore llama.rope.scaling.type of",
    ),
    "a part of each head": (
        "Llama",
        lambda writer: writer.add_uint32("llama.attention.value_length", 4),
        "would ignore llama.attention.value_length of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_would_lose_a_tensor_or_a_setting_is_refused(name: str, tmp_path: Path) -> None:
    architecture, change, message = REFUSED[name]
    file = write(tmp_path, architecture, change)
    with pytest.raises(InputError, match=message) as caught:
        convert(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert str(caught.value).endswith(
        "so the outputs would be wrong; serve a folder with safetensors"
    )


def test_each_end_of_the_file_ends_an_output(tmp_path: Path) -> None:
    def ends(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(2)
        writer.add_eom_token_id(3)

    folder, _ = convert(write(tmp_path, "Llama", ends))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == [1, 2, 3]
    assert load_model(folder).stop_ids == {1, 2, 3}


@pytest.mark.parametrize(
    ("name", "pieces", "warns"),
    [
        ("smollm", [" a", " ", "4", "2", "'s"], False),
        ("gpt-2", [" a", " 42", "'s"], False),
        ("llama-bpe", [" a", " ", "42", "'s"], False),
        ("deepseek-llm", [" a", " 42", "'s"], True),
    ],
)
def test_text_is_split_as_the_file_states(
    name: str, pieces: list[str], warns: bool, tmp_path: Path
) -> None:
    file = write(tmp_path, "Llama", nothing, split=name)
    folder, warnings = convert(file)
    split = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    found = [piece.replace("Ġ", " ") for piece, _ in split.pre_tokenize_str(" a 42's")]
    assert found == pieces
    assert [
        f"states the split '{name}', which transformers does not" in one for one in warnings
    ] == ([True] if warns else [])
