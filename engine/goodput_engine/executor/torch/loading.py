"""Load a model from a local Hugging Face folder: safetensors only, and no code of the folder."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from goodput_core.errors import InputError
from goodput_core.spec.choices import DataType
from goodput_core.units import BYTES_PER_GIB
from goodput_engine.executor.torch.attention import choose_attention
from goodput_engine.executor.torch.memory import free_bytes
from goodput_engine.executor.torch.model import PackedModel
from goodput_engine.executor.torch.packed_linear import pack_linears
from goodput_engine.executor.torch.self_check import check_model
from goodput_engine.model_folder import read_json_object

if TYPE_CHECKING:
    from goodput_engine.executor.torch.attention import AttentionAdapter

__all__ = ["load_model"]

_CPU: Final = torch.device("cpu")
_CONFIG: Final = "config.json"
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_DETAIL: Final = 300
# Data types of weights that are not quantized.
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
# A file of weights begins with the length of its header, a JSON object.
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000


def load_model(
    folder: Path,
    *,
    dtype: str | None = None,
    device: torch.device = _CPU,
    max_model_tokens: int | None = None,
    adapter: AttentionAdapter | None = None,
) -> PackedModel:
    """Load and check a model.

    Args:
        folder: a folder with `config.json` and weights in the format safetensors.
        dtype: a name of `DataType`, to which the weights are converted; None for float32 on a CPU
            and bfloat16 on a GPU.
        device: where the model is computed.
        max_model_tokens: limit of prompt and output tokens together; None for the model's.
        adapter: computes the attention; None for that of `choose_attention`.

    Raises:
        InputError: the folder is incomplete, its weights are pickled or larger than the available
            memory, it needs its own code, or the model does not pass the self-check.
    """
    if dtype is None:
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    if dtype not in set(DataType):
        raise InputError(f"the data type {dtype!r} is not one of {', '.join(DataType)}")
    config = read_json_object(folder / _CONFIG)
    _check_architecture(folder, config)
    _check_size(folder, _weight_files(folder), dtype, device)
    disable_progress_bar()
    # The grouped product of experts has no kernel for float64.
    experts = {"experts_implementation": "eager"} if dtype == "float64" else {}
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            ),
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
            **experts,
        )
    except Exception as error:  # transformers raises many types for an invalid folder
        detail = " ".join(str(error).split())[:_MAX_DETAIL] or type(error).__name__
        raise InputError(f"{folder}: transformers cannot load the model: {detail}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"{folder}: the weights do not have {missing[0]}; download the model again"
        )
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise InputError(
            f"{folder}: {name} has the shape {list(found)} in the weights and {list(expected)} by "
            f"{_CONFIG}; download the model again"
        )
    try:
        adapter = adapter or choose_attention(device, getattr(torch, dtype))
        network = loaded.to(device).eval()
        model = PackedModel(network, adapter, packed_weights=pack_linears(network))
        context = model.max_model_tokens
        if max_model_tokens is not None:
            if not 1 <= max_model_tokens <= context:
                raise InputError(
                    f"its context has {context} tokens, so the limit must be 1 to {context}, not "
                    f"{max_model_tokens}"
                )
            model.max_model_tokens = max_model_tokens
        check_model(model)
    except InputError as error:
        name = config["model_type"]
        raise InputError(f"{folder}: this {name} model cannot be served: {error}") from error
    return model


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        remedy = "serve a model whose architecture transformers includes"
        if "auto_map" in config:
            raise InputError(
                f"{folder}: {_CONFIG} needs code from the model's folder, which is not executed; "
                f"{remedy}"
            )
        raise InputError(
            f"{folder}: {_CONFIG} has the model_type {str(kind)[:100]!r}, which transformers does "
            f"not know; {remedy}"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(f"{folder}: a {kind} model is not a causal language model")
    if config.get("quantization_config") is not None:
        raise InputError(
            f"{folder}: {_CONFIG} has a quantization_config, and quantized weights are not "
            "implemented yet; serve the model without quantization"
        )


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights, all of which exist."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
        if pickled:
            raise InputError(
                f"{folder}: the weights in {pickled[0]} are pickled, and loading them could "
                "execute code; convert them to safetensors"
            )
        raise InputError(f"{folder}: neither {_WEIGHTS} nor {_INDEX} exists; download the model")
    shards = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise InputError(f"{folder}: {_INDEX} has no weight_map; download the model again")
    names = sorted({str(name) for name in shards.values()})
    for shard in names:
        if Path(shard).name != shard:
            raise InputError(f"{folder}: {_INDEX} names {shard[:200]!r} outside the folder")
        if not (folder / shard).is_file():
            raise InputError(f"{folder}: {shard} is missing; download the model again")
    return [folder / shard for shard in names]


def _check_size(folder: Path, files: list[Path], dtype: str, device: torch.device) -> None:
    """Reject damaged weights, and weights that do not fit into memory."""
    try:
        elements = sum(_count_elements(folder, path) for path in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder}: a file of weights is damaged or incomplete; download the model again: "
            f"{error}"
        ) from error
    size, available = elements * getattr(torch, dtype).itemsize, free_bytes(device)
    if size > available:
        raise InputError(
            f"{folder}: the weights take {size / BYTES_PER_GIB:.1f} GiB as {dtype}, but only "
            f"{available / BYTES_PER_GIB:.1f} GiB of memory is available; serve a smaller model, "
            "or set spec.engine.realModel.dtype or --dtype to a smaller data type"
        )


def _count_elements(folder: Path, path: Path) -> int:
    """Return the number of weights in a file.

    Only the header is read: the library would map the complete file, which the system refuses if
    the file is larger than the memory.

    Raises:
        InputError: weights have a type that is not floating point, such as quantized ones.
        ValueError: the file does not have the announced length; or another error for a header
            that is not of the format.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES).ljust(_LENGTH_BYTES, b"\0"))
        if not length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} has a header of {length} bytes")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    expected, found = _LENGTH_BYTES + length + end, path.stat().st_size
    if found != expected:
        raise ValueError(f"{path.name} has {found} of {expected} bytes")
    for name, tensor in header.items():
        # Buffers, such as masks, may be integers.
        if name.endswith("weight") and tensor["dtype"] not in _FLOATS:
            raise InputError(
                f"{folder}: {name} in {path.name} has the data type {str(tensor['dtype'])[:20]}, "
                "and quantized weights are not implemented yet; serve the model without "
                "quantization"
            )
    return sum(prod(tensor["shape"]) for tensor in header.values())
