"""The engine on a GPU: correctness, steps against the roofline, swap, and a replay, in one table.

It needs no installation, no weights and no trace: torch, transformers, triton and msgspec must be
importable, and the weights are random in the shape of Llama 3 8B. The outputs of a small random
model are compared with those of transformers first, without and with a plan in flight behind the
running one. Then the logits of the measured model are compared with those of its own attention.
Nothing is measured if they differ.

    PYTHONPATH=core:engine:msgspec.whl python benchmarks/engine_gpu.py        # eight minutes
    PYTHONPATH=core:engine:msgspec.whl python benchmarks/engine_gpu.py --quick  # tiny, on any CPU

A wheel with compiled code must be unpacked: `python -m zipfile -e msgspec-*.whl vendor` and
`PYTHONPATH=core:engine:vendor`. The measurements:

- *decode* and *prefill*: the time of single steps, as a share of the roofline of the model on this
  device, whose read bandwidth and peak of matrix products are measured in the same run; decodes
  also as replayed CUDA graphs; the same with flash-attn and blocks of 256 where it is installed;
- *swap*: the bandwidth of copies between device and host, and the length from which a copy out and
  in takes less time than computing the tokens again;
- *ragged*: tokens per second on requests of different lengths, beside the continuous batching of
  transformers on the same requests and weights;
- *replay*: a generated Poisson load in real time with the policy `slo`, and its attainment.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

if find_spec("torch") is None:
    print("not run: torch is missing; `make torch` installs it")
    sys.exit(0)

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from goodput_core.errors import InputError
from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import AttentionKernel
from goodput_core.spec.workloads import FLASH_ATTN_BLOCK
from goodput_core.steptime import StepShape
from goodput_core.units import NS_PER_MS, NS_PER_S, NS_PER_US
from goodput_engine.core.build import build_model_core
from goodput_engine.executor.base import LoadedModel
from goodput_engine.executor.torch.adapters import AttentionRequest, probe_attention
from goodput_engine.executor.torch.attention import SDPAttention
from goodput_engine.executor.torch.executor import TorchExecutor
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.model import PackedModel, PackedRow
from goodput_engine.executor.torch.padded_decodes import CudaGraphs, PaddedDecodes, batch_sizes
from goodput_engine.executor.torch.roofline import measure_roofline
from goodput_engine.executor.torch.self_check import check_model
from goodput_engine.messages import Configure, ExecutorInput, SamplingOptions, Submit
from goodput_engine.scheduler.plan import Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_engine.core.engine_core import EngineCore
    from goodput_engine.executor.roofline import StepRoofline

BLOCK_SIZE: Final = 16
TIE: Final = 1e-3
"""Two logits that are this near may change places between two orders of the same sums."""
DECODE_AIM: Final = 80
PREFILL_AIM: Final = 60
TRANSFORMERS_AIM: Final = 1.5
GREEDY: Final = SamplingOptions()
CPU_BLOCKS: Final = 64
"""KV blocks of transformers' continuous batching, of 256 tokens each, on a CPU."""
MAX_REASON: Final = 300
"""Characters of the reason of a failure."""
MAX_ROWS: Final = 256
"""Number of requests of a step."""


@dataclass(frozen=True, kw_only=True)
class GpuScale:
    """The size of the measurements.

    Args:
        layers, hidden, intermediate, heads, kv_heads, vocabulary: shape of the model.
        context: tokens in the KV cache of each decoding request.
        decodes: numbers of decoding requests.
        prompts: numbers of tokens of a prompt.
        blocks: KV blocks.
        host_blocks: blocks in main memory.
        repeats: measured steps of each kind.
        ragged_requests: requests of the comparison with transformers.
        ragged_input, ragged_output: largest lengths of these requests.
        replay_s: length of the replay.
        replay_per_s: mean arrivals.
        budget: token budget of a step.
    """

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128_256
    context: int = 1024
    decodes: tuple[int, ...] = (1, 8, 32, 64, 128)
    prompts: tuple[int, ...] = (512, 2048, 8192)
    blocks: int = 8_192
    host_blocks: int = 512
    repeats: int = 10
    ragged_requests: int = 96
    ragged_input: int = 1024
    ragged_output: int = 256
    replay_s: float = 90
    replay_per_s: float = 8
    budget: int = 2048


TINY: Final = GpuScale(
    layers=2,
    hidden=32,
    intermediate=48,
    heads=4,
    kv_heads=2,
    vocabulary=97,
    context=32,
    decodes=(1, 4),
    prompts=(32, 64),
    blocks=128,
    host_blocks=16,
    repeats=2,
    ragged_requests=4,
    ragged_input=24,
    ragged_output=8,
    replay_s=1,
    replay_per_s=8,
    budget=64,
)


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """One line of the final table.

    Args:
        name: what was measured.
        value: the value, with its unit.
        aim: the aim; empty without one.
        met: True if the aim is met; None without an aim.
    """

    name: str
    value: str
    aim: str = ""
    met: bool | None = None


class _Watch:
    """Collects the rows, and prints the progress with the time since the start."""

    def __init__(self) -> None:
        self.rows: list[GpuRow] = []
        self._start_ns = time.monotonic_ns()

    @property
    def elapsed_s(self) -> float:
        return (time.monotonic_ns() - self._start_ns) / NS_PER_S

    def add(self, name: str, value: str, aim: str = "", *, met: bool | None = None) -> None:
        self.rows.append(GpuRow(name=name, value=value, aim=aim, met=met))
        print(f"[{self.elapsed_s:6.1f} s] {name}: {value}", file=sys.stderr, flush=True)


def make_model(scale: GpuScale, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a model with random weights, which are drawn on the device."""
    config = LlamaConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=scale.intermediate,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.kv_heads,
        max_position_embeddings=max(8192, *scale.prompts),
        bos_token_id=1,
        pad_token_id=0,
        eos_token_id=None,
        dtype=dtype,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device=device)
    # Its frequencies are no weights, and need their full precision.
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1)
            else:
                weight.normal_(0, 0.3 if scale.hidden < 256 else 0.02)
    return model.eval()


def pack(model: Any, request: AttentionRequest | None = None) -> PackedModel:
    """Return a model with an attention of this machine.

    Args:
        model: the model of transformers.
        request: the attention; None for the default.

    Raises:
        InputError: the attention cannot be used.
    """
    packed = PackedModel(model, SDPAttention())
    probed = probe_attention(
        request or AttentionRequest(), device=packed.device, dtype=packed.geometry.dtype
    )
    packed.adapter, packed.attention_choice = probed.select(packed.geometry.head_dim)
    return packed


def check_logits(packed: PackedModel, title: str, watch: _Watch) -> None:
    """Compare packed steps of a model with its own attention.

    Raises:
        SystemExit: the logits differ.
    """
    try:
        check_model(packed)
    except InputError as error:
        raise SystemExit(f"{title}: {error}; nothing is measured") from error
    dtype = str(packed.geometry.dtype).removeprefix("torch.")
    watch.add(f"logits of {title} in {dtype}", "those of its own attention", "equal", met=True)


def check_outputs(device: torch.device, watch: _Watch) -> None:
    """Compare outputs in float32 with transformers', and those of both depths with each other.

    Args:
        device: computes both.
        watch: gets the rows.

    Raises:
        SystemExit: the logits differ, or a greedy output where the two highest logits are not a
            tie, or more than one sampled output depends on the depth.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model(TINY, device, torch.float32)
    packed = pack(model)
    check_logits(packed, "the small model", watch)
    stream = random.Random(5)
    prompts = [
        [stream.randrange(TINY.vocabulary) for _ in range(stream.randint(1, 60))] for _ in range(24)
    ]
    lengths = [16] * len(prompts)

    def serve_at_both_depths(sampling: SamplingOptions) -> list[list[list[int]]]:
        return [
            _serve(
                _core(packed, TINY, depth=depth, graphs=True), prompts, lengths, sampling
            ).token_ids
            for depth in (0, 1)
        ]

    greedy = serve_at_both_depths(GREEDY)
    for outputs, depth in zip(greedy, ("", ", one plan ahead"), strict=True):
        compared = _compare_greedy(model, prompts, outputs)
        watch.add(f"outputs in float32{depth}", compared, "equal", met=True)
    sampled = serve_at_both_depths(
        SamplingOptions(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=3)
    )
    equal = [sum(map(list.__eq__, *both)) for both in (greedy, sampled)]
    # A greedy output may differ after a tie, which was found above. The noise has hardly any.
    if equal[1] < len(prompts) - 1:
        raise SystemExit(
            f"only {equal[1]} of {len(prompts)} sampled outputs are the same with a plan ahead; "
            "nothing is measured"
        )
    watch.add(
        "the same outputs with one plan ahead",
        f"{equal[0]} of {len(prompts)} greedy and {equal[1]} of {len(prompts)} sampled ones",
    )


def _compare_greedy(model: Any, prompts: Sequence[list[int]], outputs: list[list[int]]) -> str:
    """Compare each token of greedy outputs with the logits of transformers.

    Returns:
        The number of compared tokens and of ties.

    Raises:
        SystemExit: a token differs where the two highest logits are not a tie.
    """
    model.set_attn_implementation("eager")
    tokens = ties = 0
    device = model.device
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output], device=device)
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        for token, row in zip(output, logits, strict=True):
            tokens += 1
            best = row.topk(2).values.tolist()
            if token != int(row.argmax()):
                ties += 1
                if best[0] - float(row[token]) > TIE:
                    raise SystemExit(
                        f"the engine's output differs from transformers' after {tokens} tokens; "
                        "nothing is measured"
                    )
    model.set_attn_implementation("goodput_paged")
    return f"{tokens} tokens equal, {ties} ties"


@dataclass(kw_only=True)
class _Served:
    """The outputs of requests, in the order in which they were submitted."""

    token_ids: list[list[int]]
    seconds: float


def _core(
    packed: PackedModel,
    scale: GpuScale,
    policy: str = "sarathi",
    *,
    depth: int = 0,
    graphs: bool = False,
) -> EngineCore:
    """Return an engine core on a model.

    Args:
        packed: the model.
        scale: size of the memory and of the steps.
        policy: name of the policy.
        depth: number of plans ahead.
        graphs: True to pad steps that only decode, and to replay them on a GPU.
    """
    executor = TorchExecutor(
        packed,
        num_blocks=scale.blocks,
        block_size=BLOCK_SIZE,
        clock=time.monotonic_ns,
        starts_ahead=depth > 0,
    )
    if graphs:
        executor.padded = _padded(packed, executor.pool, MAX_ROWS)
    loaded = LoadedModel(
        executor=executor,
        name="random",
        vocab_size=packed.vocab_size,
        max_model_tokens=packed.max_model_tokens,
        block_size=BLOCK_SIZE,
        kv_blocks=scale.blocks,
        host_blocks=0,
        swap_ns_per_block=1,
        longest_step_ns=1,
        facts={},
        measure_roofline=lambda: measure_roofline(packed),
    )
    config = Configure(
        device="",
        policy=policy,
        preemption="recompute",
        token_budget=scale.budget,
        min_token_budget=BLOCK_SIZE,
        max_token_budget=scale.budget,
        max_num_seqs=MAX_ROWS,
        max_waiting=100_000,
        depth=depth,
    )
    return build_model_core(config, loaded)


def _padded(packed: PackedModel, pool: KVPool, max_rows: int) -> PaddedDecodes:
    """Return padded decodes, which a GPU replays."""
    recorder = CudaGraphs() if packed.device.type == "cuda" else None
    return PaddedDecodes(packed, pool, sizes=batch_sizes(max_rows), recorder=recorder)


def _submit(
    rid: int,
    at_ns: int,
    prompt: Sequence[int],
    output: int,
    targets: Targets,
    *,
    sampling: SamplingOptions = GREEDY,
) -> Submit:
    return Submit(
        rid=rid,
        arrival_ns=at_ns,
        input_tokens=len(prompt),
        max_output_tokens=output,
        targets=targets,
        executor=ExecutorInput(token_ids=list(prompt), ignore_eos=True, sampling=sampling),
    )


def _serve(
    core: EngineCore,
    prompts: Sequence[list[int]],
    outputs: Sequence[int],
    sampling: SamplingOptions = GREEDY,
) -> _Served:
    """Serve requests that arrive together."""
    began_ns = time.monotonic_ns()
    found: list[list[int]] = [[] for _ in prompts]
    for rid, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        submit = _submit(rid, began_ns, prompt, output, Targets(), sampling=sampling)
        assert core.submit(submit, began_ns) is None
    core.scheduler.end_input()
    while core.scheduler.has_work:
        step = core.step(time.monotonic_ns())
        for one in step.outputs if step is not None else ():
            found[one.rid] += one.token_ids
    return _Served(token_ids=found, seconds=(time.monotonic_ns() - began_ns) / NS_PER_S)


def _fastest_ns(operation: Callable[[], object], device: torch.device, repeats: int) -> int:
    """Return the shortest time of an operation, after one to warm up."""
    times: list[int] = []
    for _ in range(repeats + 1):
        _wait(device)
        began_ns = time.monotonic_ns()
        operation()
        _wait(device)
        times.append(time.monotonic_ns() - began_ns)
    return max(1, min(times[1:]))


def _release(device: torch.device) -> None:
    """Free the memory of earlier measurements."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_steps(
    packed: PackedModel,
    scale: GpuScale,
    roofline: StepRoofline,
    watch: _Watch,
    *,
    title: str = "",
    block_size: int = BLOCK_SIZE,
) -> None:
    """Measure decodes and prefills.

    Args:
        packed: the model.
        scale: size of the measurements.
        roofline: the limits of the device.
        watch: gets the rows.
        title: attention other than the default, whose aims count; empty for the default.
        block_size: tokens per KV block.
    """
    blocks = scale.blocks * BLOCK_SIZE // block_size
    pool = KVPool(
        packed.geometry, num_blocks=blocks + 1, block_size=block_size, device=packed.device
    )
    pool.device_blocks.normal_(0, 0.1)
    padded = _padded(packed, pool, max(scale.decodes))
    each = -(-scale.context // block_size)
    for number in scale.decodes:
        rows = [
            PackedRow([7], scale.context - 1, range(row * each, (row + 1) * each), samples=True)
            for row in range(number)
        ]
        if number * each > blocks:
            continue
        shape = StepShape.of(decodes=number, decode_context_tokens=number * scale.context)
        least_ns = roofline.least_ns(shape, number)
        steps: dict[str, Callable[[], object]] = {
            "": lambda: packed.compute(rows, pool),  # noqa: B023
            ", padded and replayed": lambda: padded.compute(rows),  # noqa: B023
        }
        for name, step in steps.items():
            step_ns = _fastest_ns(step, packed.device, scale.repeats)
            share = 100 * least_ns / step_ns
            watch.add(
                f"{title}decode of {number} at context {scale.context}{name}",
                f"{step_ns / NS_PER_MS:.2f} ms, {share:.0f} % of the roofline",
                f"{DECODE_AIM} %" if name and not title else "",
                met=share >= DECODE_AIM if name and not title else None,
            )
    for tokens in scale.prompts:
        row = PackedRow([7] * tokens, 0, range(-(-tokens // block_size)), samples=True)
        step_ns = _fastest_ns(
            lambda: packed.compute([row], pool),  # noqa: B023
            packed.device,
            max(1, scale.repeats // 2),
        )
        share = 100 * roofline.least_ns(StepShape.of(chunks=[(0, tokens)]), 1) / step_ns
        watch.add(
            f"{title}prefill of {tokens}",
            f"{step_ns / NS_PER_MS:.2f} ms, {share:.0f} % of the roofline",
            "" if title else f"{PREFILL_AIM} %",
            met=None if title else share >= PREFILL_AIM,
        )


def measure_flash_attn(
    packed: PackedModel, scale: GpuScale, roofline: StepRoofline, watch: _Watch
) -> None:
    """Measure the same steps with flash-attn and its blocks, if it is installed."""
    request = AttentionRequest(kernel=AttentionKernel.FLASH_ATTN, block_size=FLASH_ATTN_BLOCK)
    try:
        other = pack(packed.model, request)
        check_model(other)
    except InputError as error:
        watch.add("flash-attn", f"not measured: {error}")
        return
    measure_steps(other, scale, roofline, watch, title="flash-attn, ", block_size=FLASH_ATTN_BLOCK)


def break_even_tokens(
    lengths: Sequence[int], swap_s: Sequence[float], compute_s: Sequence[float]
) -> int | None:
    """Return the length from which a copy out and in takes less time than computing again.

    Args:
        lengths: numbers of tokens in ascending order.
        swap_s: time of both copies for each length; linear in between.
        compute_s: time to compute a prompt of each length; likewise.

    Returns:
        The shortest length if copies are always faster; None if they are not at the longest.
    """
    gains = [compute - swap for swap, compute in zip(swap_s, compute_s, strict=True)]
    if gains[-1] <= 0:
        return None
    at = max((at for at, gain in enumerate(gains) if gain <= 0), default=None)
    if at is None:
        return lengths[0]
    share = -gains[at] / (gains[at + 1] - gains[at])
    return lengths[at] + math.ceil(share * (lengths[at + 1] - lengths[at]))


def measure_swap(packed: PackedModel, scale: GpuScale, watch: _Watch) -> None:
    """Measure copies between device and host, and compare them with computing again."""
    pool = KVPool(
        packed.geometry,
        num_blocks=scale.host_blocks,
        block_size=BLOCK_SIZE,
        num_host_blocks=scale.host_blocks,
        device=packed.device,
    )

    def seconds_of(*copies: Copy) -> float:
        def run() -> None:
            for one in copies:
                pool.copy(one)

        return _fastest_ns(run, packed.device, 3) / NS_PER_S

    def copy(blocks: Sequence[int], *, to_host: bool) -> Copy:
        used = tuple(blocks)
        return Copy(rid=0, to_host=to_host, device_blocks=used, host_blocks=used)

    every, half = range(scale.host_blocks), scale.host_blocks // 2
    copied = scale.host_blocks * BLOCK_SIZE * packed.geometry.bytes_per_token
    for name, copies in (
        ("device to host", [copy(every, to_host=True)]),
        ("host to device", [copy(every, to_host=False)]),
        (
            "both directions at once",
            [copy(every[:half], to_host=True), copy(every[half : 2 * half], to_host=False)],
        ),
    ):
        watch.add(f"swap, {name}", f"{copied / seconds_of(*copies) / 1e9:.1f} GB/s")
    lengths: list[int] = []
    swap_s: list[float] = []
    compute_s: list[float] = []
    for number in (1, 4, 16, 64, 256, 512):
        if number > scale.host_blocks:
            break
        blocks = range(number)
        row = PackedRow([7] * (number * BLOCK_SIZE), 0, blocks, samples=True)
        lengths.append(number * BLOCK_SIZE)
        swap_s.append(
            seconds_of(copy(blocks, to_host=True)) + seconds_of(copy(blocks, to_host=False))
        )
        computed_ns = _fastest_ns(
            lambda: packed.compute([row], pool),  # noqa: B023
            packed.device,
            3,
        )
        compute_s.append(computed_ns / NS_PER_S)
    tokens = break_even_tokens(lengths, swap_s, compute_s)
    watch.add(
        "break-even of swap and recompute",
        f"{'none up to' if tokens is None else 'from'} {tokens or lengths[-1]} tokens; at "
        f"{lengths[-1]}: {swap_s[-1] * 1e3:.1f} ms out and in, {compute_s[-1] * 1e3:.1f} ms to "
        "compute",
    )


def measure_ragged(packed: PackedModel, scale: GpuScale, watch: _Watch, *, compare: bool) -> None:
    """Serve ragged requests, and let transformers serve them with its continuous batching."""
    stream = random.Random(11)
    prompts = [
        [stream.randrange(scale.vocabulary) for _ in range(stream.randint(1, scale.ragged_input))]
        for _ in range(scale.ragged_requests)
    ]
    outputs = [stream.randint(1, scale.ragged_output) for _ in prompts]
    rate = 0.0
    for depth, graphs, name in (
        (0, False, "no plan ahead"),
        (1, False, "one plan ahead"),
        (0, True, "no plan ahead, graphs"),
        (1, True, "one plan ahead, graphs"),
    ):
        _release(packed.device)
        served = _serve(_core(packed, scale, depth=depth, graphs=graphs), prompts, outputs)
        assert [len(one) for one in served.token_ids] == outputs
        rate = max(rate, sum(outputs) / served.seconds)
        watch.add(
            f"ragged, {len(prompts)} requests, {name}",
            f"{sum(outputs) / served.seconds:,.0f} output tokens/s",
        )
    if not compare:
        return
    _release(packed.device)
    name, aim = "ragged, transformers' continuous batching", f"{TRANSFORMERS_AIM} times"
    try:
        theirs = _transformers_rate(packed.model, prompts, outputs)
    except Exception as error:  # noqa: BLE001 - a failure of transformers ends no other measurement
        reason = " ".join(str(error).split())[:MAX_REASON] or "no reason given"
        watch.add(name, f"failed: {type(error).__name__}: {reason}", aim, met=False)
        return
    watch.add(
        name,
        f"{theirs:,.0f} output tokens/s; ours is {rate / theirs:.2f} times it",
        aim,
        met=rate >= TRANSFORMERS_AIM * theirs,
    )


def _transformers_rate(model: Any, prompts: Sequence[list[int]], outputs: Sequence[int]) -> float:
    """Return the output tokens per second of transformers' continuous batching, once it runs."""
    model.set_attn_implementation("sdpa")
    config = GenerationConfig(
        max_new_tokens=max(outputs), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # It takes most of the memory for its cache, which other processes need on a CPU.
    cache = None if model.device.type == "cuda" else ContinuousBatchingConfig(num_blocks=CPU_BLOCKS)
    with model.continuous_batching_context_manager(
        generation_config=config, block=True, timeout=5, continuous_batching_config=cache
    ) as manager:
        for number, prompt in enumerate(prompts[:2]):
            manager.add_request(prompt, request_id=f"first-{number}", max_new_tokens=2)
        _take_tokens(manager, 2)
        began_ns = time.monotonic_ns()
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=output)
        tokens = _take_tokens(manager, len(prompts))
        seconds = (time.monotonic_ns() - began_ns) / NS_PER_S
    if tokens != sum(outputs):
        raise RuntimeError(f"{tokens} of {sum(outputs)} tokens were returned")
    return tokens / seconds


def _take_tokens(manager: Any, requests: int) -> int:
    """Wait for the end of some requests of transformers, and return their output tokens.

    Raises:
        RuntimeError: a request failed, or its thread ended before them.
    """
    tokens = 0
    for result in manager:
        if result.error is not None:
            raise RuntimeError(result.error)
        if result.is_finished():
            tokens += len(result.generated_tokens)
            requests -= 1
            if not requests:
                return tokens
    raise RuntimeError(f"its thread ended with {requests} unfinished requests")


def measure_replay(packed: PackedModel, scale: GpuScale, watch: _Watch) -> None:
    """Replay a generated load in real time, and judge its requests."""
    stream = random.Random(13)
    targets = Targets(ttft_ns=500 * NS_PER_MS, tpot_ns=50 * NS_PER_MS)
    arrivals: list[int] = []
    at_s = stream.expovariate(scale.replay_per_s)
    while at_s < scale.replay_s:
        arrivals.append(round(at_s * NS_PER_S))
        at_s += stream.expovariate(scale.replay_per_s)
    # The depth of an engine on a GPU.
    core = _core(packed, scale, "slo", depth=1, graphs=True)
    start_ns = time.monotonic_ns()
    times: dict[int, list[int]] = {rid: [] for rid in range(len(arrivals))}
    lengths: dict[int, int] = {}
    shed: set[int] = set()
    following = 0
    while following < len(arrivals) or core.scheduler.has_work:
        now_ns = time.monotonic_ns()
        while following < len(arrivals) and start_ns + arrivals[following] <= now_ns:
            prompt = [
                stream.randrange(scale.vocabulary)
                for _ in range(stream.randint(1, scale.ragged_input))
            ]
            lengths[following] = len(prompt)
            output = stream.randint(2, scale.ragged_output)
            arrival_ns = start_ns + arrivals[following]
            submit = _submit(following, arrival_ns, prompt, output, targets)
            if core.submit(submit, now_ns) is not None:
                shed.add(following)
            following += 1
        step = core.step(now_ns)
        shed.update(one.rid for one in core.take_rejected())
        if step is None and not core.scheduler.has_work:
            time.sleep(0.0005)
        for one in step.outputs if step is not None else ():
            times[one.rid] += [step.at_ns - start_ns] * len(one.token_ids) if step else []
    records = [
        _record(rid, arrivals[rid], lengths[rid], times[rid], shed=rid in shed) for rid in times
    ]
    good = sum(judge(one, targets).kind is JudgementKind.ATTAINED for one in records)
    ttft = sorted(one.ttft_ns for one in records if one.ttft_ns is not None)
    tpot = sorted(one.tpot_ns for one in records if one.tpot_ns is not None)
    watch.add(
        f"replay of {scale.replay_s:g} s at {scale.replay_per_s:g}/s, TTFT 500 ms, TPOT 50 ms",
        f"{good} of {len(records)} requests attained; TTFT p50 {_part(ttft, 0.5):.0f} ms, p99 "
        f"{_part(ttft, 0.99):.0f} ms; TPOT p50 {_part(tpot, 0.5):.1f} ms",
    )


def _record(
    rid: int, arrival_ns: int, prompt: int, times: Sequence[int], *, shed: bool
) -> RequestRecord:
    return RequestRecord(
        request_id=str(rid),
        slo_class="",
        scheduled_ns=arrival_ns,
        sent_ns=arrival_ns,
        outcome=Outcome.SHED if shed else Outcome.OK,
        first_token_ns=times[0] if times else None,
        last_token_ns=times[-1] if times else None,
        end_ns=times[-1] if times else arrival_ns,
        gaps_us=[(b - a) // NS_PER_US for a, b in itertools.pairwise(times)],
        input_tokens=prompt,
        output_tokens=len(times),
    )


def _part(values: Sequence[float], share: float) -> float:
    """Return a quantile in milliseconds; NaN without values."""
    return values[int(share * (len(values) - 1))] / NS_PER_MS if values else float("nan")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return 1 if an aim is missed on a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, on any device")
    parser.add_argument(
        "--transformers",
        action=argparse.BooleanOptionalAction,
        help="measure its continuous batching (default: on a GPU)",
    )
    args = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.quick:
        print("not run: torch finds no GPU; --quick runs a tiny model on the CPU")
        return 0
    device = torch.device("cuda" if on_gpu else "cpu")
    scale = TINY if args.quick else GpuScale()
    watch = _Watch()
    watch.add("device", torch.cuda.get_device_name(device) if on_gpu else "CPU")
    check_outputs(device, watch)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    packed = pack(make_model(scale, device, dtype))
    watch.add("attention", packed.adapter.name)
    check_logits(packed, "the measured model", watch)
    roofline = measure_roofline(packed)
    watch.add(
        "limits of the device",
        f"reads {roofline.bytes_per_s / 1e9:,.0f} GB/s, computes "
        f"{roofline.flops_per_s / 1e12:,.2f} TFLOP/s",
    )
    measure_steps(packed, scale, roofline, watch)
    _release(device)
    measure_flash_attn(packed, scale, roofline, watch)
    _release(device)
    measure_swap(packed, scale, watch)
    _release(device)
    measure_replay(packed, scale, watch)
    _release(device)
    # Last, because transformers may take the rest of the memory.
    measure_ragged(
        packed, scale, watch, compare=on_gpu if args.transformers is None else args.transformers
    )
    watch.add(
        "time of the benchmark", f"{watch.elapsed_s:.0f} s", "480 s", met=watch.elapsed_s < 480
    )
    print("| measurement | value | aim | met |\n| --- | --- | ---: | --- |")
    for row in watch.rows:
        met = {None: "–", True: "yes", False: "no"}[row.met]
        value = row.value.replace("|", "\\|")
        print(f"| {row.name} | {value} | {row.aim or '–'} | {met} |")
    print(json.dumps([asdict(row) for row in watch.rows]))
    return int(on_gpu and any(row.met is False for row in watch.rows))


if __name__ == "__main__":
    sys.exit(main())
