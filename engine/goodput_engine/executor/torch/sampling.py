"""Sampling of the next token of every row of a step.

A token is sampled by the Gumbel-max rule. The noise of a token is a hash of the request's seed, the
position and the token's id, so it depends neither on the other rows of a step nor on the steps
before it. The same seed therefore gives the same tokens for every batch, chunk size and preemption,
as far as the logits are the same.

The order of the options is that of transformers: penalties, bias, banned tokens, temperature,
top-k, top-p, min-p. The mask of a grammar follows the banned tokens. A row pays only for its own
options. Tokens that are as probable as the last token within top-k or top-p are kept, so that the
order of equal logits has no effect.

The counts of the penalties and the ids of stop tokens are on the device. A token is counted when it
is chosen, so the next step need not wait until the host has read it. The host never reads from a
GPU while it samples, and `ChosenTokens` are read without waiting for the next step.

Source: Maddison, Tarlow, Minka, "A* sampling", NeurIPS 2014, section 2: the Gumbel-max rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from goodput_engine.executor.torch.chosen_tokens import ChosenTokens, RawLogits
from goodput_engine.executor.torch.penalties import PenaltyCounts, StopIds, rows_at_once
from goodput_engine.executor.torch.uploads import upload, upload_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_engine.executor.torch.chosen_tokens import SampledToken
    from goodput_engine.executor.torch.downloads import Downloads
    from goodput_engine.messages import SamplingOptions

__all__ = ["RequestSampling", "SampledRow", "Sampler"]

# Below, a softmax in float32 has one token, or overflows.
_GREEDY_BELOW: Final = 1e-5
# Numbers of the most probable tokens among which top-k and top-p are searched first.
_PREFIXES: Final = (256, 4096)
# Sorted logits take more memory: indices, and probabilities in double precision.
_MAX_SORTED_LOGITS: Final = 1 << 22
_WORD_BITS: Final = 32
_MASK_64: Final = (1 << 64) - 1
_FIRST_FACTOR: Final = -2048144789  # 0x85ebca6b as int32
_SECOND_FACTOR: Final = -1028477387  # 0xc2b2ae35 as int32


class RequestSampling:
    """The options of one request, and the tokens that its penalties count.

    Args:
        options: the options.
        prompt: token ids of the prompt.

    Attributes:
        options: the options.
        key: hash of the seed.
        prompt: distinct token ids of the prompt if a penalty counts them.
        output: token ids of the output if a penalty counts them.
    """

    __slots__ = ("__weakref__", "bias_ids", "bias_values", "key", "options", "output", "prompt")

    def __init__(self, options: SamplingOptions, prompt: Iterable[int] = ()) -> None:
        self.options = options
        self.key = _mix_64(options.seed & _MASK_64)
        self.bias_ids = torch.tensor(list(options.logit_bias), dtype=torch.long)
        self.bias_values = torch.tensor(list(options.logit_bias.values()), dtype=torch.float32)
        self.prompt = sorted(set(prompt)) if options.repetition_penalty != 1 else []
        self.output: list[int] = []

    @property
    def is_random(self) -> bool:
        """True unless the most probable token is taken."""
        return self.options.temperature >= _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        options = self.options
        return (
            options.repetition_penalty != 1
            or options.presence_penalty != 0
            or options.frequency_penalty != 0
        )

    def append(self, token_id: int) -> None:
        """Append an output token that the host has read."""
        if self.has_penalties:
            self.output.append(token_id)


class SampledRow(NamedTuple):
    """One row of logits.

    Args:
        sampling: the request's options; None for the most probable token.
        position: position of the token in the request.
        banned: ids that must not be sampled now.
        unread: number of output tokens before this one that only the device has.
        allowed: bits of the only tokens that may be sampled, int32; None for all.
    """

    sampling: RequestSampling | None
    position: int
    banned: frozenset[int] = frozenset()
    allowed: np.ndarray | None = None
    unread: int = 0


class Sampler:
    """Samples the tokens of steps.

    It keeps the hashes of the token ids, so that they are computed once, and the counts of requests
    with penalties.

    Args:
        downloads: copies from the device of the logits; None if this device is the host.
    """

    def __init__(self, downloads: Downloads | None = None) -> None:
        self._downloads = downloads
        self._hashes = torch.empty(0, dtype=torch.int32)
        self._penalties = PenaltyCounts()
        self._stop_ids = StopIds()

    def sample(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[SampledToken]:
        """Return the next token of each row; for the arguments, see `choose`."""
        return self.choose(logits, rows).read()

    def choose(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> ChosenTokens:
        """Choose the next token of each row, and leave it on the device.

        Args:
            logits: `[num_rows, vocab_size]`, floating point; may be changed.
            rows: options of the rows.
        """
        assert self._downloads is not None or logits.device.type == "cpu", "copies are missing"
        with torch.inference_mode():
            logits = logits.float()
            raw = RawLogits(logits, [_reported(row) for row in rows])
            counted = self._penalties.apply(logits, rows)
            _apply_bias(logits, rows)
            self._stop_ids.ban(logits, rows)
            _apply_masks(logits, rows)
            # A NaN is the largest logit of its row, for `max` as for `argmax`.
            largest, chosen = logits.max(-1)
            is_finite = largest < torch.inf
            whole: list[int] = []
            limited: list[int] = []
            for at, row in enumerate(rows):
                if row.sampling is not None and row.sampling.is_random:
                    options = row.sampling.options
                    is_limited = options.top_k > 0 or options.top_p < 1
                    (limited if is_limited else whole).append(at)
            if whole or limited:
                keys = self._keys(rows, logits.device)
                self._prepare(logits)
                self._sample_whole(logits, rows, whole, keys, chosen)
                sample = self._sample_prefixes if self._downloads is None else self._sample_sorted
                sample(logits, rows, limited, keys, chosen)
            if counted is not None:
                self._penalties.add(counted, chosen)
            return ChosenTokens(chosen, is_finite, raw.logprobs(chosen), self._downloads)

    def _prepare(self, logits: torch.Tensor) -> None:
        """Compute the hashes of all token ids."""
        if self._hashes.shape[0] < logits.shape[1] or self._hashes.device != logits.device:
            ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
            self._hashes = _mix_32(ids.add_(1).mul_(-1640531527), 0)

    def _keys(self, rows: Sequence[SampledRow], device: torch.device) -> torch.Tensor:
        """Return the two halves of the key of each row, `[num_rows, 2]`."""
        keys: list[tuple[int, int]] = []
        for row in rows:
            key = 0 if row.sampling is None else _mix_64(row.sampling.key + row.position)
            keys.append((_signed(key & 0xFFFFFFFF), _signed(key >> 32)))
        return upload_list(keys, device, torch.int32)

    def _sample_whole(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampledRow],
        selected: list[int],
        keys: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """Sample rows among all tokens, or among those that min-p keeps."""
        for indices in _groups(selected, rows_at_once(logits)):
            at = upload_list(indices, logits.device)
            values = _scaled(logits, rows, indices, at)
            least = _min_p_bound(rows, indices, logits.device)
            chosen[at] = self._sample_from(values, least, keys[at])

    def _sample_from(
        self, values: torch.Tensor, least: torch.Tensor | None, keys: torch.Tensor
    ) -> torch.Tensor:
        """Return a token of each row.

        Args:
            values: scaled logits, `[num_rows, vocab_size]`; changed in place.
            least: the least of them that may be sampled, `[num_rows, 1]`; None for all.
            keys: of the rows, `[num_rows, 2]`.
        """
        if least is not None:
            values.masked_fill_(values < least, -torch.inf)
        values -= _gumbel_log(self._hashes[: values.shape[1]], keys)
        return values.argmax(-1)

    def _sample_sorted(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampledRow],
        selected: list[int],
        keys: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """Sample rows with top-k or top-p without waiting for the device.

        Only the device knows how many tokens top-p keeps, so all logits of a row are sorted unless
        it has top-k. The order only gives the least logit that is kept.
        """
        device, vocab_size = logits.device, logits.shape[1]
        for size, those in _by_sorted_size(rows, selected, vocab_size).items():
            for indices in _groups(those, rows_at_once(logits, most=_MAX_SORTED_LOGITS)):
                at = upload_list(indices, device)
                values = _scaled(logits, rows, indices, at)
                if size < vocab_size:
                    top = values.topk(size, dim=-1).values
                else:
                    top = values.sort(dim=-1, descending=True).values
                least = _least_kept(top, values, rows, indices)
                chosen[at] = self._sample_from(values, least, keys[at])

    def _sample_prefixes(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampledRow],
        selected: list[int],
        keys: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """Sample rows with top-k or top-p, among as few of the most probable tokens as possible.

        On a CPU, sorting and the noise of all tokens would take longer than the few logits of a
        usual row, and reading whether they suffice waits for nothing.
        """
        vocab_size = logits.shape[1]
        for size in (*(one for one in _PREFIXES if one < vocab_size), vocab_size):
            left: list[int] = []
            ready: list[int] = []
            for at in selected:
                sampling = rows[at].sampling
                assert sampling is not None
                fits = sampling.options.top_k < size or size == vocab_size
                (ready if fits else left).append(at)
            for indices in _groups(ready, rows_at_once(logits)):
                at_rows = upload_list(indices, logits.device)
                values = _scaled(logits, rows, indices, at_rows)
                top, ids = values.topk(size, dim=-1)
                kept = top >= _least_kept(top, values, rows, indices)
                scores = top - _gumbel_log(self._hashes[ids], keys[at_rows])
                scores.masked_fill_(~kept, -torch.inf)
                tokens = ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
                if size == vocab_size:
                    chosen[at_rows] = tokens
                    continue
                # Tokens behind the prefix may belong to the row if its last one does.
                for row, is_last_kept in enumerate(kept[:, -1].tolist()):
                    if is_last_kept:
                        left.append(indices[row])
                    else:
                        chosen[indices[row]] = tokens[row]
            selected = left


def _reported(row: SampledRow) -> int | None:
    """Return the number of probable tokens that a row reports; None if it has no such option."""
    return None if row.sampling is None else row.sampling.options.logprobs


def _apply_bias(logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    for at, row in enumerate(rows):
        if row.sampling is not None and len(row.sampling.bias_ids):
            ids = upload(row.sampling.bias_ids, logits.device)
            logits[at].index_add_(0, ids, upload(row.sampling.bias_values, logits.device))


def _apply_masks(logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    """Exclude the tokens that the masks of rows do not permit."""
    masks = {at: row.allowed for at, row in enumerate(rows) if row.allowed is not None}
    if not masks:
        return
    device, vocab_size = logits.device, logits.shape[1]
    words = upload(torch.from_numpy(np.stack(list(masks.values()))), device)
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=device)
    allowed = ((words[:, :, None] >> shifts) & 1).flatten(1).bool()
    # A mask may have bits for padding, or none for logits without a token.
    allowed = torch.nn.functional.pad(allowed, (0, max(0, vocab_size - allowed.shape[1])))
    index = upload_list(list(masks), device)
    logits[index] = logits[index].masked_fill(~allowed[:, :vocab_size], -torch.inf)


def _scaled(
    logits: torch.Tensor, rows: Sequence[SampledRow], indices: list[int], at_rows: torch.Tensor
) -> torch.Tensor:
    """Return the logits of some rows divided by their temperature, relative to the largest.

    Args:
        logits: the logits of all rows.
        rows: all rows.
        indices: the selected rows.
        at_rows: the same on the device.
    """
    temperatures = [sampling.options.temperature for sampling in _samplings(rows, indices)]
    values = logits[at_rows]
    values -= values.amax(-1, keepdim=True)
    values /= upload_list(temperatures, logits.device)[:, None]
    return values


def _min_p_bound(
    rows: Sequence[SampledRow], indices: list[int], device: torch.device
) -> torch.Tensor | None:
    """Return the least scaled logit that min-p keeps in each row; None if no row has min-p."""
    least = [sampling.options.min_p for sampling in _samplings(rows, indices)]
    return upload_list(least, device).log()[:, None] if any(least) else None


def _least_kept(
    top: torch.Tensor, values: torch.Tensor, rows: Sequence[SampledRow], indices: list[int]
) -> torch.Tensor:
    """Return the least scaled logit that top-k, top-p and min-p keep in each row, `[num_rows, 1]`.

    Args:
        top: the largest scaled logits of each row, in descending order, `[num_rows, size]`. They
            suffice if they are all logits, if `size` is at least top-k, or if the last is not kept.
        values: all scaled logits, `[num_rows, vocab_size]`.
        rows: the rows of the step.
        indices: the rows that `top` has.
    """
    samplings = _samplings(rows, indices)
    size, device = top.shape[1], top.device
    last = [min(one.options.top_k or size, size) - 1 for one in samplings]
    has_top_k = upload_list([[one.options.top_k > 0] for one in samplings], device)
    least = top.gather(-1, upload_list(last, device)[:, None])
    least = torch.where(has_top_k, least, -torch.inf)
    if any(one.options.top_k for one in samplings):
        # Tokens as probable as the last one within top-k may be behind `top`.
        values = values.masked_fill(values < least, -torch.inf)
    total = values.logsumexp(-1, keepdim=True)
    probabilities = (top - total).double().exp()
    before = probabilities.cumsum(-1) - probabilities
    top_p = upload_list([[one.options.top_p] for one in samplings], device)
    nucleus = (before < top_p) | (top_p >= 1)
    nucleus[:, 0] = True
    least = torch.maximum(least, top.masked_fill(~nucleus, torch.inf).amin(-1, keepdim=True))
    bound = _min_p_bound(rows, indices, device)
    return least if bound is None else torch.maximum(least, bound)


def _by_sorted_size(
    rows: Sequence[SampledRow], selected: list[int], vocab_size: int
) -> dict[int, list[int]]:
    """Divide rows with top-k or top-p by the number of logits that must be sorted.

    A size depends on its own row alone, so that the others do not change the rounding of sums.
    """
    found: dict[int, list[int]] = {}
    for at, sampling in zip(selected, _samplings(rows, selected), strict=True):
        top_k = sampling.options.top_k
        size = next((one for one in _PREFIXES if 0 < top_k <= one < vocab_size), vocab_size)
        found.setdefault(size, []).append(at)
    return found


def _samplings(rows: Sequence[SampledRow], indices: list[int]) -> list[RequestSampling]:
    found = [rows[at].sampling for at in indices]
    return [one for one in found if one is not None]


def _groups(indices: list[int], size: int) -> Iterable[list[int]]:
    """Divide rows into groups that are computed together."""
    return (indices[at : at + size] for at in range(0, len(indices), size))


def _gumbel_log(hashes: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the negated Gumbel noise of each token.

    It is the logarithm of an exponential variate. Small variates, which decide, are exact to
    single precision. The noise is finite, so an excluded token stays excluded.

    Args:
        hashes: of the token ids, `[num_tokens]` or `[num_rows, num_tokens]`.
        keys: of the rows, `[num_rows, 2]`.
    """
    mixed = _mix_32(hashes ^ keys[:, :1], keys[:, 1:])
    # From 0 to 2**31 - 1: single precision has all small integers, so that none becomes 0 or below.
    counts = mixed.bitwise_right_shift_(1).add_(1 << 30)
    uniform = counts.to(torch.float32).add_(0.5).mul_(2.0**-31)
    # The largest value is 1 in single precision, whose exponential variate would be infinite.
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_()


def _mix_32(values: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """Hash int32 values in place, with a further key between the two rounds."""
    values *= _FIRST_FACTOR
    values ^= (values >> 15) & 0x1FFFF
    values += key
    values *= _SECOND_FACTOR
    values ^= (values >> 16) & 0xFFFF
    return values


def _mix_64(value: int) -> int:
    """Hash a 64-bit integer.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
