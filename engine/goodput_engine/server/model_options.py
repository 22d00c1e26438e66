"""A real model in the HTTP process: the options of `goodput engine`, and the model's tokenizer."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from goodput_core.cli import argument_type, parse_whole
from goodput_core.errors import SpecError, UsageError, install_hint
from goodput_core.process import count_cpus
from goodput_core.spec.choices import AttentionKernel, DataType, SamplingSource
from goodput_core.spec.support import require_computable, require_local
from goodput_core.spec.workloads import (
    DEFAULT_BLOCK,
    FLASH_ATTN_BLOCK,
    block_size_problem,
    default_block_size,
)
from goodput_engine.messages import ModelFolder
from goodput_engine.openai.sampling_fields import OPENAI_DEFAULTS
from goodput_engine.server.generation_config import read_sampling_defaults
from goodput_engine.weights.source import local_folder, weights_source

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_core.spec.workloads import RealModelSpec
    from goodput_engine.openai.sampling_fields import SamplingDefaults
    from goodput_engine.text.tokenizer import ModelTokenizer

__all__ = [
    "add_dtype_argument",
    "add_model_arguments",
    "add_model_path_argument",
    "choose_model",
    "load_text_settings",
]

_MAX_BLOCKS: Final = 100_000_000
_MAX_TOKENS: Final = 1_048_576
_MAX_BLOCK_SIZE: Final = 1024
_MAX_THREADS: Final = 1024
_MAX_PERCENT: Final = 95
# Options by the field of `ModelFolder` that they set.
_OPTIONS: Final = {
    "dtype": "--dtype",
    "max_model_tokens": "--max-model-tokens",
    "attention": "--attention",
    "block_size": "--block-size",
    "kv_blocks": "--kv-blocks",
    "memory_percent": "--memory-utilization",
    "threads": "--threads",
    "sampling_defaults": "--sampling-defaults",
    "allow_pickle_weights": "--allow-pickle-weights",
    "allow_remote_code": "--allow-remote-code",
}
# Of a folder whose content the user knows; no manifest can set them.
_TRUST: Final = ("allow_pickle_weights", "allow_remote_code")


def add_model_arguments(parser: argparse.ArgumentParser, *, serves: bool) -> None:
    """Add the options that apply to real models only.

    Args:
        parser: the parser of a command.
        serves: True if the command serves requests with sampling fields.
    """
    group = parser.add_argument_group(
        "options for a real model, instead of the fields of spec.engine.realModel"
    )
    add_model_path_argument(group)
    add_dtype_argument(group)
    group.add_argument(
        "--max-model-tokens", type=_whole(_MAX_TOKENS, "a number of tokens"), metavar="N",
        help="limit of prompt and output together (default: that of the model)",
    )  # fmt: skip
    group.add_argument(
        "--attention", choices=[one.value for one in AttentionKernel],
        help="kernel of the attention (auto: torch on a CPU; on a GPU flash-attn if that is "
        f"installed and --block-size is a multiple of {FLASH_ATTN_BLOCK}, else triton)",
    )  # fmt: skip
    group.add_argument(
        "--block-size", type=_whole(_MAX_BLOCK_SIZE, "a number of tokens"), metavar="N",
        help=f"tokens per KV block ({DEFAULT_BLOCK}; {FLASH_ATTN_BLOCK} with --attention "
        "flash-attn)",
    )  # fmt: skip
    group.add_argument(
        "--kv-blocks", type=_whole(_MAX_BLOCKS, "a number of blocks"), metavar="N",
        help="number of KV blocks (default: as many as --memory-utilization allows)",
    )  # fmt: skip
    group.add_argument(
        "--memory-utilization", type=argument_type(_parse_percent, "percentage"),
        metavar="PERCENT", dest="memory_percent",
        help="share of the memory left beside the weights and the largest step, for KV blocks and "
        "swap space (50%% on a CPU, 90%% on a GPU)",
    )  # fmt: skip
    group.add_argument(
        "--threads", type=_whole(_MAX_THREADS, "a number of threads"), metavar="N",
        help="threads that compute (default: all cores but one)",
    )  # fmt: skip
    group.add_argument(
        "--allow-pickle-weights", action="store_true", default=None,
        help="load pickled weights (pytorch_model.bin) if there are no safetensors; torch's "
        "restricted unpickler reads them and executes no code",
    )  # fmt: skip
    group.add_argument(
        "--allow-remote-code", action="store_true", default=None,
        help="execute the code in the model's folder if config.json names some; this code can do "
        "whatever this user can",
    )  # fmt: skip
    if serves:
        group.add_argument(
            "--sampling-defaults", choices=[one.value for one in SamplingSource],
            help="source of temperature and other fields that a request leaves out: the model's "
            "generation_config.json (model, the default), or OpenAI's API (openai)",
        )  # fmt: skip


def add_model_path_argument(group: argparse._ActionsContainer) -> None:
    """Add the option for the path of a model, which also a conversion of the weights needs."""
    group.add_argument(
        "--model-path", metavar="PATH",
        help="serve the model in this folder or GGUF file instead of spec.model.source",
    )  # fmt: skip


def add_dtype_argument(group: argparse._ActionsContainer) -> None:
    """Add the option for the data type, which also a conversion of the weights needs."""
    group.add_argument(
        "--dtype", choices=[one.value for one in DataType],
        help="data type of weights and KV cache (float32 on a CPU, bfloat16 on a GPU); auto is "
        "bfloat16 also on a CPU that computes it faster",
    )  # fmt: skip


def choose_model(
    args: argparse.Namespace, spec: LLMServiceSpec, *, source: str, http_processes: int = 1
) -> ModelFolder | None:
    """Return the model to compute; None if a device is emulated.

    Args:
        args: the parsed arguments.
        spec: the service.
        source: the manifest's path, for error messages.
        http_processes: number of HTTP processes, which need cores beside the computing threads.

    Raises:
        UsageError: a device is emulated, but an option for real models is given.
        SpecError: the model cannot be computed; or it is on a volume, and `--model-path` does not
            name its folder.
    """
    given = {name: value for name in _OPTIONS if (value := getattr(args, name, None)) is not None}
    if args.model_path is not None:
        if args.device is not None:
            raise UsageError(
                "goodput engine: --device and --model-path exclude each other; give one"
            )
        path = str(Path(args.model_path).expanduser().absolute())
        spec = replace(spec, model=spec.model.at_path(path))
    if args.device is None:
        try:
            require_local(spec.model)
        except SpecError as error:
            raise error.at(source) from error
    if args.device is not None or spec.model.scheme not in {"file", "hf"}:
        for name in given:
            raise UsageError(
                f"goodput engine: {_OPTIONS[name]} applies to a real model, but an emulated device "
                "is served; remove it, or name a model with --model-path"
            )
        return None
    try:
        require_computable(spec)
        settings = _settings(spec.engine.real_model) | given
        settings["block_size"] = _block_size(settings["attention"], settings["block_size"])
        if settings["threads"] is None and http_processes > 1:
            settings["threads"] = max(1, count_cpus() - http_processes)
        # A file is converted before the processor is measured.
        dtype = None if settings["dtype"] == DataType.AUTO else settings["dtype"]
        weights = weights_source(spec.model, dtype=dtype)
        for name in _TRUST:
            if weights and name in given:
                raise UsageError(
                    f"goodput engine: {_OPTIONS[name]} applies to a folder of this machine, not to "
                    f"{weights.title}; download the model, and name its folder with --model-path"
                )
        folder = local_folder(spec.model)
        model = ModelFolder(
            path="" if weights else str(folder),
            name=weights.title if weights else folder.name,
            source=weights,
            **settings,
        )
        if model.block_size > spec.engine.token_budget.min:
            raise SpecError(
                "spec.engine.tokenBudget.min",
                f"is {spec.engine.token_budget.min}, less than one KV block; set at least "
                f"{model.block_size}, or lower spec.engine.realModel.blockSize or --block-size"
                + (", with another attention" if model.attention == "flash-attn" else ""),
            )
    except SpecError as error:
        raise error.at(source) from error
    return model


def _block_size(attention: str, block_size: int | None) -> int:
    """Return the tokens per KV block for a kernel.

    Raises:
        SpecError: the kernel cannot read blocks of this size.
    """
    problem = block_size_problem(attention, block_size)
    if problem is not None:
        raise SpecError("spec.engine.realModel.blockSize or --block-size", problem)
    return block_size or default_block_size(attention)


def _settings(real_model: RealModelSpec) -> dict[str, Any]:
    """Return fields of a `ModelFolder` from the manifest."""
    return {
        "dtype": real_model.dtype,
        "max_model_tokens": real_model.max_model_tokens,
        "attention": real_model.attention,
        "block_size": real_model.block_size,
        "kv_blocks": real_model.kv_blocks,
        "memory_percent": real_model.memory_percent,
        "threads": real_model.threads,
        "sampling_defaults": real_model.sampling_defaults,
    }


def load_text_settings(model: ModelFolder) -> tuple[ModelTokenizer | None, SamplingDefaults]:
    """Return the tokenizer of a model, None if its folder has none, and the sampling defaults.

    Raises:
        InputError: a file is damaged, or not supported.
        UsageError: a package that it needs is not installed.
    """
    try:
        module = import_module("goodput_engine.text.tokenizer")
        import_module("goodput_engine.grammars")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"serving {model.path} needs the package {error.name!r}; {install_hint('torch')}"
        ) from error
    folder = Path(model.path)
    tokenizer: ModelTokenizer | None = module.load_model_tokenizer(folder)
    if model.sampling_defaults == "openai":
        return tokenizer, OPENAI_DEFAULTS
    return tokenizer, read_sampling_defaults(folder)


def _whole(high: int, what: str) -> Callable[[str], int]:
    return argument_type(lambda text: parse_whole(text, 1, high, what), "number")


def _parse_percent(text: str) -> int:
    if not text.endswith("%"):
        raise ValueError(f"{text[:40]!r} is not a percentage; write for example 50%")
    return parse_whole(text[:-1], 1, _MAX_PERCENT, "a percentage")
