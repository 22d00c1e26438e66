"""Attention adapters agree with a float64 reference, and read no slot that was never written."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from tests.builders.flash_attn_contract import make_varlen_func
from torch.compiler import set_stance
from torch.nn.attention.flex_attention import flex_attention

from goodput_engine.executor.torch import attention
from goodput_engine.executor.torch.attention import AttentionRule, RaggedBatch, SDPAttention
from goodput_engine.executor.torch.flash_attention import FlashAttention
from goodput_engine.executor.torch.flex_attention import FlexAttention
from goodput_engine.executor.torch.kv_pool import KVGeometry, KVPool
from goodput_engine.executor.torch.triton_attention import TritonAttention
from goodput_engine.scheduler.plan import Copy

if TYPE_CHECKING:
    from goodput_engine.executor.torch.attention import AttentionAdapter

pytestmark = pytest.mark.torch

# Without a GPU, Triton's interpreter runs the kernel. It has no products of bfloat16.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def expected_attention(
    q: Any, keys: Any, values: Any, batch: RaggedBatch, rule: AttentionRule
) -> torch.Tensor:
    """Return the attention in float64, one query and one head after another."""
    q, keys, values = q.double(), keys.double(), values.double()
    block_size, groups = keys.shape[1], q.shape[1] // keys.shape[2]
    out = torch.zeros_like(q)
    starts = batch.cu_seqlens_q.tolist()
    for row, num_keys in enumerate(batch.seqused_k.tolist()):
        num_queries = starts[row + 1] - starts[row]
        for at in range(num_queries if num_keys else 0):
            position = num_keys - num_queries + at
            first = 0 if rule.window is None else max(0, position - rule.window + 1)
            slots = [
                (int(batch.block_table[row, key // block_size]), key % block_size)
                for key in range(first, position + 1)
            ]
            for head in range(q.shape[1]):
                seen = torch.stack([keys[block, slot, head // groups] for block, slot in slots])
                scores = seen @ q[starts[row] + at, head] * rule.scale
                if rule.softcap is not None:
                    scores = rule.softcap * torch.tanh(scores / rule.softcap)
                weights = torch.exp(scores - scores.max())
                seen_values = torch.stack(
                    [values[block, slot, head // groups] for block, slot in slots]
                )
                out[starts[row] + at, head] = (weights / weights.sum()) @ seen_values
    return out


HEADS = [(1, 1), (4, 2), (6, 1), (3, 3)]
# Half of the rows are decodes, which are computed together.
MIXED = st.tuples(st.just(1) | st.integers(0, 9), st.integers(0, 20), st.booleans())
# Up to four tiles of 32 keys, so that up to three programs share them.
DECODES = st.tuples(st.integers(0, 1), st.integers(0, 127), st.booleans())


@st.composite
def ragged(
    draw: st.DrawFn, heads: tuple[int, int], row: st.SearchStrategy[tuple[int, int, bool]] = MIXED
) -> dict[str, Any]:
    """Draw the sizes and the seed of a batch.

    Args:
        draw: draws a value.
        heads: number of query heads, and of key-value heads.
        row: draws queries, earlier keys, and True for padding.
    """
    rows = draw(st.lists(row, min_size=1, max_size=6))
    return {
        # (queries, keys); without keys for padding.
        "rows": [(n, 0 if padding or not n else n + old) for n, old, padding in rows],
        "block_size": draw(st.sampled_from([1, 3, 16])),
        "heads": heads,
        "head_dim": draw(st.sampled_from([2, 8])),
        "window": draw(st.sampled_from([None, None, 1, 4, 100])),
        "softcap": draw(st.sampled_from([None, None, 1.5])),
        "seed": draw(st.integers(0, 1000)),
    }


def build(
    sizes: dict[str, Any], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RaggedBatch, AttentionRule]:
    """Return random arguments of `attend`; slots that were never written hold NaN."""
    generator = torch.Generator().manual_seed(sizes["seed"])
    num_heads, num_kv_heads = sizes["heads"]
    block_size, rows = sizes["block_size"], sizes["rows"]
    needed = [-(-num_keys // block_size) for _, num_keys in rows]
    order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    shape = (len(order), block_size, num_kv_heads, sizes["head_dim"])
    keys, values = (
        torch.full(shape, math.nan, dtype=dtype),
        torch.full(shape, math.nan, dtype=dtype),
    )
    table = torch.full((len(rows), max([1, *needed])), order[-1], dtype=torch.int32)
    for row, (_, num_keys) in enumerate(rows):
        for key in range(num_keys):
            if key % block_size == 0:
                table[row, key // block_size] = order.pop(0)
            block = int(table[row, key // block_size])
            for pool in (keys, values):
                pool[block, key % block_size] = torch.randn(shape[2:], generator=generator)
    ends = torch.tensor([0, *(num_queries for num_queries, _ in rows)]).cumsum(0)
    q = torch.randn((int(ends[-1]), num_heads, shape[-1]), generator=generator).to(dtype)
    batch = RaggedBatch(
        cu_seqlens_q=ends.int().to(DEVICE),
        seqused_k=torch.tensor([num_keys for _, num_keys in rows], dtype=torch.int32).to(DEVICE),
        block_table=table.to(DEVICE),
        max_queries=max(num_queries for num_queries, _ in rows),
        max_keys=max(num_keys for _, num_keys in rows),
    )
    rule = AttentionRule(scale=0.7, window=sizes["window"], softcap=sizes["softcap"])
    return q.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), batch, rule


@pytest.mark.parametrize(
    ("adapter", "dtype", "tolerance"),
    [
        pytest.param(SDPAttention(), torch.float64, 1e-12, id="SDPA in float64"),
        pytest.param(SDPAttention(), torch.float32, 1e-5, id="SDPA in float32"),
        pytest.param(TritonAttention(), torch.float32, 1e-5, id="Triton in float32"),
        pytest.param(
            FlashAttention(make_varlen_func(page_multiple=1, dtypes=(torch.float64,))),
            torch.float64,
            1e-12,
            id="contract of flash-attn",
            marks=pytest.mark.skipif(DEVICE == "cuda", reason="only on a CPU"),
        ),
    ],
)
# One test for each heads: Triton's interpreter takes a tenth of a second of CPU time per example.
@pytest.mark.parametrize("heads", HEADS, ids=str)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_an_adapter_equals_the_reference_on_ragged_batches(
    adapter: AttentionAdapter,
    dtype: torch.dtype,
    tolerance: float,
    heads: tuple[int, int],
    data: st.DataObject,
) -> None:
    q, keys, values, batch, rule = build(data.draw(ragged(heads)), dtype)
    out = adapter.attend(q, keys, values, batch, rule)
    assert out.shape == q.shape
    assert out.dtype == dtype
    expected = expected_attention(q, keys, values, batch, rule)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scores", [1, 40, 300])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 1.5), (9, 1.5)])
def test_queries_in_parts_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None, scores: int
) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", scores)
    sizes = {
        "rows": [(23, 23), (12, 40), (1, 30), (2, 0)],
        "block_size": 3,
        "heads": (4, 2),
        "head_dim": 8,
        "window": window,
        "softcap": softcap,
        "seed": 3,
    }
    q, keys, values, batch, rule = build(sizes, torch.float64)
    out = SDPAttention().attend(q, keys, values, batch, rule)
    expected = expected_attention(q, keys, values, batch, rule)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


class FlexOfSmallChunks(FlexAttention):
    """FlexAttention that also computes chunks which would be padded too much."""

    @staticmethod
    def computes(num_queries: int, num_keys: int, rule: AttentionRule) -> bool:
        """Accept what the kernel can compute, of any size."""
        windowed = rule.window is not None and num_keys > rule.window
        return not windowed and rule.softcap is None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_reference_on_ragged_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[int] = []

    def counted(q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        calls.append(q.shape[2])
        with set_stance("force_eager"):
            return flex_attention(q, *arguments, **options)

    # The masks take most of the time.
    @settings(max_examples=examples(12), deadline=None)
    @given(heads=st.sampled_from(HEADS), data=st.data())
    def compare(heads: tuple[int, int], data: st.DataObject) -> None:
        sizes = data.draw(ragged(heads)) | {"window": None, "softcap": None}
        q, keys, values, batch, rule = build(sizes, torch.float64)
        with torch.inference_mode():
            out = FlexOfSmallChunks(counted).attend(q, keys, values, batch, rule)
        expected = expected_attention(q, keys, values, batch, rule)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)

    compare()
    assert calls, "no batch had a chunk"
    assert not caplog.records, "SDPA computed a chunk"


@pytest.mark.parametrize("heads", HEADS, ids=str)
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_programs_that_share_the_keys_of_a_decode_equal_the_reference(
    heads: tuple[int, int], data: st.DataObject
) -> None:
    q, keys, values, batch, rule = build(data.draw(ragged(heads, DECODES)), torch.float32)
    out = TritonAttention(splits=3).attend(q, keys, values, batch, rule)
    expected = expected_attention(q, keys, values, batch, rule)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


SEVERAL_TILES = pytest.mark.parametrize(
    "rows",
    [[(1, 290), (0, 0), (1, 1), (1, 128), (1, 0)], [(40, 200), (1, 130), (3, 0), (5, 5)]],
    ids=["decodes", "mixed"],
)


@pytest.mark.parametrize("splits", [None, 1, 3, 16])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float32, 1e-5, id="float32"),
        pytest.param(torch.float16, 0.004, id="float16"),
        pytest.param(
            torch.bfloat16,
            0.03,
            id="bfloat16",
            marks=pytest.mark.skipif(DEVICE == "cpu", reason="NOT RUN: needs an NVIDIA GPU"),
        ),
    ],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, 2.0)])
@SEVERAL_TILES
def test_the_kernel_equals_the_reference_over_several_tiles_of_keys(
    rows: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    tolerance: float,
    splits: int | None,
) -> None:
    q, keys, values, batch, rule = build(
        {
            "rows": rows,
            "block_size": 16,
            "heads": (6, 2),
            "head_dim": 24,
            "window": window,
            "softcap": softcap,
            "seed": 5,
        },
        dtype,
    )
    out = TritonAttention(splits=splits).attend(q, keys, values, batch, rule)
    assert out.dtype == dtype
    expected = expected_attention(q, keys, values, batch, rule)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("head_dim", [128, 256])
@SEVERAL_TILES
def test_the_kernel_equals_the_reference_with_the_tiles_of_large_heads(
    rows: list[tuple[int, int]], head_dim: int
) -> None:
    sizes = {
        "rows": rows,
        "block_size": 16,
        "heads": (6, 2),
        "head_dim": head_dim,
        "window": 70,
        "softcap": 2.0,
        "seed": 5,
    }
    q, keys, values, batch, rule = build(sizes, torch.float16)
    rule = replace(rule, scale=0.7 * (24 / head_dim) ** 0.5)  # scores as with smaller heads
    out = TritonAttention(splits=3).attend(q, keys, values, batch, rule)
    expected = expected_attention(q, keys, values, batch, rule)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.004)


def test_the_reference_sees_a_wrong_window_and_a_wrong_scale() -> None:
    sizes = {
        "rows": [(5, 12), (1, 9)],
        "block_size": 4,
        "heads": (4, 2),
        "head_dim": 8,
        "window": 3,
        "softcap": None,
        "seed": 1,
    }
    q, keys, values, batch, rule = build(sizes, torch.float64)
    expected = expected_attention(q, keys, values, batch, rule)
    for wrong in (AttentionRule(scale=0.7, window=4), AttentionRule(scale=0.8, window=3)):
        out = SDPAttention().attend(q, keys, values, batch, wrong)
        assert not torch.allclose(out, expected, atol=1e-6)


GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)


def test_a_block_is_contiguous_over_all_layers() -> None:
    pool = KVPool(GEOMETRY, num_blocks=5, block_size=2)
    block = pool.device_blocks[3]
    assert block.is_contiguous()
    assert block.nbytes == 2 * GEOMETRY.bytes_per_token


def test_written_slots_are_read_in_their_layer_only() -> None:
    pool = KVPool(GEOMETRY, num_blocks=5, block_size=2)
    pool.device_blocks.zero_()
    keys, values = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    pool.write(1, torch.tensor([9, 0, 3]), keys, values)
    read_keys, read_values = pool.layer(1)
    for at, (block, slot) in enumerate([(4, 1), (0, 0), (1, 1)]):
        assert torch.equal(read_keys[block, slot], keys[at])
        assert torch.equal(read_values[block, slot], values[at])
    assert pool.device_blocks.count_nonzero() == keys.numel() + values.numel()
    assert not pool.layer(0)[0].any()


def test_a_swapped_block_comes_back_unchanged_in_another_block() -> None:
    pool = KVPool(GEOMETRY, num_blocks=4, block_size=2, num_host_blocks=3)
    pool.device_blocks.normal_()
    before = pool.device_blocks.clone()
    pool.copy(Copy(rid=1, to_host=True, device_blocks=(2, 0), host_blocks=(1, 2)))
    pool.device_blocks.fill_(torch.nan)
    pool.copy(Copy(rid=1, to_host=False, device_blocks=(0, 3), host_blocks=(1, 2)))
    assert torch.equal(pool.device_blocks[[0, 3]], before[[2, 0]])
    assert pool.device_blocks[[1, 2]].isnan().all()
