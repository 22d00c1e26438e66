"""Loads of the comparison of policies, as plain frozen values.

A *mix* is a set of kinds of requests with their lengths, targets and importance. A *load* is a mix
with an arrival process and a rate; a seed turns it into requests. Everything is drawn from one
`random.Random(seed)`, so the same load and seed give the same requests in every process. This
module knows neither policies nor devices.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_traces.format.reader import open_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "MIXES",
    "Arrivals",
    "Kind",
    "Load",
    "Mix",
    "OfferedRequest",
    "Range",
    "TraceWindow",
    "long_slack_s",
    "offered",
    "slack_ns",
]


class Arrivals(StrEnum):
    """Arrival processes, all with the mean rate of their load."""

    EVEN = "even"
    """Evenly spaced."""
    POISSON = "poisson"
    GAMMA = "gamma"
    """Independent gaps with a Gamma distribution and a coefficient of variation of 3."""
    ON_OFF = "on-off"
    """Poisson at three times the rate for a third of each period, and silence for the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedRequest:
    """A request that a client sends.

    Args:
        arrival_ns: arrival time.
        prompt_tokens: length of the prompt.
        output_tokens: true length of the output, which only the device knows.
        max_tokens: the client's limit, which the engine knows; None for the model's limit.
        slo_class: name of the class.
        priority: priority level; a request of a higher level outweighs all of lower ones.
        weight: weight within the level.
        targets: all targets of the request.
        hashes: prefix hashes, one per block of the trace; empty if no prefix is shared.
        block_size: tokens per hash.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None
    slo_class: str
    priority: int = 0
    weight: int = 1
    targets: Targets
    hashes: Sequence[int] = ()
    block_size: int = 0

    @property
    def slack_ns(self) -> int | None:
        """Longest time from arrival to the last token with which all targets are met.

        None if no target limits it.
        """
        return slack_ns(self.targets, self.output_tokens)


def slack_ns(targets: Targets, output_tokens: int) -> int | None:
    """Return the longest time from arrival to the last token with which all targets are met.

    None if no target limits it.
    """
    limits = [] if targets.e2e_ns is None else [targets.e2e_ns]
    if targets.ttft_ns is not None and (output_tokens == 1 or targets.tpot_ns is not None):
        limits.append(targets.ttft_ns + (output_tokens - 1) * (targets.tpot_ns or 0))
    return min(limits, default=None)


@dataclass(frozen=True, slots=True)
class Range:
    """Uniformly distributed whole numbers, from `low` to `high` inclusive."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """Draw a number."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of requests.

    Args:
        share: share of the requests of the mix.
        prompt, output: lengths in tokens.
        slo_class: name of the class.
        priority, weight: importance; see `OfferedRequest`.
        ttft_ms, tpot_ms: targets; None for none.
        slack_ms: distribution of the end-to-end target; None for none.
    """

    share: float
    prompt: Range
    output: Range
    slo_class: str = "all"
    priority: int = 0
    weight: int = 1
    ttft_ms: int | None = None
    tpot_ms: int | None = None
    slack_ms: Range | None = None

    @property
    def longest_slack_s(self) -> float:
        """Longest slack of a request of this kind."""
        e2e_ms = None if self.slack_ms is None else self.slack_ms.high
        longest_ns = slack_ns(self._targets(e2e_ms), self.output.high)
        assert longest_ns is not None, "the targets of a kind limit the time of its requests"
        return longest_ns / NS_PER_S

    def draw(self, rng: random.Random, arrival_ns: int) -> OfferedRequest:
        """Draw a request with a known length: its limit is its output length."""
        prompt, output = self.prompt.draw(rng), self.output.draw(rng)
        e2e_ms = None if self.slack_ms is None else self.slack_ms.draw(rng)
        return OfferedRequest(
            arrival_ns=arrival_ns,
            prompt_tokens=prompt,
            output_tokens=output,
            max_tokens=output,
            slo_class=self.slo_class,
            priority=self.priority,
            weight=self.weight,
            targets=self._targets(e2e_ms),
        )

    def _targets(self, e2e_ms: int | None) -> Targets:
        return Targets(
            ttft_ns=None if self.ttft_ms is None else self.ttft_ms * NS_PER_MS,
            tpot_ns=None if self.tpot_ms is None else self.tpot_ms * NS_PER_MS,
            e2e_ns=None if e2e_ms is None else e2e_ms * NS_PER_MS,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Kinds of requests.

    Args:
        name: name of the mix.
        kinds: the kinds; their shares sum to 1.
    """

    name: str
    kinds: tuple[Kind, ...]

    @property
    def longest_output(self) -> int:
        """Maximum number of output tokens."""
        return max(kind.output.high for kind in self.kinds)

    @property
    def longest_slack_s(self) -> float:
        """Longest slack of a request."""
        return max(kind.longest_slack_s for kind in self.kinds)

    def pick(self, rng: random.Random) -> Kind:
        """Draw a kind."""
        at = rng.random()
        for kind in self.kinds[:-1]:
            if at < kind.share:
                return kind
            at -= kind.share
        return self.kinds[-1]


def _kind(share: float, prompt: tuple[int, int], output: tuple[int, int], **more: Any) -> Kind:
    return Kind(share=share, prompt=Range(*prompt), output=Range(*output), **more)


_SHORT: Final = _kind(0.7, (8, 40), (8, 32), slo_class="short", slack_ms=Range(31, 61))
_LONG: Final = _kind(0.3, (64, 200), (160, 320), slo_class="long", slack_ms=Range(221, 361))

# Targets are a small multiple of the times of an idle device, as in a service with real promises.
# Generous targets would need long runs: arrivals last several times as long as the longest slack.
_CHAT: Final = (_kind(1, (1024, 1024), (60, 60), ttft_ms=500, tpot_ms=50),)
_UNIFORM: Final = (_kind(1, (64, 2048), (8, 96), ttft_ms=600, tpot_ms=40),)
_BIMODAL: Final = (
    _kind(0.85, (50, 400), (20, 80), slo_class="chat", ttft_ms=400, tpot_ms=40),
    _kind(0.15, (3000, 6000), (40, 100), slo_class="document", ttft_ms=2000, tpot_ms=40),
)
# On a device with a small KV pool, the long outputs fill it.
_KV_BOUND: Final = (
    _kind(0.8, (32, 128), (8, 48), slo_class="short", ttft_ms=500, tpot_ms=40),
    _kind(0.2, (64, 192), (60, 120), slo_class="long", ttft_ms=1500, tpot_ms=40),
)
_LONG_PROMPT: Final = (
    _kind(0.75, (100, 600), (20, 100), slo_class="chat", ttft_ms=500, tpot_ms=50),
    _kind(0.25, (8000, 24_000), (20, 60), slo_class="report", ttft_ms=4000, tpot_ms=100),
)
_DEADLINE: Final = (
    _kind(0.6, (100, 800), (10, 60), slo_class="quick", slack_ms=Range(1200, 2500)),
    _kind(0.4, (500, 3000), (40, 120), slo_class="slow", slack_ms=Range(3000, 6000)),
)
_TWO_CLASSES: Final = (
    _kind(0.4, (64, 1024), (20, 80), slo_class="interactive", priority=1, ttft_ms=500, tpot_ms=40),
    _kind(0.6, (256, 3000), (20, 70), slo_class="batch", ttft_ms=3000, tpot_ms=50),
)
_THREE_CLASSES: Final = (
    _kind(0.25, (32, 512), (10, 60), slo_class="voice", priority=1, ttft_ms=300, tpot_ms=30),
    _kind(0.45, (64, 1500), (20, 70), slo_class="chat", weight=3, ttft_ms=800, tpot_ms=50),
    _kind(0.3, (500, 5000), (20, 70), slo_class="batch", ttft_ms=3000, tpot_ms=50),
)
MIXES: Final = {
    mix.name: mix
    for mix in (
        Mix(name="chat", kinds=_CHAT),
        # The same requests for a smaller model, on which many more of them run at a time.
        Mix(name="chat-8b", kinds=_CHAT),
        Mix(name="uniform", kinds=_UNIFORM),
        Mix(name="bimodal", kinds=_BIMODAL),
        Mix(name="kv-bound", kinds=_KV_BOUND),
        Mix(name="long-prompt", kinds=_LONG_PROMPT),
        Mix(name="deadline", kinds=_DEADLINE),
        Mix(name="two-classes", kinds=_TWO_CLASSES),
        Mix(name="three-classes", kinds=_THREE_CLASSES),
        # The kinds of the generator of `textbook`, with any arrival process and rate.
        Mix(name="tight-deadlines", kinds=(_SHORT, _LONG)),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWindow:
    """A window of a recorded trace, at a changed rate.

    A seed determines where in the trace the window starts.

    Args:
        path: Parquet file of `goodput trace import`.
        window_s: length of the window by the clock of the trace.
        long_prompt: prompts of at least this length have the class `batch`, others the class
            `interactive`.
        interactive, batch: targets of the two classes.
    """

    path: str
    window_s: int = 600
    long_prompt: int = 2048
    interactive: Targets
    batch: Targets

    def targets(self, prompt_tokens: int) -> Targets:
        """Return the targets of a request."""
        return self.batch if prompt_tokens >= self.long_prompt else self.interactive


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of a run, but for the seed.

    Args:
        mix: name of a mix, or `textbook`; ignored with a trace.
        arrivals: arrival process; ignored with a trace.
        rate_per_s: mean rate; of a trace, at the mean rate of the complete trace.
        horizon_s: duration of the arrivals. The window of a trace is compressed to this duration,
            and the share of its requests that gives the rate is chosen at random; if all of them
            are too few, the duration is shorter.
        known_lengths: True if the limit of each request is its output length; False if the limit is
            so high that no request reaches it, which hides the lengths.
        trace: a window of a trace in place of a mix; None for a mix.
    """

    mix: str = ""
    arrivals: Arrivals = Arrivals.POISSON
    rate_per_s: float
    horizon_s: float = 10
    known_lengths: bool = True
    trace: TraceWindow | None = field(default=None)


TEXTBOOK: Final = "textbook"
TEXTBOOK_RATE_PER_S: Final = 400.0
_TEXTBOOK_SPAN_MS: Final = 200


def offered(load: Load, seed: int) -> list[OfferedRequest]:
    """Return the requests of a load, by arrival."""
    rng = random.Random(seed)
    if load.trace is not None:
        requests = _trace_requests(load.trace, load.rate_per_s, load.horizon_s, rng)
        longest = 4096
    elif load.mix == TEXTBOOK:
        requests = list(
            textbook(rng, span_ms=TEXTBOOK_RATE_PER_S / load.rate_per_s * _TEXTBOOK_SPAN_MS)
        )
        longest = 320
    else:
        mix = MIXES[load.mix]
        requests = [mix.pick(rng).draw(rng, at_ns) for at_ns in arrival_times(load, rng)]
        longest = mix.longest_output
    if load.known_lengths:
        return requests
    limit = 1 << longest.bit_length()
    return [_with_limit(request, limit) for request in requests]


def textbook(rng: random.Random, span_ms: float = _TEXTBOOK_SPAN_MS) -> Iterator[OfferedRequest]:
    """Yield 80 short and long requests with end-to-end targets, by arrival.

    For a device whose steps take 1 ms, with 120 blocks of 16 tokens, 24 slots and a budget of
    8,192 tokens: a prompt takes one step, which emits the first token.

    Args:
        rng: source of randomness.
        span_ms: last possible arrival; 200 in the published generator.
    """
    drawn = []
    for _ in range(80):
        arrival = rng.randint(0, _TEXTBOOK_SPAN_MS)
        if rng.random() < 0.7:
            kind, lengths = _SHORT, (rng.randint(8, 40), rng.randint(8, 32), rng.randint(30, 60))
        else:
            kind = _LONG
            lengths = (rng.randint(64, 200), rng.randint(160, 320), rng.randint(220, 360))
        drawn.append((arrival, kind.slo_class, *lengths))
    drawn.sort(key=lambda entry: entry[0])
    for arrival, slo_class, prompt, output, slack in drawn:
        yield OfferedRequest(
            arrival_ns=round(arrival * span_ms / _TEXTBOOK_SPAN_MS * NS_PER_MS),
            prompt_tokens=prompt,
            output_tokens=output,
            max_tokens=output,
            slo_class=slo_class,
            targets=Targets(e2e_ns=(slack + 1) * NS_PER_MS),
        )


def arrival_times(load: Load, rng: random.Random) -> Iterator[int]:
    """Yield the arrival times of a load, nanoseconds."""
    rate, process = load.rate_per_s, load.arrivals
    at_s = 0.0
    if process is Arrivals.EVEN:
        for number in range(round(rate * load.horizon_s)):
            yield round(number / rate * NS_PER_S)
        return
    # About ten bursts in a run.
    period_s = load.horizon_s / 10
    shape = 1 / 3**2
    while True:
        if process is Arrivals.GAMMA:
            at_s += rng.gammavariate(shape, 1 / (rate * shape))
        else:
            at_s += rng.expovariate(rate)
        if at_s >= load.horizon_s:
            return
        if process is Arrivals.ON_OFF:
            # Poisson arrivals, each period compressed into its first third.
            period, within_s = divmod(at_s, period_s)
            yield round((period * period_s + within_s / 3) * NS_PER_S)
        else:
            yield round(at_s * NS_PER_S)


def _with_limit(request: OfferedRequest, limit: int) -> OfferedRequest:
    return replace(request, max_tokens=max(limit, request.output_tokens))


@lru_cache(maxsize=2)
def _rows(path: str) -> tuple[tuple[int, int, int, tuple[int, ...], int], ...]:
    """Return arrival, lengths and prefix hashes of all rows of a trace."""
    trace = open_trace(path)
    return tuple(
        (
            row.timestamp_start_unix_ns - trace.first_ns,
            row.input_tokens,
            row.output_tokens,
            tuple(row.total_hashes),
            row.block_size or 0,
        )
        for row in trace.rows()
    )


@lru_cache(maxsize=2)
def long_slack_s(window: TraceWindow) -> float:
    """Return the slack that only one in twenty requests of a trace exceeds."""
    slacks = sorted(
        slack_ns(window.targets(prompt), max(1, output)) or 0
        for _, prompt, output, _, _ in _rows(window.path)
    )
    return slacks[len(slacks) * 95 // 100] / NS_PER_S


def _trace_requests(
    window: TraceWindow, rate_per_s: float, horizon_s: float, rng: random.Random
) -> list[OfferedRequest]:
    rows = _rows(window.path)
    last_ns = rows[-1][0]
    length_ns = window.window_s * NS_PER_S
    start_ns = rng.randrange(max(1, last_ns - length_ns))
    mean = len(rows) * length_ns / last_ns
    keep = min(1.0, rate_per_s * horizon_s / mean)
    speed = rate_per_s * window.window_s / (keep * mean)
    return [
        OfferedRequest(
            arrival_ns=round((at_ns - start_ns) / speed),
            prompt_tokens=prompt,
            output_tokens=max(1, output),
            max_tokens=max(1, output),
            slo_class="batch" if prompt >= window.long_prompt else "interactive",
            targets=window.targets(prompt),
            hashes=hashes,
            block_size=block_size,
        )
        for at_ns, prompt, output, hashes, block_size in rows
        if start_ns <= at_ns < start_ns + length_ns and rng.random() < keep
    ]
