"""Complete the configuration that transformers reads from a GGUF file, or refuse the file.

transformers drops tensors and settings that it does not know, and the model then computes other
tokens than the original without an error. So each tensor and each setting of the architecture must
either be applied or be refused by its name. Settings are applied to a configuration here; the
weights are converted elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from goodput_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["ARCHITECTURE", "complete_config"]

ARCHITECTURE: Final = "general.architecture"
_REMEDY: Final = "serve a folder with safetensors"
# Settings that do not change an output, or that the shapes of the tensors repeat.
_NO_EFFECT: Final = frozenset(
    {
        "attention.head_count_kv",
        "context_length",
        "feed_forward_length",
        "tensor_data_layout",
        "use_parallel_residual",  # of StableLM; transformers looks for the tensors of its norm
    }
)
# Fields of the configurations, the first of which that exists is set.
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "vocab_size": ("vocab_size",),
}
_SLIDING_WINDOW: Final = "attention.sliding_window"
_KEY_LENGTH: Final = "attention.key_length"
_VALUE_LENGTH: Final = "attention.value_length"
_CAUSAL: Final = "attention.causal"
# Biases that a configuration enables for all layers.
_BIASES: Final = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}
# The numbers of layers for which llama.cpp scales the queries by another size than that of a head.
_LARGE_GEMMA: Final = {"gemma2": 46, "gemma3": 62}

_ROPE: Final = "rope."
_SCALING: Final = "rope.scaling."
_FREQ_FACTORS: Final = "rope_freqs.weight"
_SHORT_FACTORS: Final = "rope_factors_short.weight"
_LONG_FACTORS: Final = "rope_factors_long.weight"
_FACTORS: Final = frozenset({_FREQ_FACTORS, _SHORT_FACTORS, _LONG_FACTORS})
_YARN: Final = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "original_context_length": "original_max_position_embeddings",
}


def complete_config(file: Path, reader: Any) -> Any:
    """Return the configuration of transformers for a GGUF file, with all settings of the file.

    Args:
        file: the GGUF file.
        reader: a `gguf.GGUFReader` of the file.

    Raises:
        InputError: a tensor or a setting of the file cannot be converted.
    """
    config = AutoConfig.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
    architecture = str(reader.fields[ARCHITECTURE].contents())
    prefix = f"{architecture}."
    settings = {
        key.removeprefix(prefix): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(prefix)
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        _apply_settings(config, architecture, settings)
        _apply_rope(
            config,
            {name: value for name, value in settings.items() if name.startswith(_ROPE)},
            {name: tensors[name].data.tolist() for name in sorted(_FACTORS & tensors.keys())},
        )
    except _UnsupportedSetting as error:
        name = error.name if error.name in tensors else f"{prefix}{error.name}"
        raise InputError(
            f"{file}: the conversion by transformers would ignore {name} of the GGUF file, so the "
            f"outputs would be wrong; {_REMEDY}"
        ) from None
    for field, name in _BIASES.items():
        if hasattr(config, field):
            setattr(config, field, name in tensors)
    _check_tensors(file, config, architecture, [name for name in tensors if name not in _FACTORS])
    return config


class _UnsupportedSetting(Exception):
    """A setting that the configuration cannot have.

    Args:
        name: the setting without its architecture, or a tensor.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _apply_settings(config: Any, architecture: str, settings: Mapping[str, Any]) -> None:
    """Apply the settings outside the rotary embedding that transformers does not read."""
    known = {
        name
        for name, field in GGUF_CONFIG_MAPPING.get(architecture, {}).items()
        if field is not None
    }
    for name, value in settings.items():
        if name in known or name in _NO_EFFECT or name.startswith(_ROPE):
            continue
        if name in {_KEY_LENGTH, _VALUE_LENGTH}:
            _apply_head_dim(config, name, value)
        elif name == _SLIDING_WINDOW and _has_one_window(config):
            config.sliding_window = value or None  # 0 is no window, as in Phi-4
        elif name == _CAUSAL and value:
            continue
        else:
            field = next((one for one in _FIELDS.get(name, ()) if hasattr(config, one)), None)
            if field is None:
                raise _UnsupportedSetting(name)
            setattr(config, field, value)
    if architecture in _LARGE_GEMMA:
        is_large = config.num_hidden_layers == _LARGE_GEMMA[architecture]
        per_head = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = per_head if is_large else config.head_dim


def _has_one_window(config: Any) -> bool:
    """Return True if all layers have the window of the configuration."""
    return hasattr(config, "sliding_window") and getattr(config, "layer_types", None) is None


def _apply_head_dim(config: Any, name: str, value: int) -> None:
    if value == _head_dim(config):
        return
    if name != _KEY_LENGTH or getattr(config, "head_dim", None) is None:
        raise _UnsupportedSetting(name)
    config.head_dim = value


def _head_dim(config: Any) -> int:
    head_dim: int = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return head_dim


def _apply_rope(
    config: Any, settings: Mapping[str, Any], factors: Mapping[str, list[float]]
) -> None:
    """Apply the settings of the rotary embedding, and the tensors with factors for it."""
    by_kind: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope = by_kind.get("full_attention", by_kind)
    left = dict(settings)
    if not rope and (left or factors):
        raise _UnsupportedSetting(next(iter([*left, *factors])))
    if (base := left.pop("rope.freq_base", None)) is not None:
        rope["rope_theta"] = base
    if (base := left.pop("rope.freq_base_swa", None)) is not None:
        if "sliding_attention" not in by_kind:
            raise _UnsupportedSetting("rope.freq_base_swa")
        by_kind["sliding_attention"]["rope_theta"] = base
    if (size := left.pop("rope.dimension_count", None)) is not None:
        _apply_rotary_size(config, rope, size)
    scaling = {name.removeprefix(_SCALING): value for name, value in left.items()}
    scaling.pop("finetuned", None)
    if factors:
        _apply_factors(config, rope, scaling, factors)
    else:
        _apply_scaling(rope, scaling)


def _apply_rotary_size(config: Any, rope: dict[str, Any], size: int) -> None:
    """Set the part of each head that is rotated."""
    head_dim = _head_dim(config)
    if size == int(head_dim * rope.get("partial_rotary_factor", 1.0)):
        return
    if "partial_rotary_factor" not in rope:
        raise _UnsupportedSetting("rope.dimension_count")
    rope["partial_rotary_factor"] = size / head_dim


def _apply_scaling(rope: dict[str, Any], scaling: dict[str, Any]) -> None:
    factor = scaling.pop("factor", None) or 1.0
    # llama.cpp takes a factor without a type as linear.
    kind = scaling.pop("type", "linear")
    if kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        for name in _YARN.keys() & scaling.keys():
            rope[_YARN[name]] = scaling.pop(name)
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in {"none", "linear"}:
        raise _UnsupportedSetting(f"{_SCALING}type")
    # Phi-3 states the context before an extension also if there is none, and a factor of 1.
    scaling.pop("original_context_length", None)
    for name, value in scaling.items():
        if name != "attn_factor" or value != 1.0:
            raise _UnsupportedSetting(name if name.startswith(_ROPE) else f"{_SCALING}{name}")


def _apply_factors(
    config: Any,
    rope: dict[str, Any],
    scaling: dict[str, Any],
    factors: Mapping[str, list[float]],
) -> None:
    """Divide each frequency by a factor, as the type `longrope` of transformers does.

    A file of a Llama 3 has its factors and not the numbers from which transformers computes them.
    They hold for each length, so the long ones are the short ones.
    """
    context = config.max_position_embeddings
    if factors.keys() == {_FREQ_FACTORS}:
        short = long = factors[_FREQ_FACTORS]
        attention_factor, original = 1.0, context
    elif factors.keys() == {_SHORT_FACTORS, _LONG_FACTORS}:
        short, long = factors[_SHORT_FACTORS], factors[_LONG_FACTORS]
        attention_factor = scaling.pop("attn_factor", None)
        original = scaling.pop("original_context_length", None)
        if original is None or not hasattr(config, "original_max_position_embeddings"):
            raise _UnsupportedSetting(_LONG_FACTORS)
        config.original_max_position_embeddings = original
    else:
        raise _UnsupportedSetting(min(factors))
    if scaling.pop("type", "none") not in {"none", "longrope"}:
        raise _UnsupportedSetting(f"{_SCALING}type")
    for name in scaling:
        raise _UnsupportedSetting(name if name.startswith(_ROPE) else f"{_SCALING}{name}")
    rope |= {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": context / original,
        "original_max_position_embeddings": original,
    }
    if attention_factor is not None:
        rope["attention_factor"] = attention_factor


def _check_tensors(file: Path, config: Any, architecture: str, tensors: list[str]) -> None:
    """Reject a tensor that has no place in the model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    places = get_gguf_hf_weights_map(model, processor)
    for name in sorted(tensors):
        # The experts of a layer are one tensor, whose place has no suffix.
        if name not in places and name.removesuffix(".weight") not in places:
            raise InputError(
                f"{file}: transformers has no place for the tensor {name[:200]} in a "
                f"{config.model_type} model, so the outputs would be wrong; {_REMEDY}"
            )
