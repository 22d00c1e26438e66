"""What one replica can carry of a mix of lengths, predicted from the time of its steps.

An idle replica shows nothing of what it could carry, so capacity is computed, not observed: in
the steady state each step decodes one token for each of B requests, and a prompt's tokens come in
chunks as large as an engine makes them, beside some of these steps or all of them. The largest B
whose steps keep the tightest time per token, and that slots and memory hold, gives the highest
rate. It must not know how many replicas there are or what was measured of promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.control.observation import DeviceCapacity
from goodput_core.steptime import StepShape, largest_prefill
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from goodput_core.histogram import LengthMix

__all__ = ["Carried", "carried"]

_KV_IN_USE: Final = 0.9
"""Share of the KV cache that requests hold on average when it is full: blocks are rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What one replica carries when it is busy all the time.

    Args:
        device_s: predicted seconds of one device for one request, on the mix's average.
        spread: the mean square of a request's own device seconds over the square of their mean,
            at least 1: how uneven requests are.
        batch: requests that decode at once; 0: less than one on average.
        feasible: whether the time per token can be kept at all, by any number of replicas. If
            not, the rest is what a replica carries while it is missed.
    """

    device_s: float
    spread: float
    batch: int
    feasible: bool


@dataclass(frozen=True, slots=True)
class _Means:
    """Of one request of the mix."""

    prompt: float
    computed: float
    output: float
    squares: float
    context: float
    """While it decodes."""

    def decodes(self, batch: int) -> StepShape:
        """A step in which `batch` requests decode, and nobody else does anything."""
        return StepShape.of(decodes=batch, decode_context_tokens=math.ceil(batch * self.context))

    def even(self, batch: int) -> StepShape:
        """The same with the prompt tokens that are due in a step, were they due in each."""
        prompts = batch / self.output
        return self._beside(self.decodes(batch), prompts, math.ceil(prompts * self.computed))

    def chunked(self, batch: int, tokens: int) -> StepShape:
        """The same with a chunk of one prompt."""
        return self._beside(self.decodes(batch), tokens / self.computed, tokens)

    def _beside(self, decodes: StepShape, prompts: float, tokens: int) -> StepShape:
        if not tokens:
            return decodes
        chunks = math.ceil(prompts)
        # Whole prompts where more than one is due, else a chunk that reads half of its prompt on
        # average.
        reads = prompts * self.prompt if prompts >= 1 else (self.prompt + tokens) / 2
        return decodes._replace(
            num_requests=decodes.num_requests + chunks,
            num_tokens=decodes.num_tokens + tokens,
            context_tokens=decodes.context_tokens + math.ceil(reads),
            max_chunk_tokens=max(1, math.ceil(tokens / chunks)),
            prefill_squares=math.ceil(prompts * self.squares),
        )


def carried(
    device: DeviceCapacity, mix: LengthMix, *, tpot_ns: int, max_num_seqs: int, max_tokens: int
) -> Carried | None:
    """What one replica carries of a mix.

    Args:
        device: its steps and its memory.
        mix: lengths that were seen.
        tpot_ns: the time that a step may take.
        max_num_seqs: requests that may run at once.
        max_tokens: tokens that a step may compute.

    Returns:
        None: nothing was seen.

    Source: Little's law on the batch; the step that decodes and prefills together is that of
    Agrawal et al., "Sarathi-Serve", OSDI 2024.
    """
    means = _means(mix)
    if means is None:
        return None
    room = max(1, int(device.kv_tokens * _KV_IN_USE / max(1.0, means.context)))
    most = min(max_num_seqs, room)
    engine = _Engine(device=device, means=means, tpot_ns=tpot_ns, max_tokens=max_tokens)
    batch = engine.largest_batch(most)
    alone = StepShape.of(decodes=1, decode_context_tokens=math.ceil(means.context))
    feasible = device.step_ns(alone) <= tpot_ns
    if batch:
        request_ns = engine.request_ns(batch)
        beside = means.even(batch)
    elif feasible:
        # So many prompt tokens come with each decoded one that not even one request decodes in
        # every step: prompts are what takes the time.
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
        beside = means.even(most)
        request_ns = device.step_ns(beside) * means.output / most
    return Carried(
        device_s=request_ns / NS_PER_S,
        spread=_spread(device, mix, beside),
        batch=batch,
        feasible=feasible,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """How an engine mixes prompts and decodes."""

    device: DeviceCapacity
    means: _Means
    tpot_ns: int
    max_tokens: int

    def largest_batch(self, most: int) -> int:
        """The largest batch, up to `most`, whose steps are in time on average; 0: none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            step_ns = self.request_ns(middle) * middle / self.means.output
            if step_ns <= self.tpot_ns + 0.5:  # predictions are rounded to whole nanoseconds
                low = middle
            else:
                high = middle - 1
        return low

    def request_ns(self, batch: int) -> float:
        """What one request takes of a device on which `batch` requests decode.

        A prompt is not spread over all the steps that there are until the next one comes: engines
        compute it at once, in chunks as large as the tightest time per token and the budget
        allow. So what steps without a prompt leave of the device's arithmetic is lost.
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
            # Each step has prompts, and may need more of them than a step may take.
            even = means.even(batch)
            late = 1.0 if even.num_tokens <= self.max_tokens else math.inf
            return late * steps * device.step_ns(even)
        chunked_ns = device.step_ns(means.chunked(batch, tokens))
        return (steps - chunks) * alone_ns + chunks * chunked_ns

    def _chunk(self, decodes: StepShape) -> int:
        device = self.device
        host_ns = device.host_ns_per_step + device.host_ns_per_request * (decodes.num_requests + 1)
        most = min(self.max_tokens - decodes.num_decodes, math.ceil(self.means.computed))
        tokens = largest_prefill(
            device.form,
            beside=decodes,
            target_ns=self.tpot_ns - host_ns,
            most_tokens=max(0, most),
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
        context += b.output_tokens * (b.input_tokens + b.output_tokens / 2) / b.requests
    return _Means(
        prompt=prompt / requests,
        computed=computed / requests,
        output=output / requests,
        squares=squares / requests,
        context=max(1.0, context / output),
    )


def _spread(device: DeviceCapacity, mix: LengthMix, beside: StepShape) -> float:
    """From what one more prompt token, and one more decode, add to the step at hand."""
    base_ns = device.step_ns(beside)
    more = 256
    prompt_ns = (device.step_ns(beside.with_chunk(0, more)) - base_ns) / more
    token_ns = base_ns / max(1, beside.num_requests)
    total = squared = 0.0
    for b in mix.bins:
        cost = (b.input_tokens - b.cached_tokens) * prompt_ns + b.output_tokens * token_ns
        total += cost
        squared += cost * cost / b.requests
    return max(1.0, squared * mix.requests / (total * total)) if total else 1.0
