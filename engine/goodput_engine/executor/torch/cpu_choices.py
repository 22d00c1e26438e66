"""The data type and the attention of a CPU, chosen by measurements.

FlexAttention must be compiled, which takes ten seconds or more and cannot be interrupted. It is
therefore measured in a process of its own, with a time limit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import torch

from goodput_engine.executor.torch.attention import SDPAttention
from goodput_engine.executor.torch.flex_attention import MIN_QUERIES
from goodput_engine.executor.torch.measured_choices import MeasuredChoice
from goodput_engine.executor.torch.packed_linear import PackedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.executor.torch.attention import AttentionAdapter
    from goodput_engine.executor.torch.flex_attention import FlexAttention
    from goodput_engine.executor.torch.measured_choices import MeasuredChoices

__all__ = [
    "FLEX",
    "SDPA",
    "AttentionSizes",
    "AttentionTimes",
    "ProbeTimeoutError",
    "choose_cpu_attention",
    "choose_cpu_dtype",
    "fast_dtype_hint",
    "find_compiler",
    "run_probe",
]

SDPA: Final = "torch-sdpa"
FLEX: Final = "torch-flex"
_PROBE: Final = "goodput_engine.executor.torch.flex_attention"
# Twice the time on an idle machine. A start must not wait much longer for a small gain.
_LIMIT_S: Final = 20.0
_MAX_DETAIL: Final = 80
# A smaller gain is within the noise of a busy machine.
_GAIN: Final = 0.95
# The attention of a smaller model takes no time.
_MIN_HIDDEN: Final = 256
_FLEX_DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})
_LAYER: Final = (1024, 4096)
_ROWS: Final = (1, 8, 64)
_REPEATS: Final = 5
# Flags of x86 and of Arm.
_FAST_BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """The sizes on which the times of an attention depend.

    Args:
        num_heads, num_kv_heads, head_dim: those of a layer.
        dtype: name of the data type.
        threads: number of threads that compute.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTimes:
    """Measured times of both adapters on the same chunks, in nanoseconds."""

    sdpa_ns: int
    flex_ns: int


class ProbeTimeoutError(RuntimeError):
    """A measurement took too long, which may be due to other work on the machine."""


def choose_cpu_attention(
    sizes: AttentionSizes,
    choices: MeasuredChoices,
    *,
    largest_chunk: int,
    compiler: str | None,
    probe: Callable[[AttentionSizes], AttentionTimes],
    make_flex: Callable[[], FlexAttention],
) -> tuple[AttentionAdapter, str]:
    """Return the faster adapter for a CPU, and the reason for the log.

    Args:
        sizes: the sizes of the model.
        choices: keeps the choice.
        largest_chunk: largest number of prompt tokens of a step.
        compiler: path of the C++ compiler; None if there is none.
        probe: measures both adapters; raises `RuntimeError` if that is not possible.
        make_flex: returns a new adapter.
    """
    if sizes.dtype not in _FLEX_DTYPES:
        return SDPAttention(), f"FlexAttention has no {sizes.dtype}"
    if sizes.num_heads * sizes.head_dim < _MIN_HIDDEN or largest_chunk < MIN_QUERIES:
        return SDPAttention(), "too small for FlexAttention"
    if compiler is None:
        return SDPAttention(), "no C++ compiler for FlexAttention"

    def measure() -> MeasuredChoice:
        try:
            times = probe(sizes)
        except ProbeTimeoutError as error:
            return MeasuredChoice(name=SDPA, reason=str(error), temporary=True)
        except RuntimeError as error:
            return MeasuredChoice(name=SDPA, reason=str(error))
        percent = 100 * times.flex_ns // max(1, times.sdpa_ns)
        pays = times.flex_ns < _GAIN * times.sdpa_ns
        reason = f"FlexAttention takes {percent} % of the time of SDPA"
        return MeasuredChoice(name=FLEX if pays else SDPA, reason=reason)

    inputs = {**asdict(sizes), "compiler": compiler}
    choice = choices.choose("attention", inputs, measure)
    if choice.name != FLEX:
        return SDPAttention(), choice.reason
    adapter = make_flex()
    try:
        adapter.warm_up(
            sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, getattr(torch, sizes.dtype)
        )
    except RuntimeError as error:
        return SDPAttention(), f"FlexAttention cannot be compiled: {_one_line(str(error))}"
    return adapter, choice.reason


def find_compiler() -> str | None:
    """Return the path of the C++ compiler that torch uses; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def run_probe(sizes: AttentionSizes, *, limit_s: float = _LIMIT_S) -> AttentionTimes:
    """Measure both adapters in a process of its own.

    Raises:
        ProbeTimeoutError: it takes too long; one line.
        RuntimeError: FlexAttention cannot be compiled, or is wrong; one line.
    """
    try:
        result = subprocess.run(
            [sys.executable, "-m", _PROBE, json.dumps(asdict(sizes))],
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeTimeoutError(f"FlexAttention was not compiled within {limit_s:g} s") from error
    except OSError as error:
        raise RuntimeError(f"FlexAttention was not measured: {error.strerror}") from error
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["its process ended"])[-1]
        raise RuntimeError(f"FlexAttention fails: {_one_line(last)}")
    times = json.loads(result.stdout)
    return AttentionTimes(sdpa_ns=times["sdpa_ns"], flex_ns=times["flex_ns"])


def choose_cpu_dtype(
    choices: MeasuredChoices, *, clock: Callable[[], int] = time.perf_counter_ns
) -> MeasuredChoice:
    """Return bfloat16 if this processor multiplies it faster than float32, else float32.

    Args:
        choices: keeps the choice.
        clock: returns nanoseconds.
    """

    def measure() -> MeasuredChoice:
        float32_ns, bfloat16_ns = (
            _product_ns(dtype, clock) for dtype in (torch.float32, torch.bfloat16)
        )
        percent = 100 * bfloat16_ns // max(1, float32_ns)
        name = "bfloat16" if bfloat16_ns < _GAIN * float32_ns else "float32"
        return MeasuredChoice(
            name=name, reason=f"bfloat16 takes {percent} % of the time of float32"
        )

    return choices.choose("dtype", {"layer": _LAYER, "rows": _ROWS}, measure)


def fast_dtype_hint(flags: str) -> str | None:
    """Return a hint for the log of a start without `--dtype`; None if float32 is the fastest type.

    Args:
        flags: flags of the processor in /proc/cpuinfo.
    """
    if _FAST_BFLOAT16.isdisjoint(flags.split()):
        return None
    return "the default; --dtype auto may be faster on this processor"


def _product_ns(dtype: torch.dtype, clock: Callable[[], int]) -> int:
    """Return the time of the products of one layer with few and many rows."""
    linear: torch.nn.Module = torch.nn.Linear(*_LAYER, bias=False, dtype=dtype)
    total = 0
    with torch.inference_mode():
        try:
            linear = PackedLinear(linear)
            linear(torch.ones(1, _LAYER[0], dtype=dtype))
        except (AttributeError, RuntimeError):  # torch computes such layers without packed weights
            linear = torch.nn.Linear(*_LAYER, bias=False, dtype=dtype)
        for rows in _ROWS:
            x = torch.ones(rows, _LAYER[0], dtype=dtype)
            times = []
            for _ in range(_REPEATS):
                began_ns = clock()
                linear(x)
                times.append(clock() - began_ns)
            total += min(times)
    return total


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_DETAIL]
