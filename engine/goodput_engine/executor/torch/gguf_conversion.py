"""Convert a GGUF file with transformers, which reads its tensors and its tokenizer.

The tensors are dequantized, because the engine computes with plain weights. Only
`goodput_engine.weights.gguf` imports this module, if a file is not converted yet: the import of
transformers takes seconds.
"""

from __future__ import annotations

import shutil
from math import prod
from typing import TYPE_CHECKING, Any, Final

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from goodput_core.contract import ENV_CACHE
from goodput_core.errors import InputError
from goodput_core.units import BYTES_PER_GIB
from goodput_engine.executor.torch.gguf_settings import ARCHITECTURE, complete_config
from goodput_engine.executor.torch.memory import available_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["convert"]

_FLOAT_BYTES: Final = 4
# The number of files into which llama.cpp divides a large model.
_PARTS: Final = "split.count"
# The ends of a text, of a chat message, and of a message that calls a tool.
_ENDS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_TOKENIZER: Final = "tokenizer.ggml.model"
_BYTE_LEVEL: Final = "gpt2"
_SPLIT: Final = "tokenizer.ggml.pre"
# The names for which llama.cpp splits as for GPT-2, and those with each digit on its own.
_LIKE_GPT2: Final = frozenset(
    {"gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "trillion"}
)
_SINGLE_DIGITS: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_MAX_DETAIL: Final = 300


def convert(file: Path, folder: Path, dtype: str, warn: Callable[[str], None]) -> None:
    """Write a folder in Hugging Face's format.

    Args:
        file: a GGUF file.
        folder: folder to write; its parent exists.
        dtype: data type of the weights in the folder.
        warn: gets sentences for the user.

    Raises:
        InputError: the file is damaged, not supported, or too large for the memory or the disk.
        OSError: the folder cannot be written.
    """
    reader, parameters = _open(file)
    _require_space(file, folder.parent, parameters, dtype)
    _convert(file, reader, folder, dtype, warn)


def _open(file: Path) -> tuple[Any, int]:
    """Return a `gguf.GGUFReader` of a file, and the number of weights in it.

    Raises:
        InputError: the file is incomplete, a part of a model, or of an architecture that is not
            supported.
    """
    try:
        reader: Any = gguf.GGUFReader(file)
        parts = reader.get_field(_PARTS)
        num_parts = 1 if parts is None else int(parts.contents())
        # Only the first part has the architecture.
        architecture = "" if num_parts > 1 else str(reader.fields[ARCHITECTURE].contents())
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
        parameters = sum(prod(map(int, tensor.shape)) for tensor in reader.tensors)
    except Exception as error:  # the package raises many types for an invalid file
        raise InputError(
            f"{file}: the GGUF file is damaged or incomplete; download it again: {_detail(error)}"
        ) from error
    if num_parts > 1:
        raise InputError(
            f"{file}: the file is one of {num_parts} parts of a model; merge them with "
            "llama-gguf-split --merge of llama.cpp, and serve the result"
        )
    if end > file.stat().st_size or not parameters:
        raise InputError(f"{file}: the GGUF file is incomplete; download it again")
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise InputError(
            f"{file}: transformers cannot convert GGUF files of the architecture "
            f"{architecture[:100]!r}; serve a folder with safetensors"
        )
    return reader, parameters


def _require_space(file: Path, cache: Path, parameters: int, dtype: str) -> None:
    """Reject a file whose weights do not fit into the memory or on the disk."""
    needed, available = parameters * _FLOAT_BYTES, available_bytes()
    if needed > available:
        raise InputError(
            f"{file}: the conversion needs {needed / BYTES_PER_GIB:.1f} GiB of memory, but only "
            f"{available / BYTES_PER_GIB:.1f} GiB is available; convert it on a larger machine and "
            "serve the folder"
        )
    needed, free = parameters * getattr(torch, dtype).itemsize, shutil.disk_usage(cache).free
    if needed > free:
        raise InputError(
            f"{file}: the converted weights take {needed / BYTES_PER_GIB:.1f} GiB as {dtype}, but "
            f"{cache} has only {free / BYTES_PER_GIB:.1f} GiB left; free some space, or set "
            f"{ENV_CACHE} to a folder of another disk"
        )


def _convert(
    file: Path, reader: Any, folder: Path, dtype: str, warn: Callable[[str], None]
) -> None:
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        config = complete_config(file, reader)
        model, info = AutoModelForCausalLM.from_pretrained(
            **source,
            config=config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        if info["missing_keys"]:
            # transformers would fill them with random numbers.
            raise InputError(
                f"{file}: the GGUF file does not have {min(info['missing_keys'])}; download it "
                "again, or serve a folder with safetensors"
            )
        # The weights are no longer quantized, and a quantized model could not be saved.
        model.hf_quantizer = None
        model.is_quantized = False
        del model.config.quantization_config
        _set_ends(model, reader)
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(
            **source, local_files_only=True, trust_remote_code=False
        )
        _set_split(file, tokenizer, reader, warn)
        tokenizer.save_pretrained(folder)
    except InputError:
        raise
    except OSError as error:
        if error.errno is not None:  # the disk, not the content
            raise
        raise _cannot_convert(file, error) from error
    except Exception as error:  # transformers raises many types for an invalid file
        raise _cannot_convert(file, error) from error


def _set_ends(model: Any, reader: Any) -> None:
    """Let each token that ends a text, a chat message or a call end an output."""
    fields = (reader.get_field(key) for key in _ENDS)
    found = {field.contents(): None for field in fields if field is not None}
    value = model.config.eos_token_id
    # transformers knows more ends of some architectures.
    ends = list(dict.fromkeys(value if isinstance(value, list) else []) | found)
    if ends:
        model.config.eos_token_id = ends if len(ends) > 1 else ends[0]
        model.generation_config.eos_token_id = model.config.eos_token_id


def _set_split(file: Path, tokenizer: Any, reader: Any, warn: Callable[[str], None]) -> None:
    """Let a byte-level tokenizer split the text as the model has learned.

    transformers splits it as GPT-2 does if it does not know the name of the split.
    """
    model, name = (reader.get_field(key) for key in (_TOKENIZER, _SPLIT))
    if model is None or model.contents() != _BYTE_LEVEL:
        return
    split = None if name is None else str(name.contents())
    if split in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif split not in _LIKE_GPT2 and split not in GGUF_PRE_TOKENIZER_SPLITS:
        stated = "no split" if split is None else f"the split {split[:100]!r}"
        warn(
            f"{file}: {_SPLIT} states {stated}, which transformers does not know, so text is split "
            "as for GPT-2 and may get other token ids than the model expects; serve a folder with "
            "tokenizer.json if its answers are poor"
        )


def _cannot_convert(file: Path, error: Exception) -> InputError:
    return InputError(f"{file}: transformers cannot convert the file: {_detail(error)}")


def _detail(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_DETAIL] or type(error).__name__
