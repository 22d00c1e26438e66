"""A load without a trace: a rate, a duration and token counts become a synthetic trace.

The trace is written to a temporary file, so that it is replayed like any other. It is a function of
the options and the seed: every draw comes from `random.Random(seed).random()`, whose sequence
Python guarantees. Argument parsers load this module, so it imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat
from random import Random
from typing import TYPE_CHECKING, Final

from goodput_core.errors import UsageError
from goodput_core.units import NS_PER_S
from goodput_traces.format.schema import MAX_TOKENS, Clock, TraceMetadata, TraceRow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "LOAD",
    "Lengths",
    "LoadArrivals",
    "Spacing",
    "StatedLoad",
    "parse_lengths",
    "parse_rate",
    "parse_spacing",
]

LOAD: Final = "load"
"""Name of the trace."""

# Part of the digest; raise it with every change of the rows.
_VERSION: Final = 1
_MAX_REQUESTS: Final = 10_000_000
_RATE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)/(s|m|h)", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_ARRIVALS: Final = re.compile(r"gamma:(\d{1,2}(?:\.\d{1,3})?)", re.ASCII)
_MAX_CV: Final = 10
_LENGTHS: Final = re.compile(r"(\d{1,8})(?:~(\d{1,3})%)?", re.ASCII)
_MAX_SPREAD: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Spacing:
    """Gamma-distributed times between arrivals.

    Args:
        text: the distribution as the user wrote it.
        cv: coefficient of variation; 1 for a Poisson process, 0 for equal distances.
    """

    text: str
    cv: float

    def draw(self, rng: Random, mean_s: float) -> float:
        """Draw a time between two arrivals."""
        if self.cv == 0:
            return mean_s
        shape = self.cv**-2
        return mean_s / shape * _draw_gamma(rng, shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadArrivals:
    """An arrival process.

    Args:
        rate_per_s: mean arrivals per second.
        duration_ns: span of the arrivals.
        spacing: distribution of the times between arrivals.

    Raises:
        UsageError: more than ten million requests arrive on average.
    """

    rate_per_s: Fraction
    duration_ns: int
    spacing: Spacing

    def __post_init__(self) -> None:
        expected = self.rate_per_s * self.duration_ns / NS_PER_S
        if expected > _MAX_REQUESTS:
            raise UsageError(
                f"--rate and --duration: {int(expected):,} requests are too many; at most "
                f"{_MAX_REQUESTS:,}"
            )

    def draw(self, rng: Random) -> Iterator[int]:
        """Yield the arrivals in nanoseconds, in order."""
        mean_s, end_s, at_s = float(1 / self.rate_per_s), self.duration_ns / NS_PER_S, 0.0
        while (at_s := at_s + self.spacing.draw(rng, mean_s)) < end_s:
            yield int(at_s * NS_PER_S)

    def __str__(self) -> str:
        rate, duration_s = float(self.rate_per_s), self.duration_ns / NS_PER_S
        return f"--rate {rate:.12g}/s --duration {duration_s:.12g}s --arrivals {self.spacing.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Log-normal token counts.

    Args:
        text: the distribution as the user wrote it.
        mean: mean, tokens.
        cv: standard deviation divided by the mean; 0 for a fixed count.
    """

    text: str
    mean: int
    cv: float

    def draw(self, rng: Random) -> int:
        """Draw a token count, at least 1."""
        if self.cv == 0:
            return self.mean
        variance = math.log1p(self.cv**2)
        tokens = self.mean * math.exp(math.sqrt(variance) * _draw_normal(rng) - variance / 2)
        return min(MAX_TOKENS, max(1, round(tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLoad:
    """A synthetic load.

    Args:
        arrivals: arrivals of the requests, or their number if clients send them in a closed loop.
        input_tokens: distribution of the prompt lengths.
        output_tokens: distribution of the output lengths.
        seed: seed of all draws.
    """

    arrivals: LoadArrivals | int
    input_tokens: Lengths
    output_tokens: Lengths
    seed: int

    @property
    def description(self) -> str:
        """The options that make this load."""
        arrivals = self.arrivals
        return (
            f"{f'--limit {arrivals}' if isinstance(arrivals, int) else arrivals} "
            f"--input-tokens {self.input_tokens.text} "
            f"--output-tokens {self.output_tokens.text} --seed {self.seed}"
        )

    @property
    def digest(self) -> str:
        """Digest of the load; equal loads have equal rows."""
        text = f"load {_VERSION} {self.description}"
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def rows(self) -> Iterator[TraceRow]:
        """Yield the requests in order of arrival."""
        rng = Random(self.seed)
        arrivals = self.arrivals
        times = repeat(0, arrivals) if isinstance(arrivals, int) else arrivals.draw(rng)
        for number, at_ns in enumerate(times, start=1):
            yield TraceRow(
                request_id=f"{LOAD}-{number:06d}",
                timestamp_start_unix_ns=at_ns,
                input_tokens=self.input_tokens.draw(rng),
                output_tokens=self.output_tokens.draw(rng),
            )

    def write(self, folder: Path) -> Path:
        """Write the load as a trace into a folder, and return its path.

        Raises:
            UsageError: no request arrives.
            OSError: the disk is full.
        """
        from goodput_traces.format.writer import write_trace  # noqa: PLC0415 - loads pyarrow

        path = folder / f"{LOAD}.parquet"
        metadata = TraceMetadata(
            source=f"synthetic, made by: replay {self.description}",
            clock=Clock.TRACE_RELATIVE,
            timestamp_resolution_ns=1,
        )
        if not write_trace(path, self.rows(), metadata):
            raise UsageError(f"no request arrives with {self.description}; raise --duration")
        return path


def parse_rate(text: str) -> Fraction:
    """Parse a rate such as `5/s`, `90/m` or `1000/h`; returns requests per second.

    Raises:
        ValueError: the text is not a rate above 0.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or not Fraction(match[1]):
        raise ValueError(f"{text!r} is not a rate; write for example 5/s, 90/m or 1000/h")
    return Fraction(match[1]) / _SECONDS[match[2]]


def parse_spacing(text: str) -> Spacing:
    """Parse `poisson`, `constant` or `gamma:CV`, CV being the coefficient of variation.

    Raises:
        ValueError: the text is anything else, or CV is not above 0 and at most 10.
    """
    if text in {"poisson", "constant"}:
        return Spacing(text=text, cv=1.0 if text == "poisson" else 0.0)
    match = _ARRIVALS.fullmatch(text)
    if match is None or not 0 < float(match[1]) <= _MAX_CV:
        raise ValueError(
            f"{text!r} are not arrivals; write poisson, constant or gamma:CV, where CV is above 0 "
            f"and at most {_MAX_CV}, such as gamma:2"
        )
    return Spacing(text=text, cv=float(match[1]))


def parse_lengths(text: str) -> Lengths:
    """Parse a token count such as `500`, or `500~30%` for a standard deviation of 30 %.

    Raises:
        ValueError: the text is not a token count of at least 1, or its spread exceeds 300 %.
    """
    match = _LENGTHS.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) <= MAX_TOKENS or int(match[2] or 0) > _MAX_SPREAD:
        raise ValueError(
            f"{text!r} is not a token count; write for example 500, or 500~30% for counts with a "
            f"standard deviation of 30% (at most {_MAX_SPREAD}%)"
        )
    return Lengths(text=match[0], mean=int(match[1]), cv=int(match[2] or 0) / 100)


def _draw_normal(rng: Random) -> float:
    """Draw a standard normal number by the Box-Muller transform, from two uniform draws."""
    radius = math.sqrt(-2.0 * math.log(1.0 - rng.random()))
    return radius * math.cos(2.0 * math.pi * rng.random())


def _draw_gamma(rng: Random, shape: float) -> float:
    """Draw a gamma number with the scale 1.

    Source: Marsaglia and Tsang, "A simple method for generating gamma variables", ACM Transactions
    on Mathematical Software 26, 2000.
    """
    if shape == 1:
        return -math.log(1.0 - rng.random())
    if shape < 1:
        return _draw_gamma(rng, shape + 1) * math.pow(1.0 - rng.random(), 1 / shape)
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x = _draw_normal(rng)
        v = (1 + c * x) ** 3
        if v > 0 and math.log(1.0 - rng.random()) < x * x / 2 + d * (1 - v + math.log(v)):
            return d * v
