"""Attention adapters are probed in order, and flash-attn gets the arguments of its contract."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from tests.builders.flash_attn_contract import HALF, make_varlen_func
from tests.builders.torch_models import CONTEXT, ModelBench, Outputs, TinyModel, make_folder
from tests.engine.executor.torch.test_attention import build, expected_attention

from goodput_core.errors import InputError
from goodput_core.spec.choices import AttentionKernel, Preemption
from goodput_engine.executor.torch.adapters import AttentionRequest, probe_attention
from goodput_engine.executor.torch.flash_attention import FlashAttention, find_flash_attn
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.model import PackedRow
from goodput_engine.executor.torch.padded_decodes import PaddedDecodes
from goodput_engine.executor.torch.start_up import start_model
from goodput_engine.messages import Configure, ModelFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch

GPU = torch.device("cuda")
CPU = torch.device("cpu")
MISSING = "the package flash-attn is not installed"


def installed() -> Callable[..., torch.Tensor]:
    return make_varlen_func()


def missing() -> Callable[..., torch.Tensor]:
    raise ImportError(MISSING)


def probe(
    kernel: str = "auto",
    *,
    block_size: int = 16,
    device: torch.device = GPU,
    dtype: torch.dtype = torch.bfloat16,
    find: Callable[[], Callable[..., torch.Tensor]] = installed,
    capability: tuple[int, int] = (9, 0),
    head_dim: int = 128,
) -> tuple[str, str]:
    """Return the name of the selected adapter, and the reasons against the others."""
    probed = probe_attention(
        AttentionRequest(kernel=AttentionKernel(kernel), block_size=block_size),
        device=device,
        dtype=dtype,
        find_flash=find,
        capability=lambda _: capability,
    )
    adapter, reason = probed.select(head_dim)
    return adapter.name, reason


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        pytest.param(
            {},
            "triton-paged",
            "flash-attn: needs KV blocks of a multiple of 256 tokens, not 16",
            id="the Triton kernel is the default on a GPU",
        ),
        pytest.param({"block_size": 256}, "flash-attn-2", "", id="the block size selects it"),
        pytest.param({"block_size": 512}, "flash-attn-2", "", id="a multiple selects it"),
        pytest.param(
            {"block_size": 256, "find": missing},
            "triton-paged",
            f"flash-attn: {MISSING}",
            id="not installed",
        ),
        pytest.param(
            {"block_size": 256, "dtype": torch.float32},
            "triton-paged",
            "flash-attn: computes float16 and bfloat16, not float32",
            id="float32",
        ),
        pytest.param(
            {"block_size": 256, "dtype": torch.float64},
            "torch-sdpa",
            "flash-attn: computes float16 and bfloat16, not float64; "
            "triton: multiplies no matrices of float64",
            id="float64",
        ),
        pytest.param(
            {"block_size": 256, "capability": (7, 5)},
            "triton-paged",
            "flash-attn: needs a GPU of compute capability 8.0 or higher, not 7.5",
            id="an old GPU",
        ),
        pytest.param(
            {"block_size": 256, "head_dim": 84},
            "triton-paged",
            "flash-attn: heads have a multiple of 8 up to 256 elements, not 84",
            id="heads of another size",
        ),
        pytest.param({"device": CPU, "block_size": 256}, "torch-sdpa", "", id="on a CPU"),
        pytest.param({"kernel": "triton", "block_size": 256}, "triton-paged", "", id="requested"),
        pytest.param({"kernel": "torch"}, "torch-sdpa", "", id="torch on a GPU"),
        pytest.param({"kernel": "flash-attn", "block_size": 256}, "flash-attn-2", "", id="flash"),
    ],
)
def test_adapters_are_probed_in_order_and_the_log_has_the_reasons(
    arguments: dict[str, Any], name: str, reason: str
) -> None:
    assert probe(**arguments) == (name, reason)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"block_size": 16}, "it needs KV blocks of a multiple of 256 tokens, not 16"),
        ({"block_size": 256, "find": missing}, MISSING),
        ({"block_size": 256, "dtype": torch.float32}, "it computes float16 and bfloat16"),
        ({"block_size": 256, "device": CPU}, "it needs an NVIDIA GPU, and torch found none"),
        ({"block_size": 256, "head_dim": 264}, "heads have a multiple of 8 up to 256 elements"),
        ({"kernel": "triton", "device": CPU}, "it needs an NVIDIA GPU, and torch found none"),
        ({"kernel": "triton", "dtype": torch.float64}, "it multiplies no matrices of float64"),
    ],
    # Names of functions have addresses, which differ between the workers of a test run.
    ids=["blocks", "not installed", "float32", "CPU", "heads", "Triton on a CPU", "float64"],
)
def test_a_requested_kernel_that_cannot_be_used_is_refused_in_one_sentence(
    arguments: dict[str, Any], reason: str
) -> None:
    kernel = arguments.setdefault("kernel", "flash-attn")
    with pytest.raises(InputError) as caught:
        probe(**arguments)
    message = str(caught.value)
    start = f"spec.engine.realModel.attention or --attention: {kernel} cannot be used, because "
    assert message.startswith(start + reason)
    assert message.endswith("; select another one, or auto")


def test_an_engine_on_a_cpu_refuses_a_kernel_for_gpus_before_it_loads_weights(
    tmp_path: Path,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    config = Configure(
        device="",
        policy="slo",
        preemption="recompute",
        token_budget=256,
        min_token_budget=256,
        max_token_budget=256,
        max_num_seqs=2,
        max_waiting=2,
    )
    # The folder is empty, so the attention is refused first.
    settings = ModelFolder(path=str(tmp_path), attention="flash-attn", block_size=256)
    with pytest.raises(InputError, match="flash-attn cannot be used, because it needs an NVIDIA"):
        start_model(config, settings, with_swap=False)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, MISSING),
        ({"__init__.py": "import none_of_this"}, MISSING),
        (
            {"__init__.py": "raise ImportError('undefined symbol: _ZN3c10\\nmore')"},
            "the package flash-attn cannot be imported: undefined symbol: _ZN3c10 more",
        ),
        ({"__init__.py": "x = 1"}, "the package flash-attn is older than 2.6, or not version 2"),
        (
            {"__init__.py": "def flash_attn_varlen_func(q, k, v, causal=False): ..."},
            "the package flash-attn is older than 2.6, or not version 2",
        ),
    ],
    ids=["none", "broken dependency", "other torch", "no function", "old"],
)
def test_a_package_that_cannot_be_used_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], reason: str
) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in files.items():
        path = tmp_path / "flash_attn" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    if not files:
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError) as caught:
        find_flash_attn()
    assert str(caught.value) == reason


def test_an_installed_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    function = make_varlen_func()
    module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert find_flash_attn() is function


LARGE_BLOCKS = [
    pytest.param([(1, 290), (1, 1), (1, 256), (1, 0)], id="decodes"),
    pytest.param([(1, 290), (0, 0), (1, 700)], id="decodes and a row without a query"),
    pytest.param([(300, 300), (1, 257), (3, 0), (40, 520)], id="chunks"),
]


def large_batch(
    rows: list[tuple[int, int]], *, window: int | None, softcap: float | None, dtype: torch.dtype
) -> tuple[Any, ...]:
    sizes = {
        "rows": rows,
        "block_size": 256,
        "heads": (4, 2),
        "head_dim": 16,
        "window": window,
        "softcap": softcap,
        "seed": 3,
    }
    return build(sizes, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only on a CPU")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (200, 2.0)])
@pytest.mark.parametrize("rows", LARGE_BLOCKS)
def test_blocks_of_256_agree_with_the_reference_under_the_contract_of_flash_attn(
    rows: list[tuple[int, int]], window: int | None, softcap: float | None
) -> None:
    q, keys, values, batch, rule = large_batch(
        rows, window=window, softcap=softcap, dtype=torch.bfloat16
    )
    out = FlashAttention(installed()).attend(q, keys, values, batch, rule)
    expected = expected_attention(q, keys, values, batch, rule)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (200, 2.0)])
@pytest.mark.parametrize("rows", LARGE_BLOCKS)
def test_flash_attn_on_a_gpu_agrees_with_the_reference(
    rows: list[tuple[int, int]], window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    pytest.importorskip("flash_attn", reason="NOT RUN: flash-attn is missing")
    q, keys, values, batch, rule = large_batch(rows, window=window, softcap=softcap, dtype=dtype)
    out = FlashAttention(find_flash_attn()).attend(q, keys, values, batch, rule)
    expected = expected_attention(q, keys, values, batch, rule)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize("architecture", ["Llama", "Gemma2"])
@pytest.mark.parametrize("decode_sizes", [(), (2, 8)], ids=["ragged", "padded"])
def test_an_engine_with_flash_attn_gives_the_outputs_of_generate(
    tmp_path: Path, architecture: str, decode_sizes: tuple[int, ...]
) -> None:
    make_folder(tmp_path, architecture)
    small = make_varlen_func(page_multiple=4, dtypes=(torch.float64,))
    adapter = FlashAttention(small)
    # The self-check runs on blocks of the adapter, 256 tokens.
    packed = load_model(tmp_path, dtype="float64", adapter=adapter)
    assert packed.adapter is adapter
    model = TinyModel(packed=packed, outputs=Outputs(tmp_path, "float64"))
    bench = ModelBench(
        model,
        "sarathi",
        Preemption.SWAP,
        blocks=24,
        block_size=4,
        decode_sizes=decode_sizes,
    )
    for family in range(8):
        bench.submit(5 * family + 1, 12, family=family, ignore_eos=True)
    bench.run_dry()


def test_padded_decodes_give_flash_attn_a_fixed_maximum_of_keys(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    compute = make_varlen_func(page_multiple=4, dtypes=(torch.float64,))

    def varlen(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append((options["max_seqlen_q"], options["max_seqlen_k"]))
        return compute(*arguments, **options)

    make_folder(tmp_path, "Llama")
    packed = load_model(tmp_path, dtype="float64", adapter=FlashAttention(varlen))
    pool = KVPool(packed.geometry, num_blocks=9, block_size=4)
    seen.clear()
    PaddedDecodes(packed, pool, sizes=[1, 2]).compute([PackedRow([3], 0, [0], samples=True)])
    assert set(seen) == {(1, CONTEXT)}
