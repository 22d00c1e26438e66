"""A causal language model of transformers that computes packed steps on paged keys and values.

The architecture comes from transformers. Its layers call our attention function, which writes the
new keys and values to the pool, and lets the adapter read them. The function has no state of its
own: the step travels through the model's forward as a keyword argument.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from goodput_core.errors import InputError
from goodput_engine.executor.torch.attention import AttentionRule, RaggedBatch
from goodput_engine.executor.torch.kv_pool import KVGeometry
from goodput_engine.executor.torch.uploads import upload, upload_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.executor.torch.attention import AttentionAdapter
    from goodput_engine.executor.torch.kv_pool import KVPool

__all__ = ["LateTokens", "PackedModel", "PackedRow"]

_IMPLEMENTATION: Final = "goodput_paged"
# Keywords that do not change the attention of a packed step: the step itself has the positions,
# nothing is cached by transformers, and only logits are returned.
_IGNORED_KEYWORDS: Final = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)
# Positions and numbers of keys are int32 on the device.
_MAX_CONTEXT: Final = (1 << 31) - 1
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


class PackedRow(NamedTuple):
    """Consecutive tokens of one request in a step.

    Args:
        token_ids: the tokens to compute.
        start: position of the first of them. The pool has the keys and values of earlier ones.
        blocks: the request's block table.
        samples: True if the logits of the last token are needed.
        shift: added to the positions that the model sees; only the self-check shifts a row.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool
    shift: int = 0


class LateTokens(NamedTuple):
    """The last tokens of some rows, which the step before samples.

    Args:
        rows: indices of the rows, whose last id is arbitrary.
        indices: index of each token in `ids`.
        ids: tokens on the device, int64.
    """

    rows: Sequence[int]
    indices: Sequence[int]
    ids: torch.Tensor


class _LayerCalls(Protocol):
    """The receiver of the attention calls of one forward pass."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor: ...


class _PagedStep:
    """Computes the attention of a packed step on the pool."""

    def __init__(
        self, pool: KVPool, adapter: AttentionAdapter, batch: RaggedBatch, slots: torch.Tensor
    ) -> None:
        self._pool = pool
        self._adapter = adapter
        self._batch = batch
        self._slots = slots

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        self._pool.write(layer, self._slots, keys, values)
        return self._adapter.attend(q, *self._pool.layer(layer), self._batch, rule)


class _AttentionProbe:
    """Records the attention calls of a single token, which sees only its own value."""

    def __init__(self) -> None:
        self.rules: dict[int, AttentionRule] = {}
        self.shapes: set[tuple[int, ...]] = set()
        self.dtypes: set[torch.dtype] = set()

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        if layer in self.rules:
            raise InputError(f"layer {layer} computes attention more than once")
        self.rules[layer] = rule
        self.shapes |= {(*keys.shape[1:], q.shape[2]), (*values.shape[1:], q.shape[2])}
        self.dtypes |= {keys.dtype, values.dtype}
        return values.repeat_interleave(q.shape[1] // values.shape[1], dim=1)


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    paged_step: _LayerCalls | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: `[1, heads, tokens, head_dim]` in, tokens first out.

    Raises:
        InputError: the model asks for an attention that no adapter computes.
    """
    if paged_step is None:
        raise InputError("its layers do not pass keyword arguments to the attention function")
    unknown = sorted(
        name
        for name, value_ in others.items()
        if name not in _IGNORED_KEYWORDS and value_ is not None
    )
    if unknown:
        raise InputError(f"its attention has the unknown argument {unknown[0]!r}")
    if attention_mask is not None:
        raise InputError("its attention has a mask of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise InputError("its attention is not causal")
    out = paged_step.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionRule(
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
        ),
    )
    return out[None], None


class PackedModel:
    """A model whose layers compute attention on a `KVPool`.

    Args:
        model: a causal language model of transformers, in inference mode. Its attention
            implementation is replaced.
        adapter: computes the attention.
        packed_weights: True if its linear layers are those of `pack_linears`.

    Attributes:
        model: the model of transformers.
        packed_weights: the argument.
        adapter: the adapter.
        attention_choice: reason for this adapter, for the log; empty if it was the first one.
        geometry: shape of the keys and values of a token.
        vocab_size: number of logits; every token id is smaller.
        max_model_tokens: limit of prompt and output tokens together, at first the model's own.
        device: the device of the weights.
        stop_ids: ids of the tokens that end an output.

    Raises:
        InputError: the attention of the model is not supported; one sentence without the name of
            the model.
    """

    def __init__(
        self, model: Any, adapter: AttentionAdapter, *, packed_weights: bool = False
    ) -> None:
        AttentionInterface.register(_IMPLEMENTATION, _paged_attention)
        self.model = model
        self.adapter = adapter
        self.attention_choice = ""
        self.packed_weights = packed_weights
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_model_tokens: int = getattr(config, "max_position_embeddings", 0)
        self.stop_ids = _stop_ids(model, self.vocab_size)
        self.device: torch.device = model.device
        if not model._supports_attention_backend:  # noqa: SLF001 - transformers has no public name
            raise InputError("transformers has no exchangeable attention for it")
        if self.max_model_tokens < 1:
            raise InputError("its configuration has no max_position_embeddings")
        if self.max_model_tokens > _MAX_CONTEXT:
            raise InputError(
                f"its max_position_embeddings is {self.max_model_tokens:.3g}, but a context has at "
                f"most {_MAX_CONTEXT} tokens; correct config.json"
            )
        model.set_attn_implementation(_IMPLEMENTATION)
        self.geometry = self._probe(config)

    def compute(
        self, rows: Sequence[PackedRow], pool: KVPool, late: LateTokens | None = None
    ) -> torch.Tensor:
        """Compute a step.

        Args:
            rows: the tokens of the step, at least one row; no request has two rows.
            pool: has the keys and values of earlier tokens, and receives those of the step.
            late: tokens that only the device has; None if the rows have all.

        Returns:
            The logits after the last token of each row that samples, `[num_sampling, vocab_size]`.
        """
        ends = list(accumulate(len(row.token_ids) for row in rows))
        # The step is described on the host and then copied, so that no copy waits for the device.
        device = self.device
        positions = torch.cat(
            [torch.arange(row.start, row.start + len(row.token_ids)) for row in rows]
        )
        tables = [torch.tensor(row.blocks, dtype=torch.int32) for row in rows]
        sizes = torch.tensor([len(row.token_ids) for row in rows])
        block_table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        row_of_token = torch.repeat_interleave(torch.arange(len(rows)), sizes, output_size=ends[-1])
        blocks = block_table[row_of_token, positions // pool.block_size].long()
        slots = blocks * pool.block_size + positions % pool.block_size
        num_keys = [row.start + len(row.token_ids) for row in rows]
        batch = RaggedBatch(
            cu_seqlens_q=upload_list([0, *ends], device, torch.int32),
            seqused_k=upload_list(num_keys, device, torch.int32),
            block_table=upload(block_table, device),
            max_queries=max(len(row.token_ids) for row in rows),
            max_keys=max(num_keys),
        )
        ids = upload_list([[token for row in rows for token in row.token_ids]], device)
        if late is not None:
            targets = upload_list([ends[row] - 1 for row in late.rows], device)
            ids[0, targets] = late.ids[upload_list(list(late.indices), device)]
        last = [end - 1 for row, end in zip(rows, ends, strict=True) if row.samples]
        shifts = torch.tensor([row.shift for row in rows])[row_of_token]
        return self.compute_batch(
            ids,
            upload((positions + shifts)[None], device),
            pool,
            batch,
            slots=upload(slots, device),
            last=upload_list(last, device, torch.long),
        )

    def compute_batch(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: KVPool,
        batch: RaggedBatch,
        *,
        slots: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step whose description is on the device.

        Args:
            ids: int64 `[1, num_tokens]`.
            positions: int64 `[1, num_tokens]`.
            pool: has the keys and values of earlier tokens, and receives those of the step.
            batch: the sequences of the step.
            slots: the slot in the pool of each token; see `KVPool.write`.
            last: indices of the tokens whose logits are returned, int64.

        Returns:
            `[len(last), vocab_size]`.
        """
        return self._forward(ids, positions, _PagedStep(pool, self.adapter, batch, slots), last)

    def reference_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits after each token of a prompt, by the attention of transformers.

        Returns:
            `[num_tokens, vocab_size]`.
        """
        self.model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                ids = torch.tensor([token_ids], device=self.device)
                logits = self.model(input_ids=ids, use_cache=False).logits
        finally:
            self.model.set_attn_implementation(_IMPLEMENTATION)
        return logits[0]

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, step: _LayerCalls, last: torch.Tensor
    ) -> torch.Tensor:
        with torch.inference_mode():
            logits = self.model(
                input_ids=ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=last,
                paged_step=step,
            ).logits
        return logits[0]

    def _probe(self, config: Any) -> KVGeometry:
        """Return the geometry that the attention calls of one token have."""
        probe, zero = _AttentionProbe(), torch.zeros((1, 1), dtype=torch.long, device=self.device)
        self._forward(zero, zero, probe, zero[0])
        num_layers: int = config.num_hidden_layers
        missing = sorted(set(range(num_layers)) - probe.rules.keys())
        if missing:
            raise InputError(f"its layer {missing[0]} computes no attention")
        if len(probe.shapes) != 1 or len(probe.dtypes) != 1:
            raise InputError("its heads have different sizes")
        ((num_kv_heads, head_dim, query_dim),) = probe.shapes
        if head_dim != query_dim:
            raise InputError("its heads have different sizes")
        _check_windows(config, probe.rules)
        return KVGeometry(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=probe.dtypes.pop(),
        )


def _check_windows(config: Any, rules: dict[int, AttentionRule]) -> None:
    """Reject a model that limits its attention by a mask, which no layer gets here."""
    kinds = getattr(config, "layer_types", None) or []
    for layer, kind in enumerate(kinds):
        if kind not in {_FULL, _SLIDING}:
            raise InputError(f"its layer {layer} has the attention {kind!r}")
        if kind == _SLIDING and rules[layer].window is None:
            raise InputError(f"its layer {layer} does not state the size of its sliding window")


def _stop_ids(model: Any, vocab_size: int) -> frozenset[int]:
    """Return the ids of the tokens that end an output; others than those of a logit end none."""
    value = model.generation_config.eos_token_id
    if value is None:  # transformers does not complete a generation_config.json by config.json
        value = getattr(model.config.get_text_config(), "eos_token_id", None)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise InputError(
            f"its eos_token_id is {str(value)[:100]}, but must be a token id or a list of them; "
            "correct generation_config.json or config.json"
        )
    return frozenset(one for one in ids if 0 <= one < vocab_size)
