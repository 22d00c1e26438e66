"""The memory of a model and the time of its copies, as they are measured at its start."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from tests.builders.manifests import llmservice
from tests.builders.schedulers import make_configure
from tests.builders.torch_models import VOCABULARY, make_folder

from goodput_core.errors import InputError
from goodput_core.units import NS_PER_MS
from goodput_engine.core.build import build_model_core, configuration
from goodput_engine.executor.torch import start_up
from goodput_engine.executor.torch.attention import SDPAttention
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.memory import PeakMemory
from goodput_engine.executor.torch.model import PackedModel, PackedRow
from goodput_engine.executor.torch.start_up import _compile_kernels, start_model
from goodput_engine.messages import ExecutorInput, ModelFolder, Submit
from goodput_engine.server.command import make_parser
from goodput_engine.server.model_options import choose_model

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.engine_state import EngineState
    from goodput_engine.executor.torch.attention import AttentionRule, RaggedBatch
    from goodput_engine.messages import Configure
    from goodput_engine.scheduler.plan import Copy

pytestmark = pytest.mark.torch

KIB, GIB = 1 << 10, 1 << 30
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * 4
"""Keys and values of 2 layers with 2 heads of 8 numbers of 4 bytes, for 4 tokens: 1 KiB."""


class LoggedAttention(SDPAttention):
    """Attention that logs the queries and the keys of each sequence.

    Attributes:
        steps: them, for each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[tuple[int, int]]] = []

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: RaggedBatch,
        rule: AttentionRule,
    ) -> torch.Tensor:
        queries = batch.cu_seqlens_q.diff().tolist()
        self.steps.append(list(zip(queries, batch.seqused_k.tolist(), strict=True)))
        return super().attend(q, keys, values, batch, rule)


def test_a_gpu_computes_steps_of_every_kind_before_it_serves(folder: Path) -> None:
    attention = LoggedAttention()
    model = load_model(folder, adapter=attention)
    attention.steps.clear()
    pool = KVPool(model.geometry, num_blocks=3, block_size=4)
    pool.device_blocks.fill_(7)
    _compile_kernels(model, pool)
    assert bool((pool.device_blocks[:2] == 7).all()), "a block of a request was written"
    decodes = [[(1, 1 << power)] for power in range(8)]
    ragged, mixed = [(1, 1), (1, 128)], [(1, 1), (2, 128)]
    layers = model.geometry.num_layers
    assert attention.steps[::layers] == [*decodes, ragged, mixed]


@pytest.mark.parametrize(
    ("flags", "dtype", "choice"),
    [
        ("fpu avx2 avx512_bf16", None, "the default; --dtype auto may be faster on this processor"),
        ("fpu avx2 avx512f", None, None),
        ("fpu avx2 avx512_bf16", "float32", None),
    ],
    ids=["fast bfloat16", "slow bfloat16", "a chosen type"],
)
def test_a_start_without_a_data_type_names_one_that_may_be_faster(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    dtype: str | None,
    choice: str | None,
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(start_up, "processor", lambda threads: {"flags": flags})
    settings = ModelFolder(path=str(folder), dtype=dtype, kv_blocks=40, threads=1)
    loaded = start_model(make_configure(), settings, with_swap=False)
    assert loaded.facts["dtype"] == "float32"
    assert loaded.facts.get("dtype_choice") == choice


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"), "Llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> PackedModel:
    return load_model(folder)


def configured(**engine: Any) -> Configure:
    """Return the configuration of a manifest; `engine` changes fields of `spec.engine`."""
    changes = {f"engine__{name}": value for name, value in engine.items()}
    service = llmservice("engine", **changes)
    return configuration(service.spec.engine, mode=service.spec.control.mode, device="")


def sized(
    model: PackedModel,
    monkeypatch: pytest.MonkeyPatch,
    *,
    free: int,
    working: int = 0,
    config: Configure | None = None,
    with_swap: bool = False,
    **settings: Any,
) -> tuple[int, int]:
    """Return the numbers of KV blocks and of host blocks on a CPU with some free memory."""
    monkeypatch.setattr(start_up, "free_bytes", lambda _: free)
    return start_up._size_pools(
        model,
        config or make_configure(max_num_seqs=1000),
        ModelFolder(path="tiny", block_size=4, **settings),
        working,
        with_swap=with_swap,
    )


@pytest.mark.parametrize(
    ("percent", "blocks"), [(None, 400), (25, 200), (95, 760)], ids=["default", "25%", "95%"]
)
def test_the_kv_blocks_fill_their_share_of_the_memory_beside_the_largest_step(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch, percent: int | None, blocks: int
) -> None:
    assert model.geometry.bytes_per_token * 4 == BLOCK_BYTES == KIB
    found = sized(model, monkeypatch, free=1000 * KIB, working=200 * KIB, memory_percent=percent)
    assert found == (blocks, 0)


def test_no_more_kv_blocks_are_made_than_all_requests_can_fill(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_configure(max_num_seqs=3)
    context = model.max_model_tokens // 4
    assert sized(model, monkeypatch, free=GIB, config=config) == (3 * context, 0)


def test_memory_that_holds_no_request_is_refused(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_configure(max_num_seqs=1000)
    with pytest.raises(InputError, match=r"0\.0 GiB of memory .* 1% of it holds only 12 tokens"):
        sized(
            model, monkeypatch, free=800 * KIB, working=500 * KIB, config=config, memory_percent=1
        )


def test_the_option_of_the_command_decides_the_number_of_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_up, "free_bytes", lambda _: GIB)
    spec = llmservice("engine", model__source=f"file://{folder}").spec
    blocks = []
    for percent in ("2%", "4%"):
        options = ["-f", "x", "--memory-utilization", percent, "--block-size", "4"]
        settings = choose_model(make_parser().parse_args(options), spec, source="x")
        assert settings is not None
        config = make_configure(max_num_seqs=20_000)
        blocks.append(start_model(config, settings, with_swap=False).kv_blocks)
    # The working memory of the largest step is measured at each start anew.
    assert blocks[1] == pytest.approx(2 * blocks[0], rel=0.2)
    assert blocks[0] <= GIB * 2 // 100 // BLOCK_BYTES


@pytest.mark.parametrize("gib", [1, 3])
def test_the_host_blocks_follow_from_the_swap_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int
) -> None:
    large = load_model(
        make_folder(tmp_path, "Llama", head_dim=256, num_key_value_heads=4, num_hidden_layers=8)
    )
    # 64 KiB for each token, so that the numbers are small.
    assert large.geometry.bytes_per_token == 64 * KIB
    config = configured(preemption="swap", swapSpaceGib=gib)
    for with_swap, expected in ((True, gib * GIB // (4 * 64 * KIB)), (False, 0)):
        found = sized(
            large,
            monkeypatch,
            free=100 * GIB,
            config=config,
            with_swap=with_swap,
            kv_blocks=100_000,
        )
        assert found == (100_000, expected)


@pytest.mark.parametrize(
    ("swap_kib", "kv_blocks", "host"),
    [
        pytest.param(60, 300, 60, id="the swap space"),
        pytest.param(500, 300, 100, id="the rest of the share"),
        pytest.param(500, 150, 150, id="as many as KV blocks"),
        pytest.param(500, 400, 0, id="KV blocks that take the whole share"),
        pytest.param(0, 300, 0, id="no swap space"),
    ],
)
def test_kv_blocks_come_first_in_the_memory_of_a_cpu(
    model: PackedModel,
    monkeypatch: pytest.MonkeyPatch,
    swap_kib: int,
    kv_blocks: int,
    host: int,
) -> None:
    config = make_configure(swap_space_bytes=swap_kib * KIB)
    found = sized(
        model, monkeypatch, free=800 * KIB, config=config, with_swap=True, kv_blocks=kv_blocks
    )
    assert found == (kv_blocks, host)


@pytest.mark.parametrize(
    ("main_kib", "swap_kib", "host"),
    [
        pytest.param(10_000, 300, 300, id="the swap space"),
        pytest.param(200, 300, 180, id="90% of the main memory"),
        pytest.param(10_000, 5_000, 720, id="as many as KV blocks"),
    ],
)
def test_a_gpu_gives_most_of_its_memory_and_of_the_main_memory_to_blocks(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch, main_kib: int, swap_kib: int, host: int
) -> None:
    on_gpu = SimpleNamespace(
        device=torch.device("cuda"),
        geometry=model.geometry,
        max_model_tokens=model.max_model_tokens,
    )
    monkeypatch.setattr(start_up, "available_bytes", lambda: main_kib * KIB)
    found = sized(
        cast("PackedModel", on_gpu),
        monkeypatch,
        free=1000 * KIB,
        working=200 * KIB,
        config=make_configure(max_num_seqs=1000, swap_space_bytes=swap_kib * KIB),
        with_swap=True,
    )
    assert found == (720, host)


def test_the_largest_step_takes_no_more_memory_than_the_first_one_predicts(tmp_path: Path) -> None:
    tokens = 2_048
    # A soft cap needs the scores of all heads, queries and keys.
    wide = load_model(
        make_folder(tmp_path, "Gemma2", num_attention_heads=8, max_position_embeddings=tokens)
    )
    config = make_configure(token_budget=tokens, max_num_seqs=4)
    predicted = start_up._take_first_step(wide, config, 16).working_bytes
    blocks = list(range(tokens // 16))
    pool = KVPool(wide.geometry, num_blocks=len(blocks), block_size=16)
    pool.device_blocks.zero_()
    peak = PeakMemory(wide.device)
    wide.compute([PackedRow([0] * tokens, 0, blocks, samples=True)], pool)
    assert peak.grown_bytes() <= predicted


def slow_copies(monkeypatch: pytest.MonkeyPatch, ms: int, *, to_host: bool) -> None:
    """Let each block of the copies in one direction take a time."""
    fast = KVPool.copy

    def copy(pool: KVPool, copy: Copy) -> None:
        fast(pool, copy)
        if copy.to_host == to_host:
            until_ns = time.monotonic_ns() + ms * NS_PER_MS * len(copy.device_blocks)
            while time.monotonic_ns() < until_ns:
                pass

    monkeypatch.setattr(KVPool, "copy", copy)


def start_hybrid(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, EngineState]:
    """Start a model, and serve requests for which its KV blocks do not suffice.

    Each token takes at least half a millisecond, so that a fast copy is quicker on any machine.

    Returns:
        The measured time of a block, and the state at the end.
    """
    monkeypatch.setattr(start_up, "free_bytes", lambda _: GIB)
    compute = PackedModel.compute

    def compute_slowly(model: PackedModel, rows: list[PackedRow], *others: Any) -> torch.Tensor:
        until_ns = time.monotonic_ns() + sum(len(row.token_ids) for row in rows) * NS_PER_MS // 2
        logits = compute(model, rows, *others)
        while time.monotonic_ns() < until_ns:
            pass
        return logits

    monkeypatch.setattr(PackedModel, "compute", compute_slowly)
    config = make_configure(
        preemption="hybrid", swap_space_bytes=GIB, token_budget=64, min_token_budget=4
    )
    settings = ModelFolder(path=str(folder), block_size=4, threads=1, kv_blocks=40)
    loaded = start_model(config, settings, with_swap=True)
    assert (loaded.kv_blocks, loaded.host_blocks) == (40, 40)
    core = build_model_core(config, loaded)
    for rid in range(8):
        token_ids = [(rid + 7 * at) % VOCABULARY for at in range(40)]
        submit = Submit(
            rid=rid,
            arrival_ns=time.monotonic_ns(),
            input_tokens=len(token_ids),
            max_output_tokens=60,
            executor=ExecutorInput(token_ids=token_ids, ignore_eos=True),
        )
        assert core.submit(submit, time.monotonic_ns()) is None
    while core.scheduler.has_work:
        core.step(time.monotonic_ns())
    return loaded.swap_ns_per_block, core.state(time.monotonic_ns())


@pytest.mark.parametrize("to_host", [True, False], ids=["to the host", "to the device"])
def test_the_slower_direction_of_a_copy_is_measured_and_decides_hybrid_preemption(
    folder: Path, monkeypatch: pytest.MonkeyPatch, to_host: bool
) -> None:
    fast_ns, swapped = start_hybrid(folder, monkeypatch)
    assert 1 <= fast_ns < 2 * NS_PER_MS
    assert swapped.swapped_tokens > 0
    slow_copies(monkeypatch, 20, to_host=to_host)
    slow_ns, recomputed = start_hybrid(folder, monkeypatch)
    assert slow_ns >= 20 * NS_PER_MS
    assert recomputed.swapped_tokens == 0
    assert recomputed.recomputed_tokens > 0
