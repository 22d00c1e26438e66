"""Data type and attention of a CPU are measured once, and then kept for this machine."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from tests.builders.torch_models import make_folder
from torch.nn.attention.flex_attention import flex_attention

from goodput_engine.executor.torch.attention import AttentionRule, SDPAttention
from goodput_engine.executor.torch.cpu_choices import (
    AttentionSizes,
    AttentionTimes,
    ProbeTimeoutError,
    choose_cpu_attention,
    choose_cpu_dtype,
    find_compiler,
    run_probe,
)
from goodput_engine.executor.torch.flex_attention import FlexAttention
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.measured_choices import (
    MeasuredChoice,
    MeasuredChoices,
    processor,
)
from goodput_engine.executor.torch.model import PackedRow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch

SIZES = AttentionSizes(num_heads=9, num_kv_heads=3, head_dim=64, dtype="float32", threads=1)
FLEX_IS_FASTER = AttentionTimes(sdpa_ns=1_000, flex_ns=800)
FLEX_IS_SLOWER = AttentionTimes(sdpa_ns=1_000, flex_ns=990)


def not_compiled() -> FlexAttention:
    """Return an adapter whose kernel is not compiled, which takes ten seconds."""
    adapter = FlexAttention(flex_attention)
    adapter.warm_up = lambda *_: None  # type: ignore[method-assign]
    return adapter


class GivenTimes:
    """Returns times in place of a measurement, and counts its calls."""

    def __init__(self, times: AttentionTimes | str) -> None:
        self.calls = 0
        self._times = times

    def __call__(self, sizes: AttentionSizes) -> AttentionTimes:
        self.calls += 1
        if isinstance(self._times, AttentionTimes):
            return self._times
        raise RuntimeError(self._times)


def choose(
    probe: GivenTimes,
    choices: MeasuredChoices,
    sizes: AttentionSizes = SIZES,
    *,
    chunk: int = 512,
    compiler: str | None = "/usr/bin/g++",
) -> tuple[str, str]:
    adapter, reason = choose_cpu_attention(
        sizes,
        choices,
        largest_chunk=chunk,
        compiler=compiler,
        probe=probe,
        make_flex=not_compiled,
    )
    return adapter.name, reason


@pytest.mark.parametrize(
    ("times", "name", "reason"),
    [
        pytest.param(FLEX_IS_FASTER, "torch-flex", "80 % of the time of SDPA", id="faster"),
        pytest.param(FLEX_IS_SLOWER, "torch-sdpa", "99 % of the time of SDPA", id="within noise"),
        pytest.param("FlexAttention fails: x", "torch-sdpa", "FlexAttention fails", id="broken"),
    ],
)
def test_the_faster_attention_is_chosen_and_measured_only_once(
    tmp_path: Path, times: AttentionTimes | str, name: str, reason: str
) -> None:
    probe = GivenTimes(times)
    for _ in range(2):
        found, why = choose(probe, MeasuredChoices(tmp_path / "new", {"processor": "x"}))
        assert found == name
        assert reason in why
    assert probe.calls == 1


def test_another_model_or_machine_is_measured_anew(tmp_path: Path) -> None:
    probe = GivenTimes(FLEX_IS_FASTER)
    one = MeasuredChoices(tmp_path, {"torch": "2.13"})
    choose(probe, one)
    choose(probe, one, replace(SIZES, num_heads=12))
    choose(probe, MeasuredChoices(tmp_path, {"torch": "2.14"}))
    assert probe.calls == 3


@pytest.mark.parametrize("content", ["", "{", '{"name": 3}', "[]", "\x00" * 20_000])
def test_a_damaged_entry_is_measured_and_replaced(tmp_path: Path, content: str) -> None:
    choices = MeasuredChoices(tmp_path, {})
    choose(GivenTimes(FLEX_IS_FASTER), choices)
    (entry,) = tmp_path.glob("attention-*.json")
    entry.write_text(content)
    probe = GivenTimes(FLEX_IS_SLOWER)
    assert choose(probe, choices)[0] == "torch-sdpa"
    assert choose(probe, choices)[0] == "torch-sdpa"
    assert probe.calls == 1


def test_a_folder_that_cannot_be_written_costs_a_measurement_at_each_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    probe = GivenTimes(FLEX_IS_FASTER)
    for folder in (tmp_path / "file" / "choices", None):
        assert choose(probe, MeasuredChoices(folder, {}))[0] == "torch-flex"
    assert probe.calls == 2


def test_a_time_out_is_kept_for_a_day_and_other_failures_for_ever(tmp_path: Path) -> None:
    now = {"s": time.time()}
    choices = MeasuredChoices(tmp_path, {}, now_s=lambda: now["s"])
    calls: list[int] = []

    def slow(_sizes: AttentionSizes) -> AttentionTimes:
        calls.append(1)
        raise ProbeTimeoutError("FlexAttention was not compiled within 20 s")

    def choose_after(hours: float) -> tuple[str, str]:
        now["s"] += 3600 * hours
        adapter, reason = choose_cpu_attention(
            SIZES,
            choices,
            largest_chunk=512,
            compiler="g++",
            probe=slow,
            make_flex=not_compiled,
        )
        return adapter.name, reason

    for hours, measured in ((0, 1), (23, 1), (2, 2), (-100, 3)):
        assert choose_after(hours) == ("torch-sdpa", "FlexAttention was not compiled within 20 s")
        assert len(calls) == measured
    # The machine is idle a day later.
    now["s"] += 90_000
    assert choose(GivenTimes(FLEX_IS_FASTER), choices, compiler="g++")[0] == "torch-flex"
    now["s"] += 1e9
    probe = GivenTimes("FlexAttention fails: x")
    assert choose(probe, choices, compiler="g++")[0] == "torch-flex"
    other = replace(SIZES, num_heads=12)
    for _ in range(2):
        assert choose(probe, choices, other)[0] == "torch-sdpa"
        now["s"] += 1e9
    assert probe.calls == 1


def test_nothing_is_measured_where_flex_attention_cannot_pay(tmp_path: Path) -> None:
    probe, choices = GivenTimes(FLEX_IS_FASTER), MeasuredChoices(tmp_path, {})
    assert choose(probe, choices, compiler=None) == (
        "torch-sdpa",
        "no C++ compiler for FlexAttention",
    )
    double = replace(SIZES, dtype="float64")
    small = replace(SIZES, head_dim=16)
    assert choose(probe, choices, double)[0] == "torch-sdpa"
    assert choose(probe, choices, small)[0] == "torch-sdpa"
    assert choose(probe, choices, chunk=255)[0] == "torch-sdpa"
    assert probe.calls == 0


def test_a_measurement_has_a_time_limit() -> None:
    with pytest.raises(ProbeTimeoutError, match=r"^FlexAttention was not compiled within 0\.05 s$"):
        run_probe(SIZES, limit_s=0.05)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "rule", "flex"),
    [
        (256, 256, AttentionRule(scale=0.3), True),
        (500, 777, AttentionRule(scale=0.3), True),
        (500, 777, AttentionRule(scale=0.3, window=900), True),
        (300, 777, AttentionRule(scale=0.3), False),
        (255, 777, AttentionRule(scale=0.3), False),
        (1, 777, AttentionRule(scale=0.3), False),
        (500, 777, AttentionRule(scale=0.3, window=600), False),
        (500, 777, AttentionRule(scale=0.3, softcap=3.0), False),
    ],
)
def test_flex_attention_equals_sdpa_and_computes_only_large_chunks(
    num_queries: int, num_keys: int, rule: AttentionRule, flex: bool
) -> None:
    calls: list[int] = []

    def counted(*arguments: object, **options: object) -> object:
        calls.append(1)
        return flex_attention(*arguments, **options)

    q, keys, values = (
        torch.randn(tokens, heads, 8, dtype=torch.float64).transpose(0, 1)
        for tokens, heads in ((num_queries, 6), (num_keys, 2), (num_keys, 2))
    )
    with torch.inference_mode():
        out = FlexAttention(counted)._attend_chunk(q, keys, values, rule)
    assert bool(calls) == flex
    expected = SDPAttention()._attend_chunk(q, keys, values, rule)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def chunk(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the queries, keys and values of a prompt."""
    q, keys, values = (torch.rand(num_tokens, heads, 16).transpose(0, 1) for heads in (4, 2, 2))
    return q, keys, values


def test_a_large_chunk_outside_of_inference_mode_is_refused() -> None:
    """The kernel would have to be compiled again, so that SDPA would compute every chunk."""
    flex, rule = FlexAttention(flex_attention), AttentionRule(scale=0.25)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode, pytest.raises(RuntimeError, match=r"within torch\.inference_mode\(\)$"):
            flex._attend_chunk(*chunk(256), rule)
    assert flex._attend_chunk(*chunk(255), rule).shape == (4, 255, 16)


def test_the_first_chunk_that_falls_back_to_sdpa_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def recompiles(*_arguments: object, **_options: object) -> torch.Tensor:
        raise RuntimeError("Detected recompile when torch.compile\nstance is 'fail_on_recompile'")

    flex, rule = FlexAttention(recompiles), AttentionRule(scale=0.25)
    with torch.inference_mode():
        for num_tokens in (256, 512, 256):
            tensors = chunk(num_tokens)
            expected = SDPAttention()._attend_chunk(*tensors, rule)
            assert torch.equal(flex._attend_chunk(*tensors, rule), expected)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("SDPA computes chunks")
    assert (vars(record)["queries"], vars(record)["keys"]) == (256, 256)
    assert "recompile when torch.compile stance" in vars(record)["detail"]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses torch.jit
@pytest.mark.skipif(find_compiler() is None, reason="NOT RUN: needs a C++ compiler")
def test_the_compiled_kernel_computes_the_large_chunks_of_a_model(tmp_path: Path) -> None:
    """A chunk for which it would be compiled again would go to SDPA."""
    compiled = torch.compile(flex_attention, dynamic=True)
    computed: list[int] = []

    def counted(q: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        out: torch.Tensor = compiled(q, *arguments, **options)
        computed.append(q.shape[2])
        return out

    folder = make_folder(tmp_path, "Llama", head_dim=16, max_position_embeddings=1024)
    model = load_model(folder, dtype="float32")
    flex = FlexAttention(counted)
    flex.warm_up(4, 2, 16, torch.float32)
    model.adapter = flex
    pool = KVPool(model.geometry, num_blocks=60, block_size=16)
    token_ids = [at * at % 97 for at in range(900)]
    expected = model.reference_logits(token_ids)
    start = 0
    # The last but one is too small for the kernel, and the last one is a decode.
    for num_tokens, queries in ((256, 256), (500, 512), (143, None), (1, None)):
        computed.clear()
        end = start + num_tokens
        row = PackedRow(token_ids[start:end], start, list(range(57)), samples=True)
        (logits,) = model.compute([row], pool)
        assert computed == ([] if queries is None else [queries] * model.geometry.num_layers)
        torch.testing.assert_close(logits, expected[end - 1], rtol=0, atol=1e-3)
        start = end
    assert start == 900


def ticking(float32_ns: int, bfloat16_ns: int) -> Callable[[], int]:
    """Return a clock by which each product of a data type takes a given time."""
    products = {"done": 0, "now": 0}

    def clock() -> int:
        # Two calls for each of 15 products, first of float32.
        products["now"] += float32_ns if products["done"] < 30 else bfloat16_ns
        products["done"] += 1
        return products["now"]

    return clock


@pytest.mark.parametrize(
    ("bfloat16_ns", "name", "percent"), [(500, "bfloat16", 50), (990, "float32", 99)]
)
def test_the_data_type_is_bfloat16_only_where_it_is_faster(
    tmp_path: Path, bfloat16_ns: int, name: str, percent: int
) -> None:
    choices = MeasuredChoices(tmp_path, processor(1))
    expected = MeasuredChoice(
        name=name, reason=f"bfloat16 takes {percent} % of the time of float32"
    )
    assert choose_cpu_dtype(choices, clock=ticking(1_000, bfloat16_ns)) == expected
    # The other outcome is not measured any more.
    assert choose_cpu_dtype(choices, clock=ticking(1_000, 100)) == expected


def test_the_machine_is_described_by_its_processor_and_torch() -> None:
    machine = processor(3)
    assert machine["torch"] == torch.__version__
    assert machine["threads"] == 3
    assert machine["processor"] or machine["flags"]
