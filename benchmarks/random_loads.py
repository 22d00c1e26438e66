"""`slo` against other policies on loads drawn at random.

The cells of `policies_everywhere` are a design: their mixes, targets and fleets were chosen. Here a
number draws everything: device, fleet, one to three kinds of requests with their lengths,
targets, priorities and weights, the arrival process, and the rate. Targets are a multiple of the
times of an idle device, so that they can be met.

For each load, the command prints the share of the admitted requests that are in time, of those
whose targets can be ensured, and the mean difference of the kept promises to the best other policy.
Both are compared as in `policies_everywhere`.

    python -m benchmarks.random_loads --first 200 --count 40
    python -m benchmarks.random_loads --first 4 --count 1 --seeds 5 --policies slo,priority --json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final

from benchmarks.comparison.admitted import Admitted
from benchmarks.comparison.arguments import names_of, positive_count
from benchmarks.comparison.cells import Cell, Fleet, run_cell
from benchmarks.comparison.loads import MIXES, Arrivals, Kind, Load, Mix, Range
from benchmarks.comparison.rule import SURE_SHARE, TOLERANCE, compare

from goodput_core.spec.choices import Policy, Preemption
from goodput_core.steptime import StepShape
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.scheduler.policies.registry import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.device.profile import DeviceProfile

__all__ = ["RandomLoad", "main", "random_cell", "serve"]

_DEVICES: Final = ("llama-3-8b-h100", "llama-3-70b-4xh100", "llama-3-70b-4xh100", "unit")
_POLICIES: Final = (Policy.SLO, Policy.SJF, Policy.FASTSERVE, Policy.PRIORITY)
_FIRST_SEED: Final = 10_000
_BLOCK: Final = 16
_BATCH: Final = 16
"""The work of an output token is estimated beside so many decodes."""
_LEAST_REQUESTS, _MOST_REQUESTS = 120, 600
_HORIZON_SLACKS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLoad:
    """The result of a load.

    Args:
        number: number of the load, from which it is drawn.
        load: the load in words.
        requests: number of requests, over all seeds.
        share: mean share of the offered weight that `slo` keeps.
        admitted, in_time: admitted requests whose targets can be ensured, and those in time.
        closest: the other policy that keeps most.
        difference: mean difference to it, in shares of the offered weight.
    """

    number: int
    load: str
    requests: int
    share: float
    admitted: int
    in_time: int
    closest: str
    difference: float


def random_cell(number: int) -> tuple[Cell, Mix]:
    """Draw a load and a fleet from a number."""
    rng = random.Random(number)
    device = rng.choice(_DEVICES)
    profile = Fleet(device=device).profile()
    cuts = sorted(rng.random() for _ in range(rng.choice([1, 2, 2, 3]) - 1))
    shares = [high - low for low, high in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
    kinds = [
        _kind(rng, share, f"kind-{at}", profile, on_unit=device == "unit")
        for at, share in enumerate(shares)
    ]
    if any(kind.ttft_ms is None or kind.tpot_ms is None for kind in kinds):
        # Weights come from the classes of a manifest, which have both targets.
        kinds = [replace(kind, weight=1) for kind in kinds]
    mix = Mix(name=f"random-{number}", kinds=tuple(kinds))
    fleet = Fleet(
        device=device,
        max_num_seqs=rng.choice([16, 64, 256]),
        token_budget=rng.choice([512, 2048, 8192]),
        replicas=rng.choice([1, 1, 1, 2, 4]),
    )
    longest = max(-(-(kind.prompt.high + kind.output.high) // _BLOCK) + 2 for kind in kinds)
    blocks = rng.choice([None, max(longest * 2, 200), max(longest * 4, 400)])
    if blocks is not None:
        fleet = replace(fleet, kv_blocks=min(blocks, profile.kv_blocks))
    work_s = sum(kind.share * _work_ns(kind, profile) for kind in kinds) / NS_PER_S
    rate = rng.choice([0.4, 0.6, 0.8, 1, 1.3, 2, 3]) / work_s * fleet.replicas
    load = Load(
        mix=mix.name,
        rate_per_s=rate,
        horizon_s=min(
            max(_HORIZON_SLACKS * mix.longest_slack_s, _LEAST_REQUESTS / rate),
            _MOST_REQUESTS / rate,
        ),
        arrivals=rng.choice(list(Arrivals)),
        known_lengths=rng.random() < 0.5,
    )
    cell = Cell(name=mix.name, load=load, fleet=fleet, preemption=rng.choice(list(Preemption)))
    return cell, mix


def _kind(
    rng: random.Random, share: float, name: str, profile: DeviceProfile, *, on_unit: bool
) -> Kind:
    """Draw a kind of requests whose targets an idle device can meet."""
    prompt = int(10 ** (rng.uniform(0.9, 2.3) if on_unit else rng.uniform(1.3, 3.9)))
    output = int(10 ** rng.uniform(0.5, 2.4))
    spread = rng.choice([1, 1.5, 3, 6])
    prompts = _range(prompt, spread, 300 if on_unit else 16_000)
    outputs = _range(output, spread, 600)
    prompt_ms = profile.form.step_ns(StepShape.of(chunks=[(0, prompts.high)])) / NS_PER_MS
    one = StepShape.of(decodes=1, decode_context_tokens=prompts.high + outputs.high)
    token_ms = profile.form.step_ns(one) / NS_PER_MS
    targets: dict[str, Any] = {}
    form = rng.choice(["both", "both", "both", "end to end", "first token"])
    priority, weight = rng.choice([0, 0, 0, 1]), rng.choice([1, 1, 1, 3])
    if form == "end to end":
        low = (prompt_ms + outputs.high * token_ms) * rng.uniform(1.2, 3)
        targets["slack_ms"] = Range(int(low) + 1, int(low * rng.uniform(1, 2)) + 2)
    else:
        least_ms = 2 if on_unit else 22
        targets["ttft_ms"] = int(prompt_ms * rng.uniform(2, 10)) + least_ms
        targets["tpot_ms"] = max(int(token_ms * rng.uniform(1.8, 5)) + 1, 2)
    return Kind(
        share=share,
        prompt=prompts,
        output=outputs,
        slo_class=name,
        priority=priority,
        weight=weight,
        **targets,
    )


def _range(middle: int, spread: float, most: int) -> Range:
    high = min(max(2, int(middle * spread)), most)
    return Range(min(max(1, int(middle / spread)), high), high)


def _work_ns(kind: Kind, profile: DeviceProfile) -> float:
    """Return the estimated device time of a request, in a batch of others."""
    prompt = (kind.prompt.low + kind.prompt.high) // 2
    output = (kind.output.low + kind.output.high) // 2
    decodes = StepShape.of(decodes=_BATCH, decode_context_tokens=_BATCH * (prompt + output // 2))
    prompt_ns = profile.form.step_ns(StepShape.of(chunks=[(0, prompt)]))
    return 0.8 * prompt_ns + output * profile.form.step_ns(decodes) / _BATCH


def serve(number: int, policies: Sequence[str], seeds: int) -> RandomLoad:
    """Serve a load with each policy on the same seeds."""
    cell, mix = random_cell(number)
    MIXES[mix.name] = mix
    try:
        runs = {
            policy: [run_cell(cell, policy, _FIRST_SEED + seed) for seed in range(seeds)]
            for policy in policies
        }
    finally:
        del MIXES[mix.name]
    ours = runs[Policy.SLO]
    parts = reduce(Admitted.plus, (run.admitted_parts for run in ours), Admitted())
    differences = [
        (statistics.fmean(compare(ours, theirs)[1]), policy)
        for policy, theirs in runs.items()
        if policy != Policy.SLO
    ]
    difference, closest = min(differences, default=(0.0, ""))
    fleet, load = cell.fleet, cell.load
    return RandomLoad(
        number=number,
        load=", ".join(
            (
                fleet.device,
                f"{len(mix.kinds)} kinds",
                load.arrivals,
                f"{fleet.replicas} replicas",
                cell.preemption,
                "known" if load.known_lengths else "hidden",
                f"{fleet.profile().kv_blocks} blocks",
                f"{fleet.max_num_seqs} places",
            )
        ),
        requests=sum(run.offered for run in ours),
        share=statistics.fmean(run.share for run in ours),
        admitted=parts.sure,
        in_time=parts.sure_kept,
        closest=closest,
        difference=difference,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve random loads and print how `slo` fares on them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first load (%(default)s)"
    )
    parser.add_argument("--count", type=positive_count, default=20, help="(%(default)s)")
    parser.add_argument("--seeds", type=positive_count, default=3, help="per load (%(default)s)")
    parser.add_argument(
        "--policies",
        type=names_of(POLICIES),
        default=",".join(_POLICIES),
        help="comma-separated; `slo` is always served (%(default)s)",
    )
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="a short form: two loads and one seed")
    options = parser.parse_args(argv)
    if options.quick:
        options.count, options.seeds = 2, 1
    policies = dict.fromkeys([Policy.SLO.value, *options.policies])
    numbers = range(options.first, options.first + options.count)
    with ProcessPoolExecutor(options.jobs) as pool:
        results = []
        served = partial(serve, policies=list(policies), seeds=options.seeds)
        for result in pool.map(served, numbers):
            results.append(result)
            if not options.json:
                _show(result)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        _summarise(results)
    return 0


def _show(result: RandomLoad) -> None:
    in_time = f"{result.in_time / result.admitted:7.2%}" if result.admitted else f"{'':7}"
    print(
        f"{result.number:5}  {result.requests:5}  slo {result.share:6.1%}"
        f"  {in_time} of {result.admitted:5}  {result.closest:9} {result.difference:+7.2%}"
        f"  {result.load}",
        flush=True,
    )


def _summarise(results: Sequence[RandomLoad]) -> None:
    judged = [result for result in results if result.admitted >= _LEAST_REQUESTS]
    admitted = sum(result.admitted for result in judged)
    late = sum(result.in_time < SURE_SHARE * result.admitted for result in judged)
    below = sum(result.difference < -TOLERANCE for result in results)
    print(
        f"{len(results)} loads. Of {admitted} admitted requests whose targets can be ensured,"
        f" {sum(result.in_time for result in judged) / max(1, admitted):.2%} are in time; under"
        f" {SURE_SHARE:.0%} in {late} of {len(judged)} loads. `slo` keeps over {TOLERANCE:.0%} less"
        f" than another policy in {below} loads."
    )


if __name__ == "__main__":
    sys.exit(main())
