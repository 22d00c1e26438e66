"""The sampled tokens of a step, which the device may not have computed yet.

Their copies to the host are queued when the tokens are chosen. On a GPU, a step that is started
before the tokens are read is therefore behind the copies, and reading does not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from goodput_engine.executor.torch.uploads import upload_list
from goodput_engine.scheduler.plan import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.executor.torch.downloads import Downloads

__all__ = ["ChosenLogprobs", "ChosenTokens", "RawLogits", "SampledToken"]


class SampledToken(NamedTuple):
    """The token of one row.

    Args:
        token_id: the token.
        logprobs: its log-probabilities; None if the row has no such option.
        is_finite: False if a logit of the row is NaN or infinite, so that the token is arbitrary.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    is_finite: bool = True


class ChosenLogprobs(NamedTuple):
    """The log-probabilities of the rows with this option, on the device.

    Args:
        counts: number of the most probable tokens that each such row reports.
        tensors: of these rows: the log-probability of the chosen token, float32 `[num_rows]`, and
            ids and log-probabilities of the most probable tokens, both `[num_rows, most]`; empty
            without such a row.
    """

    counts: dict[int, int]
    tensors: tuple[torch.Tensor, ...]


class ChosenTokens:
    """The tokens of a step.

    Args:
        ids: the tokens, int64 `[num_rows]`.
        is_finite: False for a row with a logit that is no finite number, `[num_rows]`.
        logprobs: their log-probabilities.
        downloads: copies from the device; None if the device is the host.

    Attributes:
        ids: the tokens on the device.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        is_finite: torch.Tensor,
        logprobs: ChosenLogprobs,
        downloads: Downloads | None,
    ) -> None:
        self.ids = ids
        self._counts = logprobs.counts
        # One copy from the device, not two.
        tensors = (torch.stack((ids, is_finite)), *logprobs.tensors)
        self._downloads = downloads
        self._on_host = tensors if downloads is None else tuple(map(downloads.copy, tensors))
        self._event = None if downloads is None else downloads.record()

    def read(self) -> list[SampledToken]:
        """Wait until the tokens are computed, but for no later work, and return them."""
        if self._downloads is not None:
            self._downloads.wait(self._event)
        tokens, *logprobs = self._on_host
        ids, is_finite = tokens.tolist()
        found: list[TokenLogprobs | None] = [None] * len(ids)
        if logprobs:
            listed = zip(*(tensor.tolist() for tensor in logprobs), strict=True)
            for (at, count), (own, names, values) in zip(self._counts.items(), listed, strict=True):
                found[at] = TokenLogprobs(own, names[:count], values[:count])
        return list(map(SampledToken, ids, found, map(bool, is_finite)))


class RawLogits:
    """The model's own logits of the rows whose log-probabilities are requested.

    Args:
        logits: `[num_rows, vocab_size]`, before the options of the rows change them.
        reported: number of the most probable tokens that each row reports; None without the option.
    """

    def __init__(self, logits: torch.Tensor, reported: Sequence[int | None]) -> None:
        self._counts = {at: count for at, count in enumerate(reported) if count is not None}
        if self._counts:
            self._index = upload_list(list(self._counts), logits.device)
            self._logits = logits[self._index]  # a copy

    def logprobs(self, chosen: torch.Tensor) -> ChosenLogprobs:
        """Return the log-probabilities of the rows with this option.

        Args:
            chosen: the token of each row of the step, int64 `[num_rows]`.
        """
        if not self._counts:
            return ChosenLogprobs({}, ())
        logits = self._logits
        total = logits.logsumexp(-1, keepdim=True)
        own = (logits.gather(-1, chosen[self._index][:, None]) - total)[:, 0]
        most = min(max(self._counts.values()), logits.shape[1])
        top, ids = logits.topk(most, dim=-1)
        return ChosenLogprobs(self._counts, (own, ids, top - total))
