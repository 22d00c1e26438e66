"""Demanded device time, and the requests that one replica sustains.

The device time of a request is predicted, because an idle replica does not show its capacity. In
the steady state each step decodes one token for each of B requests, and prompts are computed in
chunks as large as an engine makes them. The highest rate results from the largest B whose steps
meet the tightest TPOT and whose requests fit into the batch width and the KV memory.

Demand is estimated from a count of arrivals, with a standard error that grows with the differences
between the requests. Decisions that take effect immediately use conservative bounds of the demand.

This module must not know the number of replicas or whether targets were met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final

from goodput_core.control.observation import DeviceCapacity
from goodput_core.histogram import LengthMix
from goodput_core.steptime import StepShape, largest_prefill
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_core.histogram import LengthBin

__all__ = [
    "LONG_NS",
    "TREND_NS",
    "ArrivalSample",
    "Demand",
    "EngineQueue",
    "ReplicaCapacity",
    "estimate_demand",
    "estimate_growth",
    "recent_lengths",
    "replica_capacity",
]

_KV_IN_USE: Final = 0.9
"""Share of a full KV cache that contains tokens on average: the last block of a request is rarely
full."""
_LATEST_NS: Final = 20 * NS_PER_S
_SHORT_NS: Final = 60 * NS_PER_S
LONG_NS: Final = 300 * NS_PER_S
_ERRORS_TO_BOUND: Final = 2.0
"""Standard errors between an estimated rate and its conservative bound."""
_ERRORS_OF_A_STEP: Final = 4.0
"""The same for the latest seconds and for a trend, which are estimated again in each interval."""
_SPANS: Final = 4
"""The demand must grow from each of the last four spans to the next."""
_MIN_SPAN_NS: Final = 30 * NS_PER_S
_SPANS_NS: Final = (75 * NS_PER_S, 150 * NS_PER_S)
"""Longer spans, which find a ramp that is slow or has few requests."""
TREND_NS: Final = _SPANS * _SPANS_NS[-1]
"""Minimum time for which samples are kept."""
_SLOPE_WEIGHTS: Final = (-0.3, -0.1, 0.1, 0.3)
"""Weights of four equally spaced values in the slope of the line through them (least squares)."""
_MOST_RESIDUALS: Final = 6.0
"""Sum of the squared residuals of that line, in standard errors, that chance exceeds in 5 %."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSample:
    """Traffic of one interval.

    Args:
        at_ns: end of the interval.
        interval_ns: length of the interval.
        requests: arrivals.
        finished: lengths of the requests that finished.
    """

    at_ns: int
    interval_ns: int
    requests: int
    finished: LengthMix


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Demanded device seconds per second.

    Args:
        lower: the largest of the lower bounds over twenty seconds, one minute and five.
        likely: the larger of the means over one minute and over five.
        latest, steady: the means over one minute and over five.
        risen: the mean over twenty seconds if the demand has just made a step up, otherwise
            `likely`; at least `likely`.
        sustained: lower bound over five minutes.
        upper: the larger of the upper bounds over one minute and over five.
    """

    lower: float
    likely: float
    latest: float
    steady: float
    risen: float
    sustained: float
    upper: float


def estimate_demand(
    samples: Sequence[ArrivalSample], capacity: ReplicaCapacity, now_ns: int
) -> Demand:
    """Estimate the current demand; 0 without arrivals."""
    latest, latest_error = _measure_rate(samples, capacity, now_ns - _LATEST_NS, now_ns)
    short, short_error = _measure_rate(samples, capacity, now_ns - _SHORT_NS, now_ns)
    long, long_error = _measure_rate(samples, capacity, now_ns - LONG_NS, now_ns)
    sustained = max(0.0, long - _ERRORS_TO_BOUND * long_error)
    lowest = latest - _ERRORS_OF_A_STEP * latest_error
    likely = max(short, long)
    return Demand(
        lower=max(sustained, short - _ERRORS_TO_BOUND * short_error, lowest),
        likely=likely,
        latest=short,
        steady=long,
        risen=max(likely, latest) if lowest > short else likely,
        sustained=sustained,
        upper=max(short + _ERRORS_TO_BOUND * short_error, long + _ERRORS_TO_BOUND * long_error),
    )


def estimate_growth(
    samples: Sequence[ArrivalSample], capacity: ReplicaCapacity, now_ns: int, horizon_ns: int
) -> float:
    """Estimate the growth of the demand until the horizon has passed; 0 without a clear trend.

    The time before is divided into four spans. The demand must grow from each span to the next by
    more than a standard error: a ramp grows in all three transitions, a sudden step in at most two.
    The four must be near a line whose slope exceeds chance. Spans of half a horizon find a steep
    ramp soonest, longer ones find a ramp of few requests.
    """
    if not samples:
        return 0.0
    # A span that contains no end of an interval would look like a pause.
    shortest_ns = max(horizon_ns // 2, _MIN_SPAN_NS, *(s.interval_ns for s in samples))
    spans_ns = {shortest_ns, 2 * shortest_ns, *(s for s in _SPANS_NS if s > shortest_ns)}
    growth = max(_growth_per_ns(samples, capacity, now_ns, span_ns) for span_ns in spans_ns)
    return growth * (horizon_ns + _SHORT_NS / 2)  # from the middle of the last minute


def _growth_per_ns(
    samples: Sequence[ArrivalSample], capacity: ReplicaCapacity, now_ns: int, span_ns: int
) -> float:
    """Return the least growth from one of four spans to the next; 0 without a clear trend."""
    if samples[0].at_ns - samples[0].interval_ns > now_ns - _SPANS * span_ns:
        return 0.0
    # A span without arrivals is as uncertain as one with a single arrival.
    least_error = capacity.device_s * math.sqrt(capacity.spread) * NS_PER_S / span_ns
    rates: list[float] = []
    errors: list[float] = []
    for span in range(_SPANS, 0, -1):
        end_ns = now_ns - (span - 1) * span_ns
        rate, error = _measure_rate(samples, capacity, end_ns - span_ns, end_ns)
        rates.append(rate)
        errors.append(max(error, least_error))
    growths = [after - before for before, after in pairwise(rates)]
    if any(g <= math.hypot(*both) for g, both in zip(growths, pairwise(errors), strict=True)):
        return 0.0
    slope = sum(w * rate for w, rate in zip(_SLOPE_WEIGHTS, rates, strict=True))
    slope_error = math.hypot(*(w * e for w, e in zip(_SLOPE_WEIGHTS, errors, strict=True)))
    middle = sum(rates) / _SPANS - slope * (_SPANS - 1) / 2
    residuals = [
        (rate - middle - slope * i) / error
        for i, (rate, error) in enumerate(zip(rates, errors, strict=True))
    ]
    is_line = sum(r * r for r in residuals) <= _MOST_RESIDUALS
    is_clear = is_line and slope > _ERRORS_OF_A_STEP * slope_error
    return min(growths) / span_ns if is_clear else 0.0


def recent_lengths(samples: Sequence[ArrivalSample], now_ns: int) -> LengthMix:
    """Return the lengths of the requests that finished in the last five minutes."""
    recent = (s.finished.bins for s in samples if s.at_ns > now_ns - LONG_NS)
    return LengthMix.of(chain.from_iterable(recent))


def _measure_rate(
    samples: Sequence[ArrivalSample], capacity: ReplicaCapacity, begin_ns: int, end_ns: int
) -> tuple[float, float]:
    """Return the demanded device seconds per second in (begin, end], and the standard error."""
    inside = [s for s in samples if begin_ns < s.at_ns <= end_ns]
    seconds = sum(s.interval_ns for s in inside) / NS_PER_S
    requests = sum(s.requests for s in inside)
    if not requests:
        return 0.0, 0.0
    mean = requests * capacity.device_s / seconds
    return mean, mean * math.sqrt(capacity.spread / requests)
