"""GGUF files of tiny models, with the names and the layout of llama.cpp.

Import this module only after `pytest.importorskip("torch")`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from tokenizers import Tokenizer

__all__ = ["write_gguf"]

_ARCHITECTURES = {"gemma3_text": "gemma3"}
# Settings by the field of the configuration, as llama.cpp's converter writes them.
_SETTINGS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
    "sliding_window": "attention.sliding_window",
}
_SINGLE_SETTINGS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def write_gguf(
    file: Path,
    folder: Path,
    tokenizer: Tokenizer,
    template: str,
    *,
    parts: int = 1,
    split: str = "gpt-2",
    change: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> None:
    """Write a model as a GGUF file with unquantized weights.

    Args:
        file: file to write.
        folder: the model in Hugging Face's format.
        tokenizer: a byte-level tokenizer.
        template: the chat template.
        parts: number of files that the model claims to have.
        split: name of the tokenizer's split of a text.
        change: adds settings and tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    kind: str = config["model_type"]
    architecture = _ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    if parts > 1:
        writer.add_uint16("split.count", parts)
    _write_settings(writer, config)
    content = json.loads(tokenizer.to_str())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    special = {one["content"] for one in content["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template(template)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    known = {name: index for index, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, suffix = name.rsplit(".", 1)
        found = names.get_name(stem)
        assert found is not None, name
        part = found.rsplit(".", 1)[-1]
        if kind == "llama" and part in {"attn_q", "attn_k"}:
            tensor = _interleaved(tensor, heads[part[-1]])  # noqa: PLW2901
        if kind.startswith("gemma") and found.endswith("norm"):
            tensor = tensor + 1  # noqa: PLW2901
        writer.add_tensor(f"{found}.{suffix}", tensor)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    prefix = writer.arch
    for field, name in _SETTINGS.items():
        if config.get(field) is not None:
            writer.add_uint32(f"{prefix}.{name}", config[field])
    for field, name in _SINGLE_SETTINGS.items():
        if config.get(field) is not None:
            writer.add_float32(f"{prefix}.{name}", config[field])
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))


def _interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a projection in the order in which llama.cpp rotates them."""
    size = weights.shape[0] // heads // 2
    halves = weights.reshape(heads, 2, size, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape).copy()
