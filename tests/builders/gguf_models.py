"""GGUF files of tiny Llama models, with the names and the layout of llama.cpp.

Import this module only after `pytest.importorskip("torch")`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import gguf
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from tokenizers import Tokenizer

__all__ = ["write_gguf"]

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    file: Path, folder: Path, tokenizer: Tokenizer, template: str, *, parts: int = 1
) -> None:
    """Write a Llama model as a GGUF file with unquantized weights.

    Args:
        file: file to write.
        folder: the model in Hugging Face's format.
        tokenizer: a byte-level tokenizer.
        template: the chat template.
        parts: number of files that the model claims to have.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    if parts > 1:
        writer.add_uint16("split.count", parts)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    content = json.loads(tokenizer.to_str())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    special = {one["content"] for one in content["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(template)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name in _OTHERS:
            writer.add_tensor(_OTHERS[name], tensor)
            continue
        _, _, layer, rest = name.split(".", 3)
        part = _NAMES[rest.removesuffix(".weight")]
        if part in {"attn_q", "attn_k"}:
            tensor = _interleaved(tensor, heads[part[-1]])  # noqa: PLW2901
        writer.add_tensor(f"blk.{layer}.{part}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a projection in the order in which llama.cpp rotates them."""
    rows, columns = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns).copy()
