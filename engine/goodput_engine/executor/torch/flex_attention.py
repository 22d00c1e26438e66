"""Compiled FlexAttention for the prompts of a step on a CPU.

The compiled kernel skips the keys that no query sees, and needs no mask in memory. It can pay for
chunks of some hundred tokens, and never for decodes. Sizes are padded to multiples of the kernel's
blocks, so that it is compiled once, before the engine is ready. SDPA computes the chunks that
would be padded too much, and those for which the kernel would have to be compiled again, which is
logged once.

`python -m goodput_engine.executor.torch.flex_attention SIZES` measures both, for `cpu_choices`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.compiler import set_stance
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad

from goodput_engine.executor.torch.attention import AttentionRule, SDPAttention

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MIN_QUERIES", "FlexAttention"]

_log: Final = logging.getLogger(__name__)

MIN_QUERIES: Final = 256
"""Smallest chunk that the kernel computes."""
_MAX_PADDING: Final = 0.1
_BLOCK: Final = 128
_MAX_MASKS: Final = 16
_MEASURED: Final = ((512, 512), (512, 1536), (1024, 1024))
_REPEATS: Final = 5
_MAX_DETAIL: Final = 200
_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
# Queries and keys. Blocks of both are more than one, and no two numbers are equal, because the
# compiler would take one for the other.
_WARM_UPS: Final = ((384, 896), (640, 1408))


class FlexAttention(SDPAttention):
    """SDPA for decodes and small chunks, compiled FlexAttention for large chunks.

    Args:
        compiled: computes attention like `flex_attention`; None to compile that.
    """

    name = "torch-flex"

    def __init__(self, compiled: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._compiled = compiled or torch.compile(flex_attention, dynamic=True)
        self._masks: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._falls_back = False

    @staticmethod
    def computes(num_queries: int, num_keys: int, rule: AttentionRule) -> bool:
        """True if FlexAttention computes a chunk, and not SDPA."""
        is_windowed = rule.window is not None and num_keys > rule.window
        padding = -num_queries % _BLOCK
        return (
            num_queries >= MIN_QUERIES
            and padding <= _MAX_PADDING * num_queries
            and not is_windowed
            and rule.softcap is None
        )

    def warm_up(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Compile the kernel for a model.

        Raises:
            RuntimeError: it cannot be compiled.
        """
        with torch.inference_mode():
            for num_queries, num_keys in _WARM_UPS:
                q = torch.zeros(num_queries, num_heads, head_dim, dtype=dtype)
                keys = torch.zeros(num_keys, num_kv_heads, head_dim, dtype=dtype)
                self._flex(q.transpose(0, 1), keys.transpose(0, 1), keys.transpose(0, 1), 1.0)

    def _attend_chunk(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        if self.computes(q.shape[1], keys.shape[1], rule):
            if not torch.is_inference_mode_enabled():
                raise RuntimeError(
                    "FlexAttention is compiled for inference; call it within torch.inference_mode()"
                )
            try:
                with set_stance("fail_on_recompile"):
                    return self._flex(q, keys, values, rule.scale)
            except RuntimeError as error:
                if "recompile" not in str(error):
                    raise
                self._log_fallback(q, keys, error)
        return super()._attend_chunk(q, keys, values, rule)

    def _log_fallback(self, q: torch.Tensor, keys: torch.Tensor, error: RuntimeError) -> None:
        """Log the first chunk that SDPA computes because the kernel does not fit it."""
        if self._falls_back:
            return
        self._falls_back = True
        # The core process writes the event alone to stderr.
        detail = " ".join(str(error).split())[:_MAX_DETAIL]
        _log.warning(
            "SDPA computes chunks for which FlexAttention would be compiled again",
            extra={"queries": q.shape[1], "keys": keys.shape[1], "detail": detail},
        )

    def _flex(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return the attention of padded queries; see `_attend_one`."""
        num_queries, num_keys = q.shape[1], keys.shape[1]
        more_queries = -num_queries % _BLOCK
        # More keys than queries also without earlier keys, as when the kernel was compiled.
        more_keys = -num_keys % _BLOCK + _BLOCK
        padded = q.new_zeros((q.shape[0], num_queries + more_queries, q.shape[2]))
        # The kernel would be compiled for each scale.
        torch.mul(q, scale, out=padded[:, :num_queries])
        out = self._compiled(
            padded[None],
            pad(keys, (0, 0, 0, more_keys))[None],
            pad(values, (0, 0, 0, more_keys))[None],
            block_mask=self._mask(num_queries, num_keys),
            scale=1.0,
            enable_gqa=q.shape[0] != keys.shape[0],
        )
        return out[0, :, :num_queries]

    def _mask(self, num_queries: int, num_keys: int) -> Any:
        """Return the mask of a chunk, which is the same in all layers."""
        key = (num_queries, num_keys)
        if key not in self._masks:
            first = torch.tensor(num_keys - num_queries)

            def is_seen(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
                return key <= query + first

            self._masks[key] = create_block_mask(
                is_seen,
                None,
                None,
                num_queries + -num_queries % _BLOCK,
                num_keys + -num_keys % _BLOCK + _BLOCK,
                device="cpu",
                BLOCK_SIZE=_BLOCK,
            )
            if len(self._masks) > _MAX_MASKS:
                self._masks.popitem(last=False)
        return self._masks[key]


def _measure(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, int]:
    """Return the times of SDPA and of FlexAttention on chunks, in nanoseconds.

    Raises:
        RuntimeError: FlexAttention cannot be compiled, or its results are wrong.
    """
    flex, sdpa, rule = FlexAttention(), SDPAttention(), AttentionRule(scale=head_dim**-0.5)
    flex.warm_up(num_heads, num_kv_heads, head_dim, dtype)
    times = {"sdpa_ns": 0, "flex_ns": 0}
    with torch.inference_mode():
        for num_queries, num_keys in _MEASURED:
            q, keys, values = (
                torch.rand(tokens, heads, head_dim).to(dtype).transpose(0, 1)
                for tokens, heads in (
                    (num_queries, num_heads),
                    (num_keys, num_kv_heads),
                    (num_keys, num_kv_heads),
                )
            )
            outputs = []
            for name, adapter in (("sdpa_ns", sdpa), ("flex_ns", flex)):
                best_ns = None
                for _ in range(_REPEATS):
                    began_ns = time.process_time_ns()
                    out = adapter._attend_chunk(q, keys, values, rule)  # noqa: SLF001 - our own
                    taken_ns = time.process_time_ns() - began_ns
                    best_ns = taken_ns if best_ns is None else min(best_ns, taken_ns)
                outputs.append(out)
                times[name] += best_ns or 0
            if not torch.allclose(*outputs, rtol=0, atol=_TOLERANCE[dtype]):
                raise RuntimeError("its results are not those of SDPA")
    return times


def main(argv: list[str]) -> int:
    """Measure both for the sizes of a model, and print the times as JSON."""
    sizes = json.loads(argv[0])
    torch.set_num_threads(sizes["threads"])
    times = _measure(
        sizes["num_heads"],
        sizes["num_kv_heads"],
        sizes["head_dim"],
        getattr(torch, sizes["dtype"]),
    )
    sys.stdout.write(json.dumps(times))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
