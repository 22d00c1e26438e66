"""Linear lower bounds on step times, from which upper bounds on goodput follow.

Every form of step time is bounded from below by lines in what a step holds. A step takes at least
as long as each of its lines. Used by `benchmarks.bounds`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from goodput_core.steptime.forms import DistServeForm, RooflineForm, TableForm, UnitForm
from goodput_core.units import NS_PER_S
from goodput_engine.device.profile import Overlap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_engine.device.profile import DeviceProfile

__all__ = ["Capacity", "StepBound", "capacity_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """A line below the time of every step, in seconds.

    Args:
        step_s: time of a step, whatever it holds.
        prompt_token_s: time per computed prompt token.
        prompt_context_s: time per prompt token that attention reads, cached ones included.
        prompt_s: time per prompt.
        decode_s: time per decode.
        decode_context_s: time per context token of a decode.
    """

    step_s: float = 0
    prompt_token_s: float = 0
    prompt_context_s: float = 0
    prompt_s: float = 0
    decode_s: float = 0
    decode_context_s: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A replica, as far as the bounds know it.

    Args:
        steps: lines below the time of a step, all of which hold.
        kv_tokens: tokens that the KV pool holds; infinite for no limit.
        max_num_seqs: requests in one step.
        max_step_tokens: tokens in one step.
        chunk_tokens: prompt tokens of one request that are computed in the shortest step.
        overlapping: steps that run at once; the pipeline stages.
    """

    steps: tuple[StepBound, ...]
    kv_tokens: float = math.inf
    max_num_seqs: float = math.inf
    max_step_tokens: float = math.inf
    chunk_tokens: float = math.inf
    overlapping: int = 1

    @property
    def shortest_step_s(self) -> float:
        """A time that no step undercuts."""
        return max(line.step_s for line in self.steps)


def capacity_of(
    profile: DeviceProfile,
    *,
    max_num_seqs: float = math.inf,
    max_step_tokens: float = math.inf,
) -> Capacity:
    """Return the capacity of a device profile.

    Raises:
        ValueError: if no linear lower bounds are known for the profile's form.
    """
    host = StepBound(
        step_s=profile.host_ns_per_step / NS_PER_S,
        prompt_s=profile.host_ns_per_request / NS_PER_S,
        decode_s=profile.host_ns_per_request / NS_PER_S,
    )
    chunk_tokens = math.inf
    match profile.form:
        case RooflineForm() as form:
            c0, c1, c2, c4 = (
                ns / NS_PER_S
                for ns in (
                    form.c0_ns,
                    form.c1_ns_per_token,
                    form.c2_ns_per_context_token,
                    form.c4_ns_per_request,
                )
            )
            memory = StepBound(
                step_s=c0, prompt_context_s=c2, prompt_s=c4, decode_s=c4, decode_context_s=c2
            )
            device = [memory, replace(memory, step_s=0, prompt_token_s=c1, decode_s=c1 + c4)]
        case UnitForm() as form:
            device = [StepBound(step_s=form.unit_ns / NS_PER_S)]
            chunk_tokens = form.chunk_tokens or math.inf
        case TableForm() as form:
            device = [
                StepBound(step_s=step_s, prompt_token_s=token_s, decode_s=token_s)
                for step_s, token_s in _table_lines(form)
            ]
        case DistServeForm() as form:
            device = _distserve_lines(form)
        case _:
            message = f"profile {profile.name}: form {profile.form_name} has no linear bounds"
            raise ValueError(message)
    if profile.overlap is Overlap.MAX:
        device = [*device, host]
    else:
        device = [
            replace(
                line,
                step_s=line.step_s + host.step_s,
                prompt_s=line.prompt_s + host.prompt_s,
                decode_s=line.decode_s + host.decode_s,
            )
            for line in device
        ]
    return Capacity(
        steps=tuple(line for line in device if line != StepBound()),
        kv_tokens=profile.kv_blocks * profile.block_size,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        chunk_tokens=chunk_tokens,
        overlapping=profile.pipeline_parallel,
    )


def _table_lines(form: TableForm) -> list[tuple[float, float]]:
    """Return (time of no token, time per token) of the lines below a table.

    A table's time depends on decodes and prefill tokens. The lines bound the shortest time of a
    step with so many tokens of either kind.
    """
    shortest: dict[int, float] = {}
    for decodes, row in zip(form.decodes, form.times_ns, strict=True):
        for prefill, time_ns in zip(form.prefill_tokens, row, strict=True):
            tokens = decodes + prefill
            shortest[tokens] = min(time_ns / NS_PER_S, shortest.get(tokens, math.inf))
    # Beyond its last column, a table continues with the slope before it.
    width = form.prefill_tokens[-1] - form.prefill_tokens[-2]
    last = min((row[-1] - row[-2]) / width / NS_PER_S for row in form.times_ns)
    hull = _lower_hull(shortest.items())
    lines = [
        (y - slope * x, slope)
        for (x, y), slope in zip(hull, _slopes(hull), strict=False)
        if 0 < slope <= last
    ]
    return [(hull[0][1], 0.0), *lines]


def _distserve_lines(form: DistServeForm) -> list[StepBound]:
    """Return the lines below DistServe's form; the squares of prompts are omitted.

    Decode time by requests has two regimes and may fall between them, so its lower hull counts.
    """
    small, large, threshold = form.small, form.large, form.large_from_requests
    points = {
        float(count): regime.fixed_ns + regime.ns_per_request * count
        for regime, counts in ((small, (1, threshold - 1)), (large, (threshold, 2 * threshold)))
        for count in counts
        if count >= 1
    }
    hull = _lower_hull(points.items())
    context = min(small.ns_per_context_token, large.ns_per_context_token)
    least = min(y / x for x, y in hull)
    lines = [(0.0, min(least, large.ns_per_request)), (min(y for _, y in hull), 0.0)]
    lines += [
        (y - slope * x, slope)
        for (x, y), slope in zip(hull, _slopes(hull), strict=False)
        if 0 < slope <= large.ns_per_request and y > slope * x
    ]
    return [
        StepBound(
            step_s=min(form.prefill_fixed_ns, fixed_ns) / NS_PER_S,
            prompt_token_s=form.prefill_ns_per_token / NS_PER_S,
            decode_s=slope_ns / NS_PER_S,
            decode_context_s=context / NS_PER_S,
        )
        for fixed_ns, slope_ns in lines
    ]


def _lower_hull(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of the largest convex function below some points."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def _slopes(hull: Sequence[tuple[float, float]]) -> list[float]:
    return [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(hull)]
