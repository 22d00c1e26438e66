"""Compile the attention kernel for GPUs that this machine may not have, and print what it needs.

Run it as a module, with a device's compute capability (80 is an A100, 90 an H100). The result is
JSON: for each shape, the registers that were spilled to memory, and the shared memory in bytes.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from goodput_engine.executor.torch import triton_attention

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
        "SPLITS": 4 if decodes else 1,
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


if __name__ == "__main__":
    results = [
        compile_kernel(int(sys.argv[1]), head_dim=head_dim, dtype=dtype, decodes=decodes)
        for head_dim, dtype in [
            (64, torch.bfloat16),
            (128, torch.bfloat16),
            (256, torch.bfloat16),
            (96, torch.float16),
            (128, torch.float32),
        ]
        for decodes in (True, False)
    ]
    sys.stdout.write(json.dumps(results))
