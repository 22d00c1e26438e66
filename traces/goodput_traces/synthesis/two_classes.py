"""Generate a synthetic trace with bursts, two classes, shared prefixes and sessions from a seed.

The trace is for demonstrations and tests without a production trace. Its metadata labels it as
synthetic, because results on a synthetic trace are no evidence for real traffic.

The model:

* **Arrivals** are a Poisson process whose rate switches between a base rate and a burst rate.
  Times between bursts are exponential with a mean of 10 s, durations of bursts with a mean of
  2 s. The mean rate is the requested rate.
* **Classes**: `interactive` and `batch`; prompt and output lengths are lognormal and bounded.
* **Prefixes**: every prompt starts with one of a few system prompts, some more popular than
  others. Hashes cover full blocks of 64 tokens.
* **Sessions**: an interactive request continues an earlier conversation with a given
  probability. Its prompt consists of the earlier prompt, the earlier output, and new tokens.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from goodput_core.units import NS_PER_S
from goodput_traces.format.schema import Clock, HashSemantics, TraceMetadata, TraceRow
from goodput_traces.synthesis.draws import draw_exponential, draw_normal

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SynthesisOptions", "synthesize", "synthetic_metadata"]

_BLOCK: Final = 64
_BASE_S: Final = 10.0
_BURST_S: Final = 2.0
_MAX_PROMPT: Final = 4000
_MAX_OUTPUT: Final = 250
_THINK_S: Final = 4.0  # minimum time between turns of a conversation
_OPEN_SESSIONS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisOptions:
    """Options of a synthetic trace.

    Args:
        seed: seed of the random numbers; equal options, including the seed, give equal traces.
        duration_ns: time span of the arrivals, nanoseconds.
        rate_per_s: mean requests per second.
        burst_factor: ratio of the burst rate to the base rate; 1 for no bursts.
        batch_share: share of requests of class `batch`, 0 to 1.
        session_share: probability that an interactive request continues a conversation.
    """

    seed: int = 0
    duration_ns: int = 60 * NS_PER_S
    rate_per_s: float = 5.0
    burst_factor: float = 4.0
    batch_share: float = 0.2
    session_share: float = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class _LengthDistribution:
    """Bounded lognormal distribution of lengths in tokens; `sigma` is that of the logarithm."""

    median: float
    sigma: float
    min_tokens: int
    max_tokens: int

    def draw(self, rng: Random) -> int:
        tokens = round(self.median * math.exp(self.sigma * draw_normal(rng)))
        return min(self.max_tokens, max(self.min_tokens, tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Class:
    name: str
    tail: _LengthDistribution  # tokens after the system prompt or the history
    output: _LengthDistribution
    max_output_tokens: int
    system_blocks: tuple[int, ...]  # length of each system prompt, the most popular first


_INTERACTIVE: Final = _Class(
    name="interactive",
    tail=_LengthDistribution(median=90, sigma=0.9, min_tokens=8, max_tokens=2000),
    output=_LengthDistribution(median=58, sigma=0.55, min_tokens=4, max_tokens=_MAX_OUTPUT),
    max_output_tokens=256,
    system_blocks=(2, 3, 4, 6),
)
_BATCH: Final = _Class(
    name="batch",
    tail=_LengthDistribution(median=1000, sigma=0.6, min_tokens=100, max_tokens=3200),
    output=_LengthDistribution(median=75, sigma=0.5, min_tokens=16, max_tokens=_MAX_OUTPUT),
    max_output_tokens=512,
    system_blocks=(8, 12),
)


def synthetic_metadata(command: str) -> TraceMetadata:
    """Return metadata that labels a trace as synthetic and contains the command that made it.

    Args:
        command: the command line that reproduces the trace.
    """
    return TraceMetadata(
        source=f"synthetic, made by: {command}",
        licence="Apache-2.0",
        clock=Clock.TRACE_RELATIVE,
        timestamp_resolution_ns=1,
        hash_semantics=HashSemantics.FULL_BLOCKS,
    )


def synthesize(options: SynthesisOptions) -> Iterator[TraceRow]:
    """Generate the rows in order of arrival; the clock starts at 0."""
    rng = Random(options.seed)
    blocks = _Blocks()
    conversations = _Conversations(options.session_share, blocks)
    for number, arrival_ns in enumerate(_draw_arrivals(rng, options), start=1):
        request_id = f"synthetic-{number:06d}"
        if rng.random() < options.batch_share:
            yield _draw_first_turn(rng, _BATCH, request_id, arrival_ns, blocks, session=None)
        else:
            yield conversations.draw_turn(rng, request_id, arrival_ns)


def _draw_arrivals(rng: Random, options: SynthesisOptions) -> Iterator[int]:
    """Yield arrival times in nanoseconds.

    Arrivals are drawn at the burst rate. Outside bursts, each is kept with the probability
    1 / `burst_factor`.
    """
    burst_share = _BURST_S / (_BURST_S + _BASE_S)
    base_rate = options.rate_per_s / (1 + burst_share * (options.burst_factor - 1))
    burst_rate = base_rate * options.burst_factor
    now_s, in_burst = 0.0, False
    switch_s = draw_exponential(rng, _BASE_S)
    end_s = options.duration_ns / NS_PER_S
    last_ns = -1
    while True:
        now_s += draw_exponential(rng, 1 / burst_rate)
        if now_s >= end_s:
            return
        while switch_s <= now_s:
            in_burst = not in_burst
            switch_s += draw_exponential(rng, _BURST_S if in_burst else _BASE_S)
        if in_burst or rng.random() < 1 / options.burst_factor:
            last_ns = max(last_ns + 1, int(now_s * NS_PER_S))
            yield last_ns


class _Blocks:
    """Allocate consecutive numbers as block hashes, because random numbers do not compress."""

    def __init__(self) -> None:
        self._next = 1
        self._systems: dict[tuple[str, int], tuple[int, ...]] = {}

    def allocate(self, count: int) -> tuple[int, ...]:
        start = self._next
        self._next += count
        return tuple(range(start, self._next))

    def system_prompt(self, kind: _Class, index: int) -> tuple[int, ...]:
        key = (kind.name, index)
        if key not in self._systems:
            self._systems[key] = self.allocate(kind.system_blocks[index])
        return self._systems[key]


class _Conversations:
    """A limited number of open interactive sessions: a new session replaces the oldest one."""

    def __init__(self, share: float, blocks: _Blocks) -> None:
        self._share = share
        self._blocks = blocks
        self._open: deque[TraceRow] = deque(maxlen=_OPEN_SESSIONS)
        self._sessions = 0

    def draw_turn(self, rng: Random, request_id: str, arrival_ns: int) -> TraceRow:
        ready = [
            row
            for row in self._open
            if arrival_ns - row.timestamp_start_unix_ns >= _THINK_S * NS_PER_S
        ]
        if ready and rng.random() < self._share:
            last = ready[int(rng.random() * len(ready))]
            self._open.remove(last)
            row = self._draw_next_turn(rng, request_id, arrival_ns, last)
            if row is not None:
                self._open.append(row)
                return row
        self._sessions += 1
        row = _draw_first_turn(
            rng,
            _INTERACTIVE,
            request_id,
            arrival_ns,
            self._blocks,
            session=f"conversation-{self._sessions:05d}",
        )
        self._open.append(row)
        return row

    def _draw_next_turn(
        self, rng: Random, request_id: str, arrival_ns: int, last: TraceRow
    ) -> TraceRow | None:
        history = last.input_tokens + last.output_tokens
        prompt = history + _INTERACTIVE.tail.draw(rng)
        if prompt > _MAX_PROMPT:
            return None  # the conversation would exceed the context length
        return _make_row(
            rng,
            _INTERACTIVE,
            self._blocks,
            prompt=prompt,
            prefix=last.total_hashes,
            request_id=request_id,
            timestamp_start_unix_ns=arrival_ns,
            provided_session_id=last.provided_session_id,
            turn=(last.turn or 0) + 1,
            parent_request_id=last.request_id,
        )


def _draw_first_turn(
    rng: Random,
    kind: _Class,
    request_id: str,
    arrival_ns: int,
    blocks: _Blocks,
    *,
    session: str | None,
) -> TraceRow:
    # Squaring skews the draw towards the first system prompts, the popular ones.
    index = int(rng.random() ** 2 * len(kind.system_blocks))
    system = blocks.system_prompt(kind, index)
    return _make_row(
        rng,
        kind,
        blocks,
        prompt=min(_MAX_PROMPT, len(system) * _BLOCK + kind.tail.draw(rng)),
        prefix=system,
        request_id=request_id,
        timestamp_start_unix_ns=arrival_ns,
        provided_session_id=session,
        turn=None if session is None else 0,
    )


def _make_row(
    rng: Random,
    kind: _Class,
    blocks: _Blocks,
    *,
    prompt: int,
    prefix: tuple[int, ...],
    **fields: Any,
) -> TraceRow:
    """Draw the output of a request, and allocate hashes of the prompt's blocks after the prefix."""
    return TraceRow(
        input_tokens=prompt,
        output_tokens=kind.output.draw(rng),
        max_output_tokens=kind.max_output_tokens,
        total_hashes=prefix + blocks.allocate(prompt // _BLOCK - len(prefix)),
        block_size=_BLOCK,
        slo_class=kind.name,
        **fields,
    )
