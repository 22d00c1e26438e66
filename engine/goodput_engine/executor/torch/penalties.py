"""The tokens of requests with penalties, and the stop tokens, as tensors on the device.

A token is counted when it is chosen, before the host has read it. The next step can therefore start
at once.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from goodput_engine.executor.torch.uploads import upload_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.executor.torch.sampling import RequestSampling, SampledRow

__all__ = ["CountedRows", "PenaltyCounts", "StopIds", "rows_at_once"]

_MAX_STOP_SETS: Final = 1024
# Logits that are computed together: on a CPU as many as its cache holds, else as the memory does.
_MAX_CPU_LOGITS: Final = 1 << 18
_MAX_LOGITS: Final = 1 << 24


def rows_at_once(logits: torch.Tensor, *, most: int = _MAX_LOGITS) -> int:
    """Return the number of rows that are computed together, at least 1.

    Args:
        logits: of all rows.
        most: largest number of logits on a GPU.
    """
    if logits.device.type == "cpu":
        most = _MAX_CPU_LOGITS
    vocab_size: int = logits.shape[1]
    return max(1, most // vocab_size)


class _Counts(NamedTuple):
    """The row of `PenaltyCounts` of a request.

    Args:
        slot: index of the row.
        tokens: number of output tokens that the row counts.
    """

    slot: int
    tokens: int


class PenaltyCounts:
    """How often each token is in the outputs of requests with penalties, on the device."""

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None
        self._is_in_prompt: torch.Tensor | None = None
        self._known: WeakKeyDictionary[RequestSampling, _Counts] = WeakKeyDictionary()

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> CountedRows | None:
        """Apply penalties; return the rows that have some, None if no row has."""
        selected = [
            (at, row.sampling, row.unread)
            for at, row in enumerate(rows)
            if row.sampling is not None and row.sampling.has_penalties
        ]
        if not selected:
            return None
        slots = self._find(logits, [(sampling, unread) for _, sampling, unread in selected])
        device = logits.device
        index = upload_list([at for at, *_ in selected], device)
        at_slots = upload_list(slots, device)
        factors = upload_list(
            [
                (
                    sampling.options.repetition_penalty,
                    sampling.options.presence_penalty,
                    sampling.options.frequency_penalty,
                )
                for _, sampling, _ in selected
            ],
            device,
            torch.float32,
        )
        size = rows_at_once(logits)
        for part in zip(index.split(size), at_slots.split(size), factors.split(size), strict=True):
            self._apply_to(logits, *part)
        return CountedRows([sampling for _, sampling, _ in selected], index, at_slots)

    def _apply_to(
        self, logits: torch.Tensor, index: torch.Tensor, slots: torch.Tensor, factors: torch.Tensor
    ) -> None:
        """Apply penalties to some rows of logits.

        Args:
            logits: of all rows.
            index: the rows.
            slots: their rows of counts.
            factors: their penalties for repetition, presence and frequency, `[num_rows, 3]`.
        """
        assert self._counts is not None
        assert self._is_in_prompt is not None
        repetition, presence, frequency = factors[:, :, None].unbind(1)
        counts = self._counts[slots]
        is_output = counts > 0
        values = logits[index]
        penalized = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(is_output | self._is_in_prompt[slots], penalized, values)
        logits[index] = values - frequency * counts - presence * is_output

    def add(self, counted: CountedRows, chosen: torch.Tensor) -> None:
        """Count the chosen tokens of rows."""
        assert self._counts is not None
        tokens = chosen[counted.index]
        one = torch.ones((), dtype=self._counts.dtype, device=self._counts.device)
        self._counts.index_put_((counted.slots, tokens), one, accumulate=True)
        for sampling in counted.samplings:
            known = self._known[sampling]
            self._known[sampling] = known._replace(tokens=known.tokens + 1)

    def _find(
        self, logits: torch.Tensor, requests: Sequence[tuple[RequestSampling, int]]
    ) -> list[int]:
        """Return the rows of requests, which count the tokens up to now."""
        new = [sampling for sampling, _ in requests if sampling not in self._known]
        self._reserve(logits, len(new))
        used = {known.slot for known in self._known.values()}
        free = (slot for slot in count() if slot not in used)
        for sampling, unread in requests:
            known = self._known.get(sampling)
            tokens = len(sampling.output) + unread
            if known is not None and known.tokens == tokens:
                continue
            # A new request; or a step was computed again, because the memory was too small for it.
            assert not unread, "a token is not counted"
            slot = next(free) if known is None else known.slot
            self._fill(slot, sampling)
            self._known[sampling] = _Counts(slot, tokens)
        return [self._known[sampling].slot for sampling, _ in requests]

    def _reserve(self, logits: torch.Tensor, new: int) -> None:
        """Make room for the rows of further requests."""
        had = 0 if self._counts is None else len(self._counts)
        needed = len(self._known) + new
        if needed <= had:
            return
        size, device = (max(needed, 2 * had), logits.shape[1]), logits.device
        counts = torch.zeros(size, device=device)
        is_in_prompt = torch.zeros(size, dtype=torch.bool, device=device)
        if self._counts is not None:
            counts[:had], is_in_prompt[:had] = self._counts, self._is_in_prompt
        self._counts, self._is_in_prompt = counts, is_in_prompt

    def _fill(self, slot: int, sampling: RequestSampling) -> None:
        """Count all tokens of a request."""
        assert self._counts is not None
        assert self._is_in_prompt is not None
        device = self._counts.device
        self._counts[slot] = 0
        self._is_in_prompt[slot] = False
        if sampling.prompt:
            self._is_in_prompt[slot].index_fill_(0, upload_list(sampling.prompt, device), True)
        if sampling.output:
            output = upload_list(sampling.output, device)
            self._counts[slot].index_add_(0, output, torch.ones(len(output), device=device))


class CountedRows(NamedTuple):
    """Rows of a step with penalties.

    Args:
        samplings: their requests.
        index: their indices among all rows, int64.
        slots: their rows of `PenaltyCounts`, int64.
    """

    samplings: list[RequestSampling]
    index: torch.Tensor
    slots: torch.Tensor


class StopIds:
    """Sets of token ids on the device; the requests of a model mostly have the same set."""

    def __init__(self) -> None:
        self._sets: dict[frozenset[int], torch.Tensor] = {}

    def ban(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
        """Exclude the banned tokens of rows."""
        groups: dict[frozenset[int], list[int]] = {}
        for at, row in enumerate(rows):
            if row.banned:
                groups.setdefault(row.banned, []).append(at)
        device = logits.device
        for banned, indices in groups.items():
            ids = self._sets.get(banned)
            if ids is None or ids.device != device:
                if len(self._sets) >= _MAX_STOP_SETS:
                    self._sets.clear()
                ids = self._sets[banned] = upload_list(sorted(banned), device)
            # An index tensor of one row for each banned id, and the ids again for each row.
            index = upload_list(indices, device).repeat_interleave(len(ids))
            logits[index, ids.repeat(len(indices))] = -torch.inf
