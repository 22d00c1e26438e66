"""Requests as chains of stages, the common form of both bounds of `benchmarks.bounds`.

A chain begins with the prompt; each further stage is a run of decodes. A stage has a window of
time, work on each resource, and a probability that the request ends with it.

*Known lengths*: a request ends with its last stage. The decodes are cut into stages because a
decode reads more context the later it comes: each stage charges the context of its first decode.

*Hidden lengths*: stages end at the lengths at which requests of a type may end. A policy cannot
see how many tokens are left, so its decision to compute a stage is independent of whether the
request ends with it, and at most the share that survives a stage reaches the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.bound.step_bounds import Capacity

__all__ = [
    "ROUNDING_S",
    "Demand",
    "Resources",
    "Stages",
    "hidden_stages",
    "known_stages",
]

# A stage may charge this share of a request's mean context too little.
_CONTEXT_LOSS = 0.04
_MOST_RUNS = 12
# Largest ratio of the lengths within a range, and the length below which all are one range.
_RANGE = 2.0
_SHORT = 4.0
# Times are rounded to nanoseconds.
ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A request with its true length and its deadlines, in seconds.

    Args:
        arrival_s: arrival.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: length of the output, at least 1.
        ttft_s: target of the time to first token; infinite for none.
        tpot_s: target of the mean time between tokens; infinite for none.
        e2e_s: target of the time to the last token; infinite for none.
        weight: value of serving the request in time.
        reusable_tokens: prompt tokens that a prefix cache may supply; less than the prompt.
        kind: type of the request; requests of a type have lengths from one distribution.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf
    weight: float = 1
    reusable_tokens: int = 0
    kind: str = ""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a value is out of range; the message names it.
        """
        if not math.isfinite(self.arrival_s):
            raise ValueError(f"arrival_s {self.arrival_s} is not a time")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is less than 1")
        for name in ("ttft_s", "tpot_s", "e2e_s", "weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} {getattr(self, name)} is not at least 0")
        if not math.isfinite(self.weight):
            raise ValueError(f"weight {self.weight} is not finite")
        if not 0 <= self.reusable_tokens < self.prompt_tokens:
            raise ValueError(
                f"reusable_tokens {self.reusable_tokens} is not between 0 and the "
                f"{self.prompt_tokens} tokens of the prompt"
            )

    @property
    def first_due_s(self) -> float:
        """Deadline of the first token."""
        return self.arrival_s + min(self.ttft_s, self.e2e_s)

    @property
    def last_due_s(self) -> float:
        """Deadline of the last token. TPOT is a mean, so it sets no deadline of other tokens."""
        return self.due_s(self.output_tokens)

    def due_s(self, output_tokens: int) -> float:
        """Return the deadline of the last token of an output of this length."""
        if output_tokens == 1:
            return self.first_due_s
        paced_s = self.ttft_s + (output_tokens - 1) * self.tpot_s
        return self.arrival_s + min(paced_s, self.e2e_s)


class Resources:
    """The resources of an interval, each a row: work + coefficient · steps ≤ limit · length.

    Args:
        capacity: one replica.
        replicas: number of replicas.
    """

    def __init__(self, capacity: Capacity, replicas: int) -> None:
        lines = capacity.steps
        limits = (
            ("kv", capacity.kv_tokens),
            ("seqs", capacity.max_num_seqs),
            ("tokens", capacity.max_step_tokens),
        )
        self.capacity = capacity
        self.speed = replicas * capacity.overlapping
        self.finite = [name for name, limit in limits if math.isfinite(limit)]
        self.per_step = np.array(
            [line.step_s for line in lines] + [-limit for _, limit in limits if limit < math.inf]
        )
        self.limit = np.array([float(self.speed)] * len(lines) + [0.0] * len(self.finite))
        # Most steps per second on all replicas together.
        self.step_rate = self.speed / capacity.shortest_step_s

    def prompt_work(
        self, prompt: NDArray[np.float64], reused: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the work of complete prompts, shape [prompts, resources]."""
        computed = prompt - reused
        rows = [
            line.prompt_token_s * computed + line.prompt_context_s * prompt + line.prompt_s
            for line in self.capacity.steps
        ]
        limited = {"kv": computed, "seqs": np.ones(len(prompt)), "tokens": computed}
        return np.column_stack(rows + [limited[name] for name in self.finite])

    def decode_work(
        self,
        decodes: NDArray[np.float64],
        context: NDArray[np.float64],
        reused: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return the work of runs of decodes that each read at least this context."""
        rows = [
            decodes * (line.decode_s + line.decode_context_s * context)
            for line in self.capacity.steps
        ]
        limited = {"kv": decodes * (context - reused), "seqs": decodes, "tokens": decodes}
        return np.column_stack(rows + [limited[name] for name in self.finite])

    def prompt_times(
        self, prompt: NDArray[np.float64], reused: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return how long one replica takes for prompts.

        Returns:
            The shortest time of each prompt, and the shortest time over the share of it that is
            computed meanwhile.
        """
        capacity, computed = self.capacity, prompt - reused
        most = min(capacity.max_step_tokens, capacity.chunk_tokens)
        chunk = np.minimum(computed, most)
        whole, share = np.zeros(len(prompt)), np.zeros(len(prompt))
        for line in capacity.steps:
            rest = line.prompt_context_s * prompt + line.prompt_s
            tokens = line.prompt_token_s * computed + rest
            whole = np.maximum(whole, np.ceil(computed / most) * line.step_s + tokens)
            share = np.maximum(share, computed / chunk * line.step_s + tokens)
        return whole / capacity.overlapping, share / capacity.overlapping

    def decode_times(
        self, decodes: NDArray[np.float64], context: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the shortest time of runs of decodes that each read at least this context."""
        times = [
            line.step_s + line.decode_s + line.decode_context_s * context
            for line in self.capacity.steps
        ]
        shortest: NDArray[np.float64] = decodes * np.maximum.reduce(times)
        return shortest


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Stages of all chains, one array element each; a chain's stages follow each other.

    Args:
        owner: index of the chain.
        steps: steps in which the stage takes part, at least.
        work: use of each resource, shape [stages, resources].
        share_s: shortest time over the share of the stage that is computed meanwhile.
        start_s: time before which no work of the stage can be done.
        due_s: time by which the stage must be complete for its gain.
        late_s: time until which the stage may be computed without a gain.
        survive: probability that a request goes on after this stage.
        gain: expected weight of the requests that end with the stage.
        count: requests that each chain stands for, shape [chains].
    """

    owner: NDArray[np.int64]
    steps: NDArray[np.float64]
    work: NDArray[np.float64]
    share_s: NDArray[np.float64]
    start_s: NDArray[np.float64]
    due_s: NDArray[np.float64]
    late_s: NDArray[np.float64]
    survive: NDArray[np.float64]
    gain: NDArray[np.float64]
    count: NDArray[np.float64]

    @property
    def first(self) -> NDArray[np.int64]:
        """Index of the first stage of each chain."""
        return np.searchsorted(self.owner, np.arange(len(self.count)))

    def select(self, chains: NDArray[np.int64], count: NDArray[np.float64]) -> Stages:
        """Return some chains, in increasing order, each standing for this many requests."""
        new = np.full(len(self.count), -1)
        new[chains] = np.arange(len(chains))
        keep = new[self.owner] >= 0
        arrays = {f.name: getattr(self, f.name)[keep] for f in fields(self) if f.name != "count"}
        return Stages(**{**arrays, "owner": new[self.owner[keep]], "count": count})


def known_stages(
    demands: Sequence[Demand], resources: Resources, *, most_runs: int = _MOST_RUNS
) -> Stages:
    """Return the chains of requests whose lengths are known.

    A request that cannot be in time even alone on a replica has no gain.

    Args:
        demands: the requests.
        resources: resources of all replicas.
        most_runs: stages into which the decodes of a request are cut at most.
    """
    prompt, output, reused, weight, arrival, first_due, last_due = (
        np.array([getattr(d, name) for d in demands], dtype=float)
        for name in (
            "prompt_tokens", "output_tokens", "reusable_tokens", "weight", "arrival_s",
            "first_due_s", "last_due_s",
        )
    )  # fmt: skip
    decodes = output - 1
    wanted = np.ceil(decodes / (2 * _CONTEXT_LOSS * (prompt + decodes / 2)))
    runs = np.where(decodes > 0, np.clip(wanted, 1, np.minimum(most_runs, decodes)), 0)
    sizes = runs.astype(np.int64) + 1
    owner = np.repeat(np.arange(len(demands)), sizes)
    first = np.cumsum(sizes) - sizes
    run = np.arange(len(owner)) - first[owner] - 1  # -1 for the prompt
    per_run = decodes / np.maximum(runs, 1)
    begin = np.floor(np.maximum(run, 0) * per_run[owner])
    end = np.floor((run + 1) * per_run[owner] + 1e-6)
    table = _table(
        resources,
        is_prompt=run < 0,
        prompt=prompt[owner],
        reused=reused[owner],
        begin=begin,
        decodes=end - begin,
    )
    before, total = _sums(table["serial"], owner, first)
    start = arrival[owner] + before
    due = last_due[owner] - (total[owner] - before - table["serial"])
    due[first] = np.minimum(due[first], first_due)
    possible = np.logical_and.reduceat(start + table["serial"] <= due + ROUNDING_S, first)
    last = np.append(first[1:], len(owner)) - 1
    gain = np.zeros(len(owner))
    gain[last] = np.where(possible, weight, 0)
    survive = np.ones(len(owner))
    survive[last] = 0
    return Stages(
        owner=owner,
        steps=table["steps"],
        work=table["work"],
        share_s=table["share"],
        start_s=start,
        due_s=due,
        late_s=due,
        survive=survive,
        gain=gain,
        count=np.ones(len(demands)),
    )


def hidden_stages(
    demands: Sequence[Demand],
    resources: Resources,
    lengths: Mapping[str, Sequence[int]],
) -> Stages:
    """Return the chains of requests of which only the distribution of lengths is known.

    A stage of decodes spans a range of lengths. Its work is the expected number of decodes of a
    request that enters it and is not stopped. A policy could stop within the range instead, but
    the ranges are chosen such that this yields at most the same gain for the work (see `_ranges`).
    All lengths of a range have the deadline of the longest one, and read the context of the
    shortest one.

    Args:
        demands: the requests; their own lengths are not used.
        resources: resources of all replicas.
        lengths: output lengths of each kind, one for each request that the distribution is
            estimated from.
    """
    by_kind = {kind: _ranges(values) for kind, values in lengths.items()}
    kinds = [by_kind[d.kind] for d in demands]
    owner = np.repeat(np.arange(len(demands)), [len(k.end) for k in kinds])
    begin, shortest, end, expected, hazard = (
        np.concatenate([getattr(kind, name) for kind in kinds])
        for name in ("begin", "shortest", "end", "expected", "hazard")
    )
    prompt, reused, arrival, first_due, weight, ttft, tpot, e2e = (
        np.array([getattr(d, name) for d in demands], dtype=float)[owner]
        for name in (
            "prompt_tokens", "reusable_tokens", "arrival_s", "first_due_s", "weight",
            "ttft_s", "tpot_s", "e2e_s",
        )
    )  # fmt: skip
    is_prompt = begin == 0
    with np.errstate(invalid="ignore"):  # no pace of one token: 0 · infinity
        paced = np.where(end > 1, ttft + (end - 1) * tpot, ttft)
    due = np.where(is_prompt, first_due, arrival + np.minimum(paced, e2e))
    first = np.searchsorted(owner, np.arange(len(demands)))
    # A request whose first token is late is lost; a later stage may be late and caught up.
    late = np.where(is_prompt, first_due, np.maximum.reduceat(due, first)[owner])
    table = _table(
        resources,
        is_prompt=is_prompt,
        prompt=prompt,
        reused=reused,
        begin=np.maximum(begin - 1, 0),
        decodes=expected,
    )
    context = prompt + begin
    whole, _ = resources.prompt_times(prompt, reused)
    serial = np.where(is_prompt, whole, resources.decode_times(end - begin, context))
    least = np.where(is_prompt, whole, resources.decode_times(shortest - begin, context))
    before, _ = _sums(serial, owner, first)
    start = arrival + before
    return Stages(
        owner=owner,
        steps=table["steps"],
        work=table["work"],
        share_s=table["share"],
        start_s=start,
        due_s=due,
        late_s=late,
        survive=1 - hazard,
        gain=np.where(start + least <= due + ROUNDING_S, weight * hazard, 0),
        count=np.ones(len(demands)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranges:
    """Ranges of output lengths of a type; the first one is the prompt, which yields one token.

    Args:
        begin: tokens of a request that enters the range.
        shortest, end: shortest and longest length within the range.
        expected: expected number of decodes of a request that enters the range.
        hazard: probability that such a request ends within the range.
    """

    begin: NDArray[np.float64]
    shortest: NDArray[np.float64]
    end: NDArray[np.float64]
    expected: NDArray[np.float64]
    hazard: NDArray[np.float64]


def _ranges(lengths: Sequence[int]) -> _Ranges:
    """Cut lengths into ranges so that it is never better to stop within one.

    From where a range begins, its end is the length at which the expected number of decodes per
    ended request is smallest. No earlier stop yields more ended requests for the decodes. A range
    ends at `_RANGE` times its beginning, so that deadlines and contexts stay close to the true
    ones.
    """
    values, counts = np.unique(np.array(lengths, dtype=float), return_counts=True)
    dead = np.concatenate([[0], np.cumsum(counts)]) / counts.sum()
    if values[0] > 1:
        rows = [(0.0, 1.0, 1.0, 0.0, 0.0)]
        at, tokens = 0, 1.0
    else:
        rows = [(0.0, 1.0, 1.0, 0.0, float(dead[1]))]
        at, tokens = 1, 1.0
    while at < len(values):
        alive = 1 - dead[at]
        last = max(at + 1, int(np.searchsorted(values, max(tokens, _SHORT) * _RANGE, side="right")))
        # Decodes of a request that ends at each length, or survives up to it.
        gaps = np.diff(np.concatenate([[tokens], values[at:last]]))
        decodes = np.cumsum(gaps * (1 - dead[at:last])) / alive
        ended = (dead[at + 1 : last + 1] - dead[at]) / alive
        best = int(np.argmin(decodes / ended))
        end = float(values[at + best])
        rows.append((tokens, float(values[at]), end, float(decodes[best]), float(ended[best])))
        at, tokens = at + best + 1, end
    begin, shortest, ends, expected, hazard = np.array(rows).T
    return _Ranges(begin=begin, shortest=shortest, end=ends, expected=expected, hazard=hazard)


def _table(
    resources: Resources,
    *,
    is_prompt: NDArray[np.bool_],
    prompt: NDArray[np.float64],
    reused: NDArray[np.float64],
    begin: NDArray[np.float64],
    decodes: NDArray[np.float64],
) -> dict[str, NDArray[np.float64]]:
    """Return steps, work, and time over share of stages.

    Args:
        resources: resources of all replicas.
        is_prompt: True for the stage of a prompt.
        prompt, reused: tokens of the prompt, and how many of them need not be computed.
        begin: decodes before the stage.
        decodes: decodes of the stage.
    """
    context = prompt + begin + 1
    work = np.where(
        is_prompt[:, None],
        resources.prompt_work(prompt, reused),
        resources.decode_work(decodes, context, reused),
    )
    whole, share = resources.prompt_times(prompt, reused)
    decode_s = resources.decode_times(decodes, context)
    return {
        "work": work,
        "steps": np.where(is_prompt, 1, decodes),
        "serial": np.where(is_prompt, whole, decode_s),
        "share": np.where(is_prompt, share, decode_s),
    }


def _sums(
    values: NDArray[np.float64], owner: NDArray[np.int64], first: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the sum before each stage within its chain, and the total of each chain."""
    running = np.cumsum(values) - values
    return running - running[first][owner], np.add.reduceat(values, first)
