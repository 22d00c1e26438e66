"""What one replica can carry of a mix of lengths, predicted from the time of its steps.

An idle replica shows nothing of what it could carry, so capacity is computed, not observed: in
the steady state a step decodes one token for each of B requests and computes the prompt tokens
that the mix brings for each decoded one. The largest B whose step keeps the tightest time per
token, and that slots and memory hold, gives the highest rate. It must not know how many replicas
there are or what was measured of promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.steptime import StepShape, largest_prefill
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from goodput_core.control.lengths import LengthMix
    from goodput_core.control.observation import DeviceCapacity

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

    def step(self, batch: int) -> StepShape:
        """The steady state's step, in which `batch` requests decode."""
        prompts = batch / self.output
        tokens = math.ceil(prompts * self.computed)
        # One prompt after the other: whole ones where more than one is due in a step, else a
        # chunk that reads half of its prompt on average.
        reads = prompts * self.prompt if prompts >= 1 else (self.prompt + tokens) / 2
        chunks = math.ceil(prompts) if tokens else 0
        reads = math.ceil(reads) if tokens else 0
        context = math.ceil(batch * self.context)
        return StepShape(
            num_requests=batch + chunks,
            num_tokens=batch + tokens,
            context_tokens=context + reads,
            max_chunk_tokens=max(1, math.ceil(tokens / chunks)) if chunks else 1,
            num_decodes=batch,
            decode_context_tokens=context,
            prefill_squares=math.ceil(prompts * self.squares),
        )


def carried(
    device: DeviceCapacity, mix: LengthMix, *, tpot_ns: int, max_num_seqs: int
) -> Carried | None:
    """What one replica carries of a mix.

    Args:
        device: its steps and its memory.
        mix: lengths that were seen.
        tpot_ns: the time that a step may take.
        max_num_seqs: requests that may run at once.

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
    batch = _largest(device, means, tpot_ns, most)
    alone = StepShape.of(decodes=1, decode_context_tokens=math.ceil(means.context))
    feasible = device.step_ns(alone) <= tpot_ns
    if batch:
        step_ns = device.step_ns(means.step(batch))
        request_ns = step_ns * means.output / batch
        beside = means.step(batch)
    elif feasible:
        # So many prompt tokens come with each decoded one that not even one request decodes in
        # every step: prompts are what takes the time.
        host_ns = device.host_ns_per_step + 2 * device.host_ns_per_request
        tokens = largest_prefill(
            device.form,
            beside=alone,
            target_ns=tpot_ns - host_ns,
            most_tokens=math.ceil(means.computed),
        )
        tokens = max(1, tokens)
        beside = alone.with_chunk(0, tokens)
        request_ns = device.step_ns(beside) * means.computed / tokens
    else:
        beside = means.step(most)
        request_ns = device.step_ns(beside) * means.output / most
    return Carried(
        device_s=request_ns / NS_PER_S,
        spread=_spread(device, mix, beside),
        batch=batch,
        feasible=feasible,
    )


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


def _largest(device: DeviceCapacity, means: _Means, within_ns: int, most: int) -> int:
    """The largest batch, up to `most`, whose step is in time; 0: none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if device.step_ns(means.step(middle)) <= within_ns:
            low = middle
        else:
            high = middle - 1
    return low


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
