"""Load a model from a local Hugging Face folder.

By default, the weights must be safetensors, and no code of the folder is executed. Both can be
allowed. Pickled weights are read by torch's restricted unpickler, which executes no code either.
"""

from __future__ import annotations

import json
import logging
import struct
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from goodput_core.errors import InputError
from goodput_core.spec.choices import DataType
from goodput_core.units import BYTES_PER_GIB
from goodput_engine.executor.torch.adapters import AttentionRequest, probe_attention
from goodput_engine.executor.torch.attention import SDPAttention
from goodput_engine.executor.torch.memory import free_bytes, is_out_of_memory
from goodput_engine.executor.torch.model import PackedModel
from goodput_engine.executor.torch.packed_linear import pack_linears
from goodput_engine.executor.torch.self_check import check_model
from goodput_engine.model_folder import read_json_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import PreTrainedConfig

    from goodput_engine.executor.torch.attention import AttentionAdapter

__all__ = ["load_model"]

_CPU: Final = torch.device("cpu")
_AUTO: Final = AttentionRequest()
_CONFIG: Final = "config.json"
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_PICKLED_WEIGHTS: Final = "pytorch_model.bin"
_PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
_SAFE: Final = ".safetensors"
_DTYPES: Final = tuple(one for one in DataType if one is not DataType.AUTO)
_MAX_DETAIL: Final = 300
_MAX_VALUE: Final = 100
_MAX_REPORTS: Final = 1_000
# Fields of a configuration that are at least 1 in every architecture that has them.
_SIZES: Final = frozenset(
    {
        "head_dim",
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
    }
)
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
    attention: AttentionRequest = _AUTO,
    adapter: AttentionAdapter | None = None,
    allow_pickle_weights: bool = False,
    allow_remote_code: bool = False,
    on_loaded: Callable[[], None] | None = None,
) -> PackedModel:
    """Load and check a model.

    Args:
        folder: a folder with `config.json` and weights in the format safetensors.
        dtype: a name of `DataType` other than `auto`, to which the weights are converted; None for
            float32 on a CPU and bfloat16 on a GPU.
        device: where the model is computed.
        max_model_tokens: limit of prompt and output tokens together; None for the model's.
        attention: the configured attention.
        adapter: computes the attention instead; None for that of `attention`.
        allow_pickle_weights: True to load pickled weights if the folder has no safetensors.
        allow_remote_code: True to execute the code of the folder if its configuration names some.
        on_loaded: called when the weights are on the device, before the first token is computed.

    Raises:
        InputError: the folder is incomplete, its weights are pickled or larger than the available
            memory, it needs its own code, the attention cannot be used, or the model does not
            pass the self-check.
    """
    if dtype is None:
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    if dtype not in _DTYPES:
        raise InputError(f"the data type {dtype!r} is not one of {', '.join(_DTYPES)}")
    probed = probe_attention(attention, device=device, dtype=getattr(torch, dtype))
    config = read_json_object(folder / _CONFIG)
    executes_code = allow_remote_code and "auto_map" in config
    _check_architecture(folder, config, executes_code=executes_code)
    files = _weight_files(folder, allow_pickle=allow_pickle_weights)
    tensors = _check_size(folder, files, dtype, device)
    disable_progress_bar()
    # The grouped product of experts has no kernel for float64.
    experts = {"experts_implementation": "eager"} if dtype == "float64" else {}
    with _reports_if_loaded():
        try:
            configuration = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=executes_code
            )
            _check_layers(folder, configuration, tensors)
            loaded, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=configuration,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=executes_code,
                use_safetensors=files[0].suffix == _SAFE,
                weights_only=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
                **experts,
            )
        except InputError:
            raise
        except Exception as error:  # transformers raises many types for an invalid folder
            field = _invalid_field(config, error)
            if field is not None:
                raise InputError(
                    f"{folder}: {_CONFIG}: {field}; download the model again"
                ) from error
            raise InputError(
                f"{folder}: transformers cannot load the model: {_one_line(error)}"
            ) from error
        _check_loaded(folder, info)
    try:
        network = loaded.to(device).eval()
        if on_loaded is not None:
            on_loaded()
        model = _probed_model(network)
        context = model.max_model_tokens
        if max_model_tokens is not None:
            if not 1 <= max_model_tokens <= context:
                raise InputError(
                    f"its context has {context} tokens, so the limit must be 1 to {context}, not "
                    f"{max_model_tokens}"
                )
            model.max_model_tokens = max_model_tokens
        selected, model.attention_choice = probed.select(model.geometry.head_dim)
        model.adapter = adapter or selected
        check_model(model)
    except InputError as error:
        name = config["model_type"]
        raise InputError(f"{folder}: this {name} model cannot be served: {error}") from error
    return model


def _probed_model(network: Any) -> PackedModel:
    """Return the model after a first token.

    Raises:
        InputError: the model is not supported, or its code raises an error.
    """
    packed = pack_linears(network)
    try:
        return PackedModel(network, SDPAttention(), packed_weights=packed)
    except (InputError, torch.AcceleratorError):
        raise
    except Exception as error:  # the code of a model may raise any type
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"its code raises {type(error).__name__} for the first token ({_one_line(error)}); "
            f"correct {_CONFIG}, or serve another model"
        ) from error


@contextmanager
def _reports_if_loaded() -> Iterator[None]:
    """Print the reports of transformers only if the block succeeds: an error is one sentence."""
    logger = logging.getLogger("transformers")
    handlers, held = logger.handlers, MemoryHandler(_MAX_REPORTS, flushLevel=logging.CRITICAL + 1)
    logger.handlers = [held]
    try:
        yield
    finally:
        logger.handlers = handlers
    for record in held.buffer:
        logger.handle(record)


def _invalid_field(config: Mapping[str, Any], error: Exception) -> str | None:
    """Return the field of a configuration that explains an error, and its problem; None if none.

    The configuration is searched only after the error, because an architecture may accept values
    that others do not.
    """
    for path, name, value in _fields(config):
        shown = f"{path} is {repr(value)[:_MAX_VALUE]}"
        if name in _SIZES and isinstance(value, int) and value < 1:
            return f"{shown}, but must be at least 1"
        if not isinstance(value, str):
            continue
        if isinstance(error, KeyError) and error.args == (value,):
            return f"{shown}, which transformers does not know"
        is_type = isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype)
        if name in {"dtype", "torch_dtype"} and not is_type:
            return f"{shown}, which is not a data type of torch"
    return None


def _fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the name and the value of each field, also of those in objects."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", name, value


def _check_loaded(folder: Path, info: Mapping[str, Any]) -> None:
    """Reject weights that do not have the names and shapes of the configuration."""
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


def _check_architecture(folder: Path, config: dict[str, Any], *, executes_code: bool) -> None:
    kind = config.get("model_type")
    if executes_code:
        pass
    elif not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        remedy = "serve a model whose architecture transformers includes"
        if "auto_map" in config:
            raise InputError(
                f"{folder}: {_CONFIG} needs code from the model's folder, which is not executed; "
                f"{remedy}, or trust this code and add --allow-remote-code"
            )
        raise InputError(
            f"{folder}: {_CONFIG} has the model_type {str(kind)[:100]!r}, which transformers does "
            f"not know; {remedy}"
        )
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(f"{folder}: a {kind} model is not a causal language model")
    if config.get("quantization_config") is not None:
        raise InputError(
            f"{folder}: {_CONFIG} has a quantization_config, and quantized weights are not "
            "implemented yet; serve the model without quantization"
        )


def _weight_files(folder: Path, *, allow_pickle: bool) -> list[Path]:
    """Return the files of weights, all of which exist and have one format."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        return _shards(folder, _INDEX)
    if allow_pickle and (folder / _PICKLED_WEIGHTS).is_file():
        return [folder / _PICKLED_WEIGHTS]
    if allow_pickle and (folder / _PICKLED_INDEX).is_file():
        return _shards(folder, _PICKLED_INDEX)
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled and allow_pickle:
        raise InputError(
            f"{folder}: the weights in {pickled[0]} are pickled, and only {_PICKLED_WEIGHTS} or "
            f"the shards of {_PICKLED_INDEX} can be loaded; rename the file, or convert it to "
            "safetensors"
        )
    if pickled:
        raise InputError(
            f"{folder}: the weights in {pickled[0]} are pickled, and loading them could "
            "execute code; convert them to safetensors, or add --allow-pickle-weights to load "
            "them with torch's restricted unpickler"
        )
    raise InputError(f"{folder}: neither {_WEIGHTS} nor {_INDEX} exists; download the model")


def _shards(folder: Path, index: str) -> list[Path]:
    """Return the files that an index names."""
    shards = read_json_object(folder / index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise InputError(f"{folder}: {index} has no weight_map; download the model again")
    names = sorted({str(name) for name in shards.values()})
    suffix = Path(index.removesuffix(".index.json")).suffix
    for shard in names:
        if Path(shard).name != shard:
            raise InputError(f"{folder}: {index} names {shard[:200]!r} outside the folder")
        if Path(shard).suffix != suffix:
            raise InputError(f"{folder}: {index} names {shard[:200]!r}, which is no {suffix} file")
        if not (folder / shard).is_file():
            raise InputError(f"{folder}: {shard} is missing; download the model again")
    return [folder / shard for shard in names]


def _check_layers(folder: Path, configuration: PreTrainedConfig, tensors: int) -> None:
    """Reject a number of layers for which there are no weights, before the layers are created."""
    layers = getattr(configuration.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and not 1 <= layers <= tensors:
        raise InputError(
            f"{folder}: {_CONFIG} has {layers} layers, but the weights have {tensors} tensors; "
            "download the model again"
        )


def _check_size(folder: Path, files: list[Path], dtype: str, device: torch.device) -> int:
    """Reject damaged weights, and weights that do not fit into memory.

    Returns:
        The number of tensors in the files.
    """
    try:
        lengths = [
            length
            for path in files
            for length in (
                _read_lengths(folder, path) if path.suffix == _SAFE else _pickled_lengths(path)
            )
        ]
    except UnpicklingError as error:
        raise InputError(
            f"{folder}: a pickled file of weights has more than tensors, or is damaged, and is not "
            f"loaded: {_one_line(error)}"
        ) from error
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        EOFError,
    ) as error:
        raise InputError(
            f"{folder}: a file of weights is damaged or incomplete; download the model again: "
            f"{_one_line(error)}"
        ) from error
    size, available = sum(lengths) * getattr(torch, dtype).itemsize, free_bytes(device)
    if size > available:
        raise InputError(
            f"{folder}: the weights take {size / BYTES_PER_GIB:.1f} GiB as {dtype}, but only "
            f"{available / BYTES_PER_GIB:.1f} GiB of memory is available; serve a smaller model, "
            "or set spec.engine.realModel.dtype or --dtype to a smaller data type"
        )
    return len(lengths)


def _read_lengths(folder: Path, path: Path) -> list[int]:
    """Return the number of elements of each tensor in a file.

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
    return [prod(tensor["shape"]) for tensor in header.values()]


def _pickled_lengths(path: Path) -> list[int]:
    """Return the number of elements of each tensor in a pickled file; only shapes are read.

    Raises:
        UnpicklingError: the file has more than tensors, or is damaged.
        RuntimeError: the file is damaged, or older than torch 1.6.
        TypeError: the file has no weights by their names.
    """
    weights = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    if not isinstance(weights, dict):
        raise TypeError(f"{path.name} has no weights by their names")
    tensors = [value for value in weights.values() if isinstance(value, torch.Tensor)]
    if not tensors:
        raise TypeError(f"{path.name} has no weights")
    return [tensor.numel() for tensor in tensors]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_DETAIL] or type(error).__name__
