"""The requests that one replica sustains, predicted from the lengths of recent requests.

The device time of a request is predicted, because an idle replica does not show its capacity. In
the steady state each step decodes one token for each of B requests, and prompts are computed in
chunks as large as an engine makes them. The highest rate results from the largest B whose steps
meet the tightest TPOT and whose requests fit into the batch width and the KV memory.

This module must not know the arrivals, the number of replicas or whether targets were met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.control.observation import DeviceCapacity
from goodput_core.steptime import StepShape, largest_prefill
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_core.histogram import LengthBin, LengthMix

__all__ = ["EngineQueue", "ReplicaCapacity", "replica_capacity"]

_KV_IN_USE: Final = 0.9
"""Share of a full KV cache that contains tokens on average: the last block of a request is rarely
full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineQueue:
    """The times and the variation that determine how long requests wait on one replica.

    Args:
        alone_s: device seconds of one request that is alone in the batch.
        prefill_s: time of one prompt beside a batch of three quarters of the largest.
        prompt_spread: mean of the squared prompt lengths, divided by their squared mean.
        memory_spread: the same for the memory of a request times its duration.
    """

    alone_s: float
    prefill_s: float
    prompt_spread: float
    memory_spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCapacity:
    """The requests that one replica sustains when it is never idle.

    Args:
        device_s: predicted device seconds of one request, averaged over the mix.
        spread: mean of the squared device seconds of a request, divided by their squared mean, at
            least 1; a measure of the differences between requests.
        batch: requests that decode at the same time; 0 if there is fewer than one on average.
        feasible: False if no number of replicas meets the TPOT target. The other fields then
            describe a replica that misses it.
        queue: the queues of the replica; None if not known.
    """

    device_s: float
    spread: float
    batch: int
    feasible: bool
    queue: EngineQueue | None = None


@dataclass(frozen=True, slots=True)
class _Means:
    """Means over the requests of a mix."""

    prompt: float
    computed: float
    output: float
    squares: float
    context: float
    """Mean context of a decode."""

    def decodes(self, batch: int) -> StepShape:
        """Return a step of `batch` decodes and no prompt tokens."""
        return StepShape.of(decodes=batch, decode_context_tokens=math.ceil(batch * self.context))

    def even(self, batch: int) -> StepShape:
        """Return this step with its prompt tokens if prompts are spread over all steps."""
        prompts = batch / self.output
        return self._beside(self.decodes(batch), prompts, math.ceil(prompts * self.computed))

    def chunked(self, batch: int, tokens: int) -> StepShape:
        """Return this step with one chunk of a prompt."""
        return self._beside(self.decodes(batch), tokens / self.computed, tokens)

    def _beside(self, decodes: StepShape, prompts: float, tokens: int) -> StepShape:
        if not tokens:
            return decodes
        chunks = math.ceil(prompts)
        # With one prompt per step or more, each step computes complete prompts. Otherwise each
        # step computes a chunk, which reads half of its prompt on average.
        reads = prompts * self.prompt if prompts >= 1 else (self.prompt + tokens) / 2
        return decodes._replace(
            num_requests=decodes.num_requests + chunks,
            num_tokens=decodes.num_tokens + tokens,
            context_tokens=decodes.context_tokens + math.ceil(reads),
            max_chunk_tokens=max(1, math.ceil(tokens / chunks)),
            prefill_squares=math.ceil(prompts * self.squares),
        )


def replica_capacity(
    device: DeviceCapacity, mix: LengthMix, *, tpot_ns: int, max_num_seqs: int, max_tokens: int
) -> ReplicaCapacity | None:
    """Predict the capacity of one replica for a mix of lengths.

    Args:
        device: step times and memory of the replica.
        mix: lengths of observed requests.
        tpot_ns: maximum time of a step.
        max_num_seqs: batch width.
        max_tokens: maximum tokens of a step.

    Returns:
        The capacity; None if the mix is empty.

    Source: Little's law on the batch; the step that decodes and prefills together is that of
    Agrawal et al., "Sarathi-Serve", OSDI 2024.
    """
    means = _means(mix)
    if means is None:
        return None
    fitting = max(1, int(device.kv_tokens * _KV_IN_USE / max(1.0, means.context)))
    max_batch = min(max_num_seqs, fitting)
    engine = _EngineModel(device=device, means=means, tpot_ns=tpot_ns, max_tokens=max_tokens)
    batch = engine.largest_batch(max_batch)
    alone = StepShape.of(decodes=1, decode_context_tokens=math.ceil(means.context))
    feasible = device.step_ns(alone) <= tpot_ns
    if batch:
        request_ns = engine.request_ns(batch)
        beside = means.even(batch)
    elif feasible:
        # Prompts dominate: there are so many prompt tokens for each output token that fewer than
        # one request decodes in a step on average.
        host_ns = device.host_ns_per_step + 2 * device.host_ns_per_request
        tokens = largest_prefill(
            device.form,
            beside=alone,
            target_ns=tpot_ns - host_ns,
            most_tokens=min(max_tokens - 1, math.ceil(means.computed)),
        )
        tokens = max(1, tokens)
        beside = alone.with_chunk(0, tokens)
        request_ns = device.step_ns(beside) * means.computed / tokens
    else:
        beside = means.even(max_batch)
        request_ns = device.step_ns(beside) * means.output / max_batch
    return ReplicaCapacity(
        device_s=request_ns / NS_PER_S,
        spread=_spread(device, mix, beside),
        batch=batch,
        feasible=feasible,
        queue=EngineQueue(
            alone_s=engine.request_ns(1) / NS_PER_S,
            prefill_s=engine.prefill_ns(math.ceil(0.75 * batch)) / NS_PER_S,
            prompt_spread=_relative_square(mix, lambda b: b.input_tokens),
            memory_spread=_relative_square(mix, _context),
        )
        if feasible
        else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineModel:
    """Model of how an engine mixes prompts and decodes."""

    device: DeviceCapacity
    means: _Means
    tpot_ns: int
    max_tokens: int

    def largest_batch(self, limit: int) -> int:
        """Return the largest batch up to `limit` whose mean step meets the TPOT; 0 if none does."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            step_ns = self.request_ns(middle) * middle / self.means.output
            if step_ns <= self.tpot_ns + 0.5:  # predictions are rounded to whole nanoseconds
                low = middle
            else:
                high = middle - 1
        return low

    def request_ns(self, batch: int) -> float:
        """Return the device time of one request on a device with `batch` decodes.

        An engine does not spread a prompt over all steps until the next prompt arrives. It computes
        each prompt as soon as possible, in chunks as large as the tightest TPOT and the budget
        allow. The arithmetic that steps without a prompt leave unused is therefore lost.
        """
        device, means = self.device, self.means
        steps = means.output / batch
        decodes = means.decodes(batch)
        alone_ns = device.step_ns(decodes)
        if not means.computed:
            return steps * alone_ns
        tokens = self._chunk(decodes)
        chunks = means.computed / tokens
        if chunks >= steps:
            # Every step has prompt tokens, perhaps more than its budget; no such batch is in time.
            even = means.even(batch)
            late = 1.0 if even.num_tokens <= self.max_tokens else math.inf
            return late * steps * device.step_ns(even)
        chunked_ns = device.step_ns(means.chunked(batch, tokens))
        return (steps - chunks) * alone_ns + chunks * chunked_ns

    def prefill_ns(self, batch: int) -> float:
        """Return the time of one prompt that is computed beside `batch` decodes."""
        if not self.means.computed:
            return 0.0
        tokens = self._chunk(self.means.decodes(batch))
        chunk = self.means.chunked(batch, tokens)
        return self.means.computed / tokens * self.device.step_ns(chunk)

    def _chunk(self, decodes: StepShape) -> int:
        device = self.device
        host_ns = device.host_ns_per_step + device.host_ns_per_request * (decodes.num_requests + 1)
        limit = min(self.max_tokens - decodes.num_decodes, math.ceil(self.means.computed))
        tokens = largest_prefill(
            device.form,
            beside=decodes,
            target_ns=self.tpot_ns - host_ns,
            most_tokens=max(0, limit),
            start=math.ceil(self.means.prompt / 2),
        )
        return max(1, tokens)


def _means(mix: LengthMix) -> _Means | None:
    requests = mix.requests
    if not requests:
        return None
    prompt = sum(b.input_tokens for b in mix.bins)
    computed = prompt - sum(b.cached_tokens for b in mix.bins)
    output = max(requests, sum(b.output_tokens for b in mix.bins))
    squares = context = 0.0
    for b in mix.bins:
        squares += (b.input_tokens**2 - b.cached_tokens**2) / b.requests
        context += _context(b)
    return _Means(
        prompt=prompt / requests,
        computed=computed / requests,
        output=output / requests,
        squares=squares / requests,
        context=max(1.0, context / output),
    )


def _context(b: LengthBin) -> float:
    """Return the summed contexts of all decodes of a bin's requests."""
    return b.output_tokens * (b.input_tokens + b.output_tokens / 2) / b.requests


def _relative_square(mix: LengthMix, size: Callable[[LengthBin], float]) -> float:
    """Return the mean square of a size of the requests, divided by the squared mean, at least 1.

    Args:
        mix: lengths of requests; those of one bin count as equal.
        size: returns the sum of the sizes of the requests of a bin.
    """
    total = squared = 0.0
    for b in mix.bins:
        summed = size(b)
        total += summed
        squared += summed * summed / b.requests
    return max(1.0, squared * mix.requests / (total * total)) if total else 1.0


def _spread(device: DeviceCapacity, mix: LengthMix, beside: StepShape) -> float:
    """Return `ReplicaCapacity.spread`, from the costs of a prompt token and of an output token."""
    base_ns = device.step_ns(beside)
    tokens = 256
    prompt_ns = (device.step_ns(beside.with_chunk(0, tokens)) - base_ns) / tokens
    token_ns = base_ns / max(1, beside.num_requests)
    return _relative_square(
        mix,
        lambda b: (b.input_tokens - b.cached_tokens) * prompt_ns + b.output_tokens * token_ns,
    )
