"""From a configuration to a model that serves: load, check, take a first step, size the memory.

The KV blocks get a share of the memory that is left once the weights are loaded and the largest
step has its working memory. The first step also shows how long the longest one may take.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from goodput_core.contract import ENV_CACHE
from goodput_core.errors import InputError
from goodput_core.process import count_cpus
from goodput_core.spec.choices import AttentionKernel, DataType
from goodput_core.spec.profiles import memory_problem
from goodput_core.units import BYTES_PER_GIB, NS_PER_S
from goodput_engine.executor.base import LoadedModel
from goodput_engine.executor.torch.adapters import AttentionRequest
from goodput_engine.executor.torch.attention import MAX_SCORES
from goodput_engine.executor.torch.cpu_choices import (
    AttentionSizes,
    choose_cpu_attention,
    choose_cpu_dtype,
    fast_dtype_hint,
    find_compiler,
    run_probe,
)
from goodput_engine.executor.torch.executor import TorchExecutor
from goodput_engine.executor.torch.flex_attention import FlexAttention
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.measured_choices import MeasuredChoices, processor
from goodput_engine.executor.torch.memory import (
    PeakMemory,
    available_bytes,
    free_bytes,
    is_out_of_memory,
)
from goodput_engine.executor.torch.model import PackedRow
from goodput_engine.executor.torch.padded_decodes import (
    CudaGraphs,
    PaddedDecodes,
    batch_sizes,
)
from goodput_engine.executor.torch.roofline import measure_roofline
from goodput_engine.scheduler.plan import Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from goodput_engine.executor.torch.attention import AttentionAdapter
    from goodput_engine.executor.torch.grammar import Grammars
    from goodput_engine.executor.torch.model import PackedModel
    from goodput_engine.messages import Configure, ModelFolder

__all__ = ["start_model"]

# Tokens of the first step. The working memory of a larger step is extrapolated.
_FIRST_STEP_TOKENS: Final = 256
# Copies of the logits of a step: those of the model, in float32, for sampling, and with penalties.
_LOGIT_COPIES: Final = 5
# Copies of the scores of attention on a CPU: two of a layer, and freed ones that the allocator
# keeps. The first step has fewer scores than later ones, whose number is bounded.
_SCORE_COPIES: Final = 4
# The recorded steps of a GPU keep their own.
_RECORDED_COPIES: Final = 2
# A longer list of sizes takes time and memory, and larger steps gain little.
_MAX_RECORDED_ROWS: Final = 256
_MEASURED_STEPS: Final = 5
_MAX_PROBLEM: Final = 80
_FLOAT_BYTES: Final = 4
_MEASURED_BLOCKS: Final = 8
# Other processes use the main memory too; a GPU has no other user.
_CPU_PERCENT: Final = 50
_GPU_PERCENT: Final = 90


# Kubernetes sets it in all pods.
_IN_POD: Final = "KUBERNETES_SERVICE_HOST"
# Needs a package that only outputs with a grammar need.
_GRAMMAR: Final = "goodput_engine.executor.torch.grammar"


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstStep:
    """Measurements of the first step.

    Args:
        ns_per_token: time of a prompt token.
        working_bytes: working memory of the largest step that the configuration allows.
    """

    ns_per_token: int
    working_bytes: int


class _WarmUpReports:
    """Reports the parts of a warm-up, so that a step that hangs is detected.

    Args:
        report: called with the time of the loading, in nanoseconds; None to report nothing.
    """

    def __init__(self, report: Callable[[int], None] | None) -> None:
        self._report = report
        self._began_ns = time.monotonic_ns()
        self._load_ns = 0

    def loaded(self) -> None:
        """Report that the weights are loaded, and that no step was computed yet."""
        self._load_ns = time.monotonic_ns() - self._began_ns
        self.continues()

    def continues(self) -> None:
        """Report that a further part has ended."""
        if self._report is not None:
            self._report(self._load_ns)


def _grammars(folder: Path, model: PackedModel) -> Grammars | None:
    """Return the compiler of grammars; None without a tokenizer or without its package."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        module = import_module(_GRAMMAR)
    except ModuleNotFoundError:
        return None
    grammars: Grammars = module.Grammars(file, vocab_size=model.vocab_size, stop_ids=model.stop_ids)
    return grammars


def start_model(
    config: Configure,
    settings: ModelFolder,
    *,
    with_swap: bool,
    on_warm_up: Callable[[int], None] | None = None,
) -> LoadedModel:
    """Load a model and prepare its executor.

    Args:
        config: the configuration of the core.
        settings: its model.
        with_swap: True to allocate host blocks for preempted requests.
        on_warm_up: see `goodput_engine.core.build.load_model`.

    Raises:
        InputError: the model cannot be served, or the memory is too small for it.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = settings.threads or max(1, count_cpus() - 1)
    torch.set_num_threads(threads)
    folder = Path(settings.path)
    began_ns = time.monotonic_ns()
    warm_up = _WarmUpReports(on_warm_up)
    machine = processor(threads)
    choices = MeasuredChoices(_choices_folder(os.environ), machine)
    dtype, why_dtype = settings.dtype, None
    if dtype is None and device.type == "cpu":
        why_dtype = fast_dtype_hint(f"{machine['flags']}")
    if dtype == DataType.AUTO:
        dtype = None
        if device.type == "cpu":
            measured = choose_cpu_dtype(choices)
            dtype, why_dtype = measured.name, measured.reason
    model = load_model(
        folder,
        dtype=dtype,
        device=device,
        max_model_tokens=settings.max_model_tokens,
        attention=AttentionRequest(
            kernel=AttentionKernel(settings.attention), block_size=settings.block_size
        ),
        allow_pickle_weights=settings.allow_pickle_weights,
        allow_remote_code=settings.allow_remote_code,
        on_loaded=warm_up.loaded,
    )
    warm_up.continues()
    if device.type == "cpu":
        model.adapter, model.attention_choice = _choose_attention(model, config, threads, choices)
        warm_up.continues()
    loaded_ns = time.monotonic_ns()
    first_step = _take_first_step(model, config, settings.block_size)
    warm_up.continues()
    kv_blocks, host_blocks = _size_pools(
        model, config, settings, first_step.working_bytes, with_swap=with_swap
    )
    grammars = _grammars(folder, model)
    executor = TorchExecutor(
        model,
        num_blocks=kv_blocks,
        block_size=settings.block_size,
        num_host_blocks=host_blocks,
        grammars=grammars,
        clock=time.monotonic_ns,
        starts_ahead=device.type == "cuda",
    )
    warm_up.continues()
    on_gpu: dict[str, str] = {}
    if device.type == "cuda":
        _compile_kernels(model, executor.pool)
        graphs = _record_decodes(executor, model, config.max_num_seqs)
        on_gpu = {"gpu": torch.cuda.get_device_name(device), "graphs": graphs}
        warm_up.continues()
    swap_ns_per_block = _measure_copies(executor.pool) if host_blocks else 1
    grammar_problem = grammars.problem() if grammars is not None else ""
    ready_ns = time.monotonic_ns()
    return LoadedModel(
        executor=executor,
        name=settings.name or folder.name,
        vocab_size=model.vocab_size,
        max_model_tokens=model.max_model_tokens,
        block_size=settings.block_size,
        kv_blocks=kv_blocks,
        host_blocks=host_blocks,
        swap_ns_per_block=swap_ns_per_block,
        measure_roofline=lambda: measure_roofline(model),
        longest_step_ns=first_step.ns_per_token * config.max_token_budget,
        facts={
            "dtype": str(model.geometry.dtype).removeprefix("torch."),
            **({"dtype_choice": why_dtype} if why_dtype else {}),
            "attention": model.adapter.name,
            **({"attention_choice": model.attention_choice} if model.attention_choice else {}),
            **(
                {"threads": threads, "weights": "packed" if model.packed_weights else "plain"}
                if device.type == "cpu"
                else on_gpu
            ),
            **{
                name: "allowed"
                for name, allowed in (
                    ("pickle_weights", settings.allow_pickle_weights),
                    ("remote_code", settings.allow_remote_code),
                )
                if allowed
            },
            "kv_bytes_per_token": model.geometry.bytes_per_token,
            "prompt_tokens_per_second": NS_PER_S // first_step.ns_per_token,
            "load_seconds": _seconds(loaded_ns - began_ns),
            "warm_up_seconds": _seconds(ready_ns - loaded_ns),
        },
        grammar_problem=grammar_problem,
    )


def _choices_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the measured choices."""
    return Path(environment.get(ENV_CACHE) or "~/.cache/goodput").expanduser() / "choices"


def _choose_attention(
    model: PackedModel, config: Configure, threads: int, choices: MeasuredChoices
) -> tuple[AttentionAdapter, str]:
    """Return the faster attention for a CPU, and the reason."""
    if _IN_POD in os.environ:
        # Each new pod would wait for the measurement again.
        return model.adapter, "not measured in a pod"
    geometry = model.geometry
    sizes = AttentionSizes(
        num_heads=model.model.config.get_text_config().num_attention_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=str(geometry.dtype).removeprefix("torch."),
        threads=threads,
    )
    return choose_cpu_attention(
        sizes,
        choices,
        largest_chunk=min(config.max_token_budget, model.max_model_tokens),
        compiler=find_compiler(),
        probe=run_probe,
        make_flex=FlexAttention,
    )


def _compile_kernels(model: PackedModel, pool: KVPool) -> None:
    """Compute steps of every kind, because a GPU compiles or loads a kernel when it first runs.

    All rows are in the last block of the pool, which no request has.
    """
    block = len(pool.device_blocks) - 1

    def row(num_keys: int, num_tokens: int = 1) -> PackedRow:
        blocks = [block] * -(-num_keys // pool.block_size)
        return PackedRow([0] * num_tokens, num_keys - num_tokens, blocks, samples=True)

    # The number of programs that share the keys of a decode follows the number of keys.
    num_keys = [1]
    while num_keys[-1] < model.max_model_tokens:
        num_keys.append(min(2 * num_keys[-1], model.max_model_tokens))
    longest = num_keys[-1]
    decodes = [[row(count)] for count in num_keys]
    try:
        for rows in (*decodes, [row(1), row(longest)], [row(1), row(longest, min(2, longest))]):
            model.compute(rows, pool)
    except RuntimeError as error:
        # An attention that copies the keys may have no memory for the longest request.
        if not is_out_of_memory(error):
            raise


def _record_decodes(executor: TorchExecutor, model: PackedModel, max_rows: int) -> str:
    """Let a GPU replay steps that only decode, if this is possible and faster.

    Returns:
        The result, for the log.
    """
    sizes = batch_sizes(min(max_rows, _MAX_RECORDED_ROWS))
    problem = ""
    try:
        padded = PaddedDecodes(model, executor.pool, sizes=sizes, recorder=CudaGraphs())
    except RuntimeError as error:
        # A step that waits for the device cannot be recorded; or the memory is too small.
        problem = " ".join(str(error).split())[:_MAX_PROBLEM]
    if problem:
        _wait_for(model.device)
        return f"none: {problem}"
    row = [PackedRow([0], 0, [padded.reserved_block], samples=True)]
    replayed_ns = _fastest_ns(lambda: padded.compute(row), model.device)
    if replayed_ns >= _fastest_ns(lambda: model.compute(row, executor.pool), model.device):
        return "none: slower"
    executor.padded = padded
    return f"1 to {sizes[-1]} rows"


def _fastest_ns(step: Callable[[], object], device: torch.device) -> int:
    times: list[int] = []
    for _ in range(_MEASURED_STEPS):
        _wait_for(device)
        began_ns = time.monotonic_ns()
        step()
        _wait_for(device)
        times.append(time.monotonic_ns() - began_ns)
    return min(times)


def _take_first_step(model: PackedModel, config: Configure, block_size: int) -> _FirstStep:
    """Compute a prompt, first to warm up, then to measure."""
    tokens = min(_FIRST_STEP_TOKENS, config.max_token_budget, model.max_model_tokens)
    blocks = list(range(-(-tokens // block_size)))
    pool = KVPool(
        model.geometry, num_blocks=len(blocks), block_size=block_size, device=model.device
    )
    row = PackedRow([0] * tokens, 0, blocks, samples=True)
    peak = PeakMemory(model.device)
    model.compute([row], pool)
    step_bytes = peak.grown_bytes()
    _wait_for(model.device)
    began_ns = time.monotonic_ns()
    model.compute([row], pool)
    _wait_for(model.device)
    step_ns = time.monotonic_ns() - began_ns
    copies = _LOGIT_COPIES + (_RECORDED_COPIES if model.device.type == "cuda" else 0)
    logit_bytes = config.max_num_seqs * model.vocab_size * _FLOAT_BYTES * copies
    score_bytes = 0
    if model.device.type == "cpu":
        score_bytes = MAX_SCORES * model.geometry.dtype.itemsize * _SCORE_COPIES
    return _FirstStep(
        ns_per_token=max(1, step_ns // tokens),
        working_bytes=step_bytes * config.max_token_budget // tokens + logit_bytes + score_bytes,
    )


def _size_pools(
    model: PackedModel,
    config: Configure,
    settings: ModelFolder,
    working_bytes: int,
    *,
    with_swap: bool,
) -> tuple[int, int]:
    """Return the numbers of KV blocks and of host blocks.

    On a CPU, both are in the same memory. The KV blocks come first, because more of them make
    copies unnecessary. The host blocks of a GPU get the same share of the main memory.
    """
    on_cpu = model.device.type == "cpu"
    percent = settings.memory_percent or (_CPU_PERCENT if on_cpu else _GPU_PERCENT)
    block_size, kv_blocks = settings.block_size, settings.kv_blocks
    block_bytes = block_size * model.geometry.bytes_per_token
    free = max(0, free_bytes(model.device) - working_bytes)
    affordable = free * percent // 100 // block_bytes
    chosen = kv_blocks is not None
    if kv_blocks is None:
        longest = -(-model.max_model_tokens // block_size)
        # More blocks than all running requests can fill would stay unused.
        kv_blocks = min(affordable, longest * config.max_num_seqs)
    problem = memory_problem(
        kv_blocks=kv_blocks,
        block_size=block_size,
        context_tokens=model.max_model_tokens,
        min_budget=config.min_token_budget,
    )
    if not chosen:
        if problem is not None:
            raise InputError(
                f"{settings.path}: {_gib(free)} of memory is left beside the weights and a step of "
                f"{config.max_token_budget} tokens, and {percent}% of it holds "
                f"only {kv_blocks * block_size} tokens; lower spec.engine.tokenBudget.max, or use "
                "a smaller model or data type"
            )
    elif kv_blocks * block_bytes > free:
        raise InputError(
            f"{settings.path}: {kv_blocks} KV blocks take {_gib(kv_blocks * block_bytes)}, but "
            f"only {_gib(free)} of memory is left beside the weights and a step of "
            f"{config.max_token_budget} tokens; lower spec.engine.realModel.kvBlocks or "
            "--kv-blocks"
        )
    elif problem is not None:
        raise InputError(
            f"{settings.path}: {problem}; raise spec.engine.realModel.kvBlocks or --kv-blocks, or "
            "lower spec.engine.realModel.maxModelTokens or --max-model-tokens"
        )
    swap_blocks = config.swap_space_bytes // block_bytes if with_swap else 0
    if on_cpu:
        host_blocks = affordable - kv_blocks
    else:
        host_blocks = available_bytes() * percent // 100 // block_bytes
    return kv_blocks, max(0, min(swap_blocks, host_blocks, kv_blocks))


def _measure_copies(pool: KVPool) -> int:
    """Return the time to copy one block between device and host, in nanoseconds, at least 1."""
    count = min(_MEASURED_BLOCKS, len(pool.device_blocks), len(pool.host_blocks))
    blocks = tuple(range(count))
    fastest: list[int] = []
    for to_host in (True, False):
        copy = Copy(rid=0, to_host=to_host, device_blocks=blocks, host_blocks=blocks)
        times: list[int] = []
        for _ in range(3):  # the first copy also makes the system provide the memory
            _wait_for(pool.device_blocks.device)
            began_ns = time.monotonic_ns()
            pool.copy(copy)
            _wait_for(pool.device_blocks.device)
            times.append(time.monotonic_ns() - began_ns)
        fastest.append(min(times))
    return max(1, max(fastest) // count)


def _wait_for(device: torch.device) -> None:
    """Wait for the queued work of a GPU; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gib(size: int) -> str:
    return f"{size / BYTES_PER_GIB:.1f} GiB"


def _seconds(ns: int) -> float:
    return round(ns / NS_PER_S, 3)
