"""Compile the attention kernel for GPUs that this machine may not have, and print what it needs.

Run it as a module, with a device's compute capability (80 is an A100, 90 an H100). The result is
JSON: for each shape, the registers that were spilled to memory, and the shared memory in bytes.
With a second argument, the result is the number of versions of each kernel that a device compiles
for steps of random shapes.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from goodput_engine.executor.torch import triton_attention
from goodput_engine.executor.torch.attention import AttentionRule, RaggedBatch

if TYPE_CHECKING:
    from collections.abc import Callable

_ELEMENTS = {"q", "keys", "values", "out"}
_FLOATS = {"parts", "sums"}
_INTEGERS = {"cu_seqlens_q", "seqused_k", "block_table"}


def compile_kernel(
    capability: int, *, head_dim: int, dtype: torch.dtype, decodes: bool
) -> dict[str, Any]:
    """Compile the kernel for one shape."""
    kernel = triton_attention._attend
    tile = triton_attention.choose_tile(head_dim, dtype, decodes=decodes)
    element = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    constants = {
        "GROUP": 4,
        "ROWS": tile.rows,
        "TILE_QUERIES": tile.rows // 4,
        "TILE_KEYS": tile.keys,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": 16,
        "WINDOW": 0,
        "HAS_SOFTCAP": False,
        "IS_SPLIT": decodes,
    }
    names = list(inspect.signature(kernel.fn).parameters)
    types = dict.fromkeys(names, "i32")
    types |= dict.fromkeys(_ELEMENTS, f"*{element}") | dict.fromkeys(_FLOATS, "*fp32")
    types |= dict.fromkeys(_INTEGERS, "*i32") | {"scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    # PyTorch aligns buffers, and the strides of usual models are multiples of 16.
    aligned = [at for at, name in enumerate(names) if name in _ELEMENTS or name.endswith("stride")]
    compiled = triton.compile(
        ASTSource(kernel, types, constants, {(at,): [["tt.divisibility", 16]] for at in aligned}),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.warps},
    )
    return {
        "head_dim": head_dim,
        "dtype": element,
        "decodes": decodes,
        "spilled_bytes": _spilled_bytes(compiled.asm["ptx"], capability),
        "shared_bytes": compiled.metadata.shared,
    }


class _Versions:
    """Takes the place of a kernel, and counts the versions that a device would compile.

    Args:
        kernel: the kernel.
        capability: compute capability of the device.
    """

    def __init__(self, kernel: Any, capability: int) -> None:
        backend = make_backend(GPUTarget("cuda", capability, 32))
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.keys: set[str] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: object, **constants: object) -> None:
            _, specialization, options = self._bind(*arguments, **constants)
            self.keys.add(f"{specialization} {options}")

        return launch


def count_versions(capability: int) -> dict[str, int]:
    """Return the number of versions of each kernel after steps of a model with random shapes."""
    names = ("_attend", "_join")
    versions = {name: _Versions(getattr(triton_attention, name), capability) for name in names}
    # The tensors are on the CPU, but the keys are divided as on an H100.
    vars(triton_attention).update(versions, _CPU_PROCESSORS=132)
    attention, rng = triton_attention.TritonAttention(), random.Random(1)
    rule = AttentionRule(scale=0.125)
    keys, values = torch.empty(2, 4, 16, 8, 64, dtype=torch.bfloat16)
    for _ in range(300):
        num_sequences, num_blocks = rng.randint(1, 40), rng.randint(1, 500)
        num_tokens = num_sequences + rng.choice([0, 0, rng.randint(1, 200)])
        batch = RaggedBatch(
            cu_seqlens_q=torch.zeros(num_sequences + 1, dtype=torch.int32),
            seqused_k=torch.zeros(num_sequences, dtype=torch.int32),
            block_table=torch.zeros((num_sequences, num_blocks), dtype=torch.int32),
            max_queries=1,
            max_keys=16 * num_blocks,
        )
        q = torch.empty(num_tokens, 32, 64, dtype=torch.bfloat16)
        attention.attend(q, keys, values, batch, rule)
    return {name: len(one.keys) for name, one in versions.items()}


def _spilled_bytes(ptx: str, capability: int) -> int:
    """Return the bytes that the assembler moves from registers to memory."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        target = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
        report = subprocess.run(
            [assembler, "-v", "--gpu-name", target, file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    return int(re.findall(r"(\d+) bytes spill stores", report)[0])


def main(capability: int) -> list[dict[str, Any]]:
    """Compile the kernel for usual shapes."""
    return [
        compile_kernel(capability, head_dim=head_dim, dtype=dtype, decodes=decodes)
        for head_dim, dtype in [
            (64, torch.bfloat16),
            (128, torch.bfloat16),
            (256, torch.bfloat16),
            (96, torch.float16),
            (128, torch.float32),
        ]
        for decodes in (True, False)
    ]


if __name__ == "__main__":
    run = main if len(sys.argv) == 2 else count_versions
    sys.stdout.write(json.dumps(run(int(sys.argv[1]))))
